"""Request bodies of the API: fields, types and ranges. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import MAX_N

MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 4
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class ApiModel(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


def _check_stop(value: str | list[str] | None) -> str | list[str] | None:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}")
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    return value


def _check_cache_salt(value: str | None) -> str | None:
    if value is not None and (not 1 <= len(value) <= 128 or any(c in value for c in "@/\\\0")):
        raise ValueError("must be 1 to 128 characters long, without '@', '/', '\\' and NUL")
    return value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(t) is int for t in value)


def _check_prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    is_list = isinstance(value, list)
    if not (
        isinstance(value, str)
        or _is_token_ids(value)
        or (is_list and all(isinstance(p, str) for p in value))
        or (is_list and all(_is_token_ids(p) for p in value))
    ):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if is_list and value and not isinstance(value[0], int) and len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in a request, got {len(value)}")
    if not value or (is_list and not all(p or isinstance(p, int) for p in value)):
        raise ValueError("the prompt is empty; give at least one token")
    return value


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    ),
]
Seed = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


class StreamOptions(ApiModel):
    include_usage: bool | None = Field(default=None, description="Send a last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: send the counts so far in every chunk."
    )


class UnsupportedFields(ApiModel):
    """Parameters of the API that cannot be honoured yet; refused unless they ask for nothing."""

    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Not supported yet: must be 0.")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Not supported yet: must be 0.")
    repetition_penalty: float | None = Field(default=None, gt=0, description="Not supported yet: must be 1.")
    min_tokens: int | None = Field(default=None, ge=0, description="Not supported yet: must be 0.")
    logit_bias: dict[str, float] | None = Field(default=None, description="Not supported yet.")
    bad_words: list[str] | None = Field(default=None, description="Not supported yet.")
    allowed_token_ids: list[int] | None = Field(default=None, description="Not supported yet.")
    logprob_token_ids: list[int] | None = Field(default=None, description="Not supported yet.")
    prompt_logprobs: int | None = Field(default=None, ge=-1, description="Not supported yet.")
    echo: bool | None = Field(default=None, description="Not supported yet: must be false.")
    suffix: str | None = Field(default=None, description="Not supported yet.")
    tools: list[dict[str, Any]] | None = Field(default=None, description="Not supported yet.")
    tool_choice: str | dict[str, Any] | None = Field(default=None, description='Not supported yet: must be "none".')
    functions: list[Any] | None = Field(default=None, description="Not supported.")
    function_call: str | dict[str, Any] | None = Field(default=None, description="Not supported.")
    response_format: dict[str, Any] | None = Field(default=None, description='Only {"type": "text"} yet.')
    structured_outputs: dict[str, Any] | None = Field(default=None, description="Not supported yet.")
    use_beam_search: bool | None = Field(default=None, description="Not supported yet: must be false.")
    thinking_token_budget: int | None = Field(default=None, description="Not supported yet.")
    repetition_detection: dict[str, Any] | None = Field(default=None, description="Not supported yet.")
    return_prompt_text: bool | None = Field(default=None, description="Not supported yet: must be false.")
    prompt_embeds: Any = Field(default=None, description="Not supported.")
    logits_processors: list[Any] | None = Field(default=None, description="Not supported.")
    modalities: list[str] | None = Field(default=None, description='Not supported, other than ["text"].')
    audio: dict[str, Any] | None = Field(default=None, description="Not supported.")
    web_search_options: dict[str, Any] | None = Field(default=None, description="Not supported.")
    best_of: int | None = Field(default=None, description="Removed: use n.")
    guided_json: Any = Field(default=None, description="Removed: use structured_outputs.")
    guided_regex: Any = Field(default=None, description="Removed: use structured_outputs.")
    guided_choice: Any = Field(default=None, description="Removed: use structured_outputs.")
    guided_grammar: Any = Field(default=None, description="Removed: use structured_outputs.")


class GenerationRequest(UnsupportedFields):
    """What chat and text completions have in common."""

    model: str | None = Field(default=None, description="A name that /v1/models lists; null is the first one.")
    n: int | None = Field(default=None, ge=1, le=MAX_N, description="Choices to draw for each prompt; 1 by default.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy. Default: the model's generation config, or 1."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default: the model's generation config, or 1.")
    top_k: int | None = Field(
        default=None, ge=-1, lt=2**31, description="0 and -1 are off. Default: the model's generation config, or off."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="0 (the default) is off.")
    seed: Seed | None = Field(default=None, description="Choice i uses seed + i. Default: a new one for each request.")
    stop: Annotated[str | list[str] | None, AfterValidator(_check_stop)] = Field(
        default=None, description=f"Up to {MAX_STOP_STRINGS} strings that end the output."
    )
    stop_token_ids: list[int] | None = Field(default=None, description="Token ids that end the output.")
    include_stop_str_in_output: bool = Field(default=False, description="Keep the stop string at the end of the text.")
    ignore_eos: bool = Field(default=False, description="Go on after an end-of-sequence token.")
    skip_special_tokens: bool = Field(default=True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = Field(default=True, description="Accepted, without effect.")
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="Keep that many prompt tokens; -1: as many as the model's length limit allows."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description='The side of the prompt that is cut off; "left" by default.'
    )
    stream: bool | None = Field(default=None, description="Send the output as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    priority: int = Field(
        default=0,
        ge=INT64_MIN,
        le=INT64_MAX,
        description="Lower is served first, under the priority policy. The header X-Vllm-Priority goes before it.",
    )
    request_id: str | None = Field(default=None, max_length=256, description="Becomes a part of the answer's id.")
    cache_salt: Annotated[str | None, AfterValidator(_check_cache_salt)] = Field(
        default=None, description="Share cached prefixes only with requests that have the same salt."
    )
    return_token_ids: bool | None = Field(default=None, description="Add token ids of prompt and output to the answer.")
    return_tokens_as_token_ids: bool | None = Field(default=None, description='Name tokens in logprobs "token_id:N".')

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true", param="stream_options")
        return self


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(description="Text or token ids of one or more prompts.")
    max_tokens: int | None = Field(default=None, ge=0, description="Most output tokens; 16 by default.")
    logprobs: int | None = Field(default=None, ge=-1, description="Most probable tokens to report; -1 is all.")
    add_special_tokens: bool = Field(default=True, description="Add BOS etc. to a text prompt.")


class ContentPart(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(ApiModel):
    """A message of the conversation; further fields are handed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart | str] | None = None


class TemplateFields(ApiModel):
    """How messages become a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = Field(default=True, description="End with the start of the assistant's turn.")
    continue_final_message: bool = Field(default=False, description="Leave the last message open.")
    add_special_tokens: bool = Field(default=False, description="Add BOS etc. to what the chat template gives.")
    chat_template: str | None = Field(default=None, description="Jinja template to use; where the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template.")
    documents: list[dict[str, Any]] | None = Field(default=None, description="Documents for the chat template.")
    reasoning_effort: str | None = Field(default=None, description="Handed to the chat template.")

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true; set one to false",
                param="continue_final_message",
            )
        return self


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Goes before max_tokens.")
    max_tokens: int | None = Field(default=None, ge=1, description="Default: what the model's length limit leaves.")
    logprobs: bool | None = Field(default=None, description="Report the log-probability of each output token.")
    top_logprobs: int | None = Field(
        default=None, ge=-1, description="Most probable tokens to report at each position (-1 is all); needs logprobs."
    )

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return self


class TokenizeTextRequest(ApiModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplateFields):
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
