"""Shared fixtures: a tiny random model with a tokenizer of its own, and answers computed without paging."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from support import NUM_TOKENS, Alone, make_tiny_tokenizer, random_model, tiny_config
from transformers import PreTrainedTokenizerFast

from jaxpaged.ops.sampling import sample


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token a byte, `</s>` = 257."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_model() -> nnx.Module:
    return random_model(tiny_config())


@pytest.fixture(scope="session")
def alone(tiny_model: nnx.Module) -> Alone:
    """Tokens of one sequence drawn from dense logits: no pool, no batch, no scheduler, one token at a time."""
    length = tiny_model.config.max_position_embeddings
    graphdef, state = nnx.split(tiny_model)

    @jax.jit
    def draw(ids: jax.Array, count: jax.Array, settings: jax.Array, top_k: jax.Array, seed: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state)(ids[None])[0, count - 1]
        temperature, top_p, min_p = settings
        one = [x[None] for x in (logits, temperature, top_k, top_p, min_p, seed, count)]
        return sample(*one, vocab_size=NUM_TOKENS)[0]

    cache: dict[object, list[int]] = {}

    def tokens(
        prompt: list[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: frozenset[int] = frozenset(),
    ) -> list[int]:
        key = (tuple(prompt), max_tokens, temperature, top_k, top_p, min_p, seed, stop)
        if key in cache:
            return cache[key]
        settings = np.float32([temperature, top_p, min_p])
        halves = np.uint32([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])
        ids = np.zeros(length, np.int32)
        ids[: len(prompt)] = prompt
        output: list[int] = []
        for count in range(len(prompt), min(len(prompt) + max_tokens, length)):
            token = int(draw(ids, np.int32(count), settings, np.int32(top_k), halves))
            ids[count] = token
            output.append(token)
            if token in stop:
                break
        return cache.setdefault(key, output)

    return tokens
