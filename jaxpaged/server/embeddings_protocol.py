"""Bodies of /v1/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from jaxpaged.server.chat_protocol import TemplateFields
from jaxpaged.server.protocol import Prompt, PromptFields
from jaxpaged.server.responses import Usage


class EmbeddingFields(PromptFields):
    """What both forms of a request have in common."""

    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: the bytes of the numbers as float32."
    )
    embed_dtype: Literal["float32"] = Field(default="float32", description="Of base64; only float32.")
    endianness: Literal["native", "little", "big"] = Field(
        default="native", description="Of base64; native is little endian."
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Refused unless it is the model's own number: embeddings are not cut."
    )
    use_activation: bool | None = Field(default=None, description="Scale embeddings to length 1; true by default.")
    normalize: bool | None = Field(default=None, description="The older name of use_activation.")
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description='The side of the prompt that is cut off; "right" by default.'
    )
    padding: Literal["do_not_pad"] | None = Field(default=None, description="Prompts are never padded.")

    @property
    def normalizes(self) -> bool:
        return next((v for v in (self.use_activation, self.normalize) if v is not None), True)


class EmbeddingsRequest(EmbeddingFields):
    input: Prompt = Field(description="Text or token ids of one or more prompts.")
    add_special_tokens: bool = Field(default=True, description="Add BOS etc. to a text prompt.")


class EmbeddingsChatRequest(EmbeddingFields, TemplateFields):
    add_generation_prompt: bool = Field(default=False, description="End with the start of the assistant's turn.")


class Embedding(BaseModel):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class Embeddings(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
