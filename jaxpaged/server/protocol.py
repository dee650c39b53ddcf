"""Request bodies of the API: fields, types and ranges. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from jaxpaged.core.beam import MAX_LENGTH_PENALTY
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)

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

    suffix: str | None = Field(default=None, description="Not supported yet.")
    functions: list[Any] | None = Field(default=None, description="Not supported.")
    function_call: str | dict[str, Any] | None = Field(default=None, description="Not supported.")
    thinking_token_budget: int | None = Field(default=None, description="Not supported yet.")
    repetition_detection: dict[str, Any] | None = Field(default=None, description="Not supported yet.")
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


class PromptFields(ApiModel):
    """What all requests with a prompt have in common."""

    model: str | None = Field(default=None, description="A name that /v1/models lists; null is the first one.")
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="Keep that many prompt tokens; -1: as many as the model's length limit allows."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description='The side of the prompt that is cut off; "left" by default.'
    )
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


_RESPONSE_FORMAT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["schema"],
        },
        "structures": {"type": "array", "items": {"type": "object"}},
        "triggers": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["type"],
}
_STRUCTURED_OUTPUTS = {
    "type": "object",
    "properties": {
        "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "grammar": {"type": "string"},
        "json_object": {"type": "boolean"},
        "structural_tag": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "disable_any_whitespace": {"type": "boolean"},
    },
}


class GenerationRequest(UnsupportedFields, PromptFields):
    """What chat and text completions have in common."""

    response_format: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_RESPONSE_FORMAT, {"type": "null"}]})
    ] = Field(
        default=None,
        description="Form of the output: text, json_object, json_schema or structural_tag. With strict false what "
        "cannot be enforced of a schema is left out, else refused.",
    )
    structured_outputs: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_STRUCTURED_OUTPUTS, {"type": "null"}]})
    ] = Field(
        default=None,
        description="Form of the output: one of json, regex, choice, grammar, json_object and structural_tag.",
    )
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
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Taken off a token's logit for each time the output has it."
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Taken off the logit of each token that the output has."
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Above 1 makes tokens of prompt and output less likely. Default: the generation config, or 1.",
    )
    logit_bias: dict[str, float] | None = Field(
        default=None,
        max_length=MAX_LOGIT_BIASES,
        description="Token id -> what is added to its logit, clamped to -100 to 100.",
    )
    bad_words: list[str] | None = Field(
        default=None, max_length=MAX_BAD_WORDS, description="Texts that the output must not have."
    )
    allowed_token_ids: list[int] | None = Field(default=None, description="The only tokens that may be drawn.")
    min_tokens: int | None = Field(
        default=None, ge=0, description="Before that many output tokens nothing but max_tokens ends the output."
    )
    logprob_token_ids: list[int] | None = Field(
        default=None,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        description="Tokens whose log-probabilities are reported at each output position.",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=-1,
        description="Most probable tokens to report at each position of the prompt; -1 is all. Not with stream.",
    )
    include_stop_str_in_output: bool = Field(default=False, description="Keep the stop string at the end of the text.")
    ignore_eos: bool = Field(default=False, description="Go on after an end-of-sequence token.")
    use_beam_search: bool | None = Field(
        default=None,
        description="Find the n most probable outputs, best first, instead of drawing. Not with stream, logprobs, stop "
        "strings, or what changes probabilities; temperature and seed have no effect.",
    )
    length_penalty: float | None = Field(
        default=None,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="Of a beam search: outputs are ranked by logprob / length ** length_penalty. 1 by default.",
    )
    skip_special_tokens: bool = Field(default=True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = Field(default=True, description="Accepted, without effect.")
    stream: bool | None = Field(default=None, description="Send the output as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    return_token_ids: bool | None = Field(default=None, description="Add token ids of prompt and output to the answer.")
    return_prompt_text: bool | None = Field(default=None, description="Add the prompt's text to the answer.")
    echo: bool | None = Field(
        default=None, description="Completions: begin with the prompt. Chats: begin with the message that is continued."
    )
    stream_interval: int | None = Field(
        default=None, ge=1, description="Tokens of a choice in each chunk after the first. Default: the server's, 1."
    )
    return_tokens_as_token_ids: bool | None = Field(default=None, description='Name tokens in logprobs "token_id:N".')

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs is not available with stream=true; leave one of them out", param="prompt_logprobs"
            )
        return self


class UnsupportedInText(ApiModel):
    """Parameters of chats that text completions refuse."""

    tools: list[dict[str, Any]] | None = Field(default=None, description="Only for chats.")
    tool_choice: str | dict[str, Any] | None = Field(default=None, description='Only for chats: must be "none".')


class CompletionRequest(GenerationRequest, UnsupportedInText):
    prompt: Prompt = Field(description="Text or token ids of one or more prompts.")
    max_tokens: int | None = Field(
        default=None, ge=0, description="Most output tokens; 16 by default. 0 only with echo."
    )
    logprobs: int | None = Field(default=None, ge=-1, description="Most probable tokens to report; -1 is all.")
    add_special_tokens: bool = Field(default=True, description="Add BOS etc. to a text prompt.")


class TokenizeTextRequest(ApiModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
