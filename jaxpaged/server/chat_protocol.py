"""Bodies of requests with messages: chats, and what else is made of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from jaxpaged.errors import InvalidRequestError
from jaxpaged.messages import parse_arguments
from jaxpaged.server.protocol import ApiModel, GenerationRequest


class ContentPart(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class MessageFunction(ApiModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(parse_arguments),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
    ] = Field(default_factory=dict, description="A JSON object, or the text of one.")


class MessageToolCall(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: MessageFunction


class ChatMessage(ApiModel):
    """A message of the conversation; further fields are handed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart | str] | None = None
    tool_calls: list[MessageToolCall] | None = Field(default=None, description="Calls of an assistant's message.")


class FunctionDefinition(ApiModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        default=None, description="Refuse a schema of which not all can be enforced, where a call is enforced."
    )


class ToolDefinition(ApiModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class NamedToolChoice(ApiModel):
    type: Literal["function"] = "function"
    function: FunctionName


class TemplateFields(ApiModel):
    """How messages become a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = Field(default=True, description="End with the start of the assistant's turn.")
    continue_final_message: bool = Field(default=False, description="Leave the last message open.")
    add_special_tokens: bool = Field(default=False, description="Add BOS etc. to what the chat template gives.")
    chat_template: str | None = Field(default=None, description="Jinja template to use; where the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template.")
    documents: list[dict[str, Any]] | None = Field(default=None, description="Documents for the chat template.")
    tools: list[ToolDefinition] | None = Field(
        default=None, min_length=1, description="Functions that the model may call; shown by the chat template."
    )
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

    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        default=None,
        description='"auto" (the default with tools): the model decides; "none": calls stay text; "required": it must '
        "call; or the function to call.",
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False keeps the first call only.")
    include_reasoning: bool = Field(default=True, description="False leaves the reasoning out of the answer.")

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return self


class TokenizeChatRequest(TemplateFields):
    model: str | None = None
    return_token_strs: bool | None = None
