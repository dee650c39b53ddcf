"""openai-python against the real engine on a tiny random model: whatever it draws has the form that was asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionToolUnionParam
from pydantic import BaseModel, ConfigDict, Field
from server.fake_engine import BOS, EOS, make_tokenizer
from server.live_server import Client, running_server
from support import random_model, tiny_config

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.server.config import ServerConfig
from jaxpaged.weights import GenerationConfig

CONFIG = EngineConfig(
    block_size=8, num_blocks=200, max_num_seqs=4, max_num_batched_tokens=32, compilation_cache="", warmup=False
)
USER: list[Any] = [{"role": "user", "content": "hi"}]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["bolt", "nut"]
    size: int = Field(ge=1, le=99)


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parts: list[Part] = Field(max_length=2)
    note: str | None = Field(max_length=10)
    urgent: bool


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = random_model(tiny_config(vocab_size=272, max_position_embeddings=512))
    generation = GenerationConfig(eos_token_ids=(EOS,), bos_token_id=BOS)
    return Engine(model, make_tokenizer(), CONFIG, model_name="tiny", generation=generation)


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    async with running_server(engine, ServerConfig(tool_call_parser="hermes")) as client:
        yield client


@pytest.fixture
async def ai(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as ai:
        yield ai


async def test_structured_outputs_with_the_openai_client(ai: openai.AsyncOpenAI) -> None:
    # Chats are parsed into pydantic models.
    for seed in range(4):
        answer = await ai.chat.completions.parse(
            model="tiny", messages=USER, response_format=Order, seed=seed, extra_body={"logit_bias": LITTLE_SPACE}
        )
        order = answer.choices[0].message.parsed
        assert isinstance(order, Order) and answer.choices[0].finish_reason == "stop"
    # Responses too.
    response = await ai.responses.parse(model="tiny", input="hi", text_format=Order, temperature=0.7)
    assert response.output_parsed is None or isinstance(response.output_parsed, Order)
    # Demanded calls have arguments by the function's schema.
    tool: ChatCompletionToolUnionParam = openai.pydantic_function_tool(Order, name="order")
    named: Any = {"type": "function", "function": {"name": "order"}}
    for choice in ("required", named):
        asked = await ai.chat.completions.create(
            model="tiny",
            messages=USER,
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=3,
            extra_body={"logit_bias": LITTLE_SPACE},
        )
        [call] = asked.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "order"
        Order.model_validate_json(call.function.arguments)
        assert asked.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    with pytest.raises(openai.BadRequestError, match="Grammar error: "):
        await ai.completions.create(model="tiny", prompt="hi", extra_body={"structured_outputs": {"regex": "("}})


LITTLE_SPACE = {str(make_tokenizer().get_vocab()[symbol]): -20.0 for symbol in "ĠĉĊč"}


async def test_streamed_choices_of_a_schema(client: Client) -> None:
    schema = Order.model_json_schema()
    form = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    texts = ["", "", ""]
    reasons = ["", "", ""]
    for chunk in await client.events("/v1/completions", prompt="hi", n=3, max_tokens=400, seed=1, **form):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == ["stop"] * 3 and len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
