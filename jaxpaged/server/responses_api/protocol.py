"""Body of a request to /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from jaxpaged.errors import InvalidRequestError
from jaxpaged.messages import parse_arguments
from jaxpaged.server.chat_protocol import ContentPart
from jaxpaged.server.protocol import ApiModel, GenerationRequest

MAX_METADATA = 16


class InputMessage(ApiModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart | str]


class InputCall(ApiModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="Text of a JSON object.")


class InputCallOutput(ApiModel):
    """What a call of the model's gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart | str]


class InputThought(ApiModel):
    """A part of the model's reasoning."""

    text: str


class InputReasoning(ApiModel):
    """Reasoning of the model that led to the assistant's next message or call."""

    type: Literal["reasoning"]
    content: list[InputThought] | None = None
    summary: list[InputThought] | None = None


def _item_type(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="the type of an item must be message, function_call, function_call_output or reasoning",
    ),
]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _check_arguments(items: list[InputItem]) -> list[InputItem]:
    """Of calls that a client gives; those that the model broke off are no JSON."""
    for i, item in enumerate(items):
        if isinstance(item, InputCall):
            try:
                parse_arguments(item.arguments)
            except ValueError as error:
                name = f"input.{i}.arguments"
                raise InvalidRequestError(f"{name}: {error}", param=name) from None
    return items


Input = Annotated[
    list[InputItem],
    BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    AfterValidator(_check_arguments),
]


class FunctionTool(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = None


class NamedFunction(ApiModel):
    type: Literal["function"]
    name: str


class Reasoning(ApiModel):
    model_config = ConfigDict(extra="allow")

    effort: str | None = Field(default=None, description="Handed to the chat template as reasoning_effort.")


class TextFormat(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(ApiModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = Field(default=None, description="Form of the answer's text.")


def _check_metadata(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} entries are allowed, got {len(value)}")
    return value


class ResponsesRequest(GenerationRequest):
    input: Input = Field(min_length=1, description="A text, or the items of a conversation.")
    instructions: str | None = Field(default=None, description="System message, before the input; not carried over.")
    max_output_tokens: int | None = Field(default=None, ge=1, description="Default: what the length limit leaves.")
    previous_response_id: str | None = Field(default=None, description="A stored response that this one goes on from.")
    store: bool | None = Field(default=None, description="Keep the response for later requests; true by default.")
    background: bool | None = Field(default=None, description="Answer at once; needs store, and excludes stream.")
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_check_metadata)] = Field(
        default=None, description=f"Up to {MAX_METADATA} texts that are kept with the response."
    )
    tools: list[FunctionTool] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        default=None, description="As in chats."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False keeps the first call only.")
    max_tool_calls: int | None = Field(default=None, ge=1, description="Accepted, without effect: no tool runs here.")
    reasoning: Reasoning | None = Field(default=None, description="Only effort has an effect.")
    include_reasoning: bool = Field(default=True, description="False leaves the reasoning out of the answer.")
    text: TextOptions | None = Field(default=None, description="Only format has an effect.")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        description='Most probable tokens; with "message.output_text.logprobs" in include. Not where an answer may '
        "have calls or reasoning: it could not be told whose they are.",
    )
    include: list[str] | None = Field(
        default=None, description='"message.output_text.logprobs"; others are accepted, without effect.'
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description='"auto" cuts off the front of a prompt that is too long.'
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template.")
    user: str | None = Field(default=None, description="Echoed.")
    conversation: Any = Field(default=None, description="Not supported: use previous_response_id.")
    prompt: Any = Field(default=None, description="Not supported.")
    context_management: Any = Field(default=None, description="Not supported.")
    moderation: Any = Field(default=None, description="Not supported.")
