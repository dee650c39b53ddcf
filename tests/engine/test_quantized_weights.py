"""Engines with quantized weights against one dense pass over the whole sequence, its products rounded right here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import NUM_TOKENS, random_model, tiny_config
from weights.tiny_files import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import ConfigError
from jaxpaged.models.attention import DenseAttention
from jaxpaged.models.layers import Linear, Matrix, RMSNorm
from jaxpaged.models.products import PLAIN_PRODUCTS, Products
from jaxpaged.request import SamplingParams
from jaxpaged.weights import quantize_model
from jaxpaged.weights.quantization import matrices
from jaxpaged_kernels import QuantizedWeight, dequantize_weight, native

PROMPTS = np.random.default_rng(0).integers(0, NUM_TOKENS - 4, (3, 21)).tolist()
MAX_TOKENS = 12
# Where a value of an activation lies between two integers, a last bit decides: a step is 1/127 of the largest nearby.
TOLERANCE = 0.1


@partial(jax.tree_util.register_dataclass, data_fields=["num_tokens"], meta_fields=["implementation"])
@dataclass(frozen=True)
class RoundedProducts(Products):
    """Products of dequantized weights and activations whose blocks of 32 have 8 bits."""

    def project(
        self,
        x: jax.Array,
        *layers: Linear,
        norm: RMSNorm | None = None,
        swiglu: bool = False,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        h = rounded(x if norm is None else norm(x))
        ys = [h @ dequantized(layer).T for layer in layers]
        if swiglu:
            ys = [jax.nn.silu(ys[0]) * ys[1]]
        return tuple(ys if residual is None else [ys[0] + residual])

    def logits(self, hidden: jax.Array, head: Matrix) -> jax.Array:
        return rounded(hidden) @ dequantized(head).T


def rounded(x: jax.Array) -> jax.Array:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    return (jnp.rint(blocks / scales) * scales).reshape(x.shape)


def dequantized(matrix: Matrix) -> jax.Array:
    weight = matrix.matrix()
    assert isinstance(weight, QuantizedWeight)
    return dequantize_weight(weight, jnp.float32)


def quantized(format: Any, seed: int = 0) -> nnx.Module:
    return quantize_model(random_model(tiny_config(), seed), format)


def dense_copy(model: nnx.Module) -> nnx.Module:
    """A dense model with the values of a quantized one."""
    copy = random_model(tiny_config())
    for name, matrix in matrices(copy).items():
        matrix.weight.set_value(dequantized(matrices(model)[name]))
    return copy


def generate(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens after each of the prompts, computed in one batch, and their log-probabilities."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
        engine.add_request(str(i), prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    results = []
    for i in range(len(PROMPTS)):
        tokens = list(done[str(i)].token_ids)
        results.append((tokens, [step[t].logprob for t, step in zip(tokens, done[str(i)].logprobs, strict=True)]))
    return results


def config(**changes: Any) -> EngineConfig:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 64, "block_size": 4, "warmup": False}
    return EngineConfig(**{**options, "compilation_cache": "", **changes})


def logprobs_of(model: nnx.Module, how: Products) -> Callable[[list[int]], np.ndarray]:
    """[L, vocabulary] of a sequence of L tokens."""
    length = model.config.max_position_embeddings
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(ids: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        hidden = model.hidden_states(ids, jnp.arange(length), DenseAttention(1, length), how)
        return jax.nn.log_softmax(model.logits(hidden, how))

    return lambda tokens: np.asarray(forward(jnp.asarray(tokens + [0] * (length - len(tokens)))))[: len(tokens)]


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_native_products(format: Any) -> None:
    """Chunked prefill and batched decodes, of tokens that the reference finds as good as its best."""
    if (reason := native.why_unavailable()) is not None:
        pytest.skip(reason)
    model = quantized(format)
    logprobs = logprobs_of(model, RoundedProducts())
    for prompt, (tokens, reported) in zip(PROMPTS, generate(Engine(model, None, config())), strict=True):
        expected = logprobs(prompt + tokens)[len(prompt) - 1 : -1]
        chosen = expected[np.arange(MAX_TOKENS), tokens]
        assert np.all(chosen > expected.max(axis=1) - TOLERANCE)
        np.testing.assert_allclose(reported, chosen, atol=TOLERANCE)


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_xla_products(format: Any) -> None:
    """As if the weights were dense: token for token."""
    model = quantized(format)
    logprobs = logprobs_of(dense_copy(model), PLAIN_PRODUCTS)
    engine = Engine(model, None, config(linear="xla", quantization=format))
    for prompt, (tokens, reported) in zip(PROMPTS, generate(engine), strict=True):
        expected = logprobs(prompt + tokens)[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(tokens, expected.argmax(axis=1))
        np.testing.assert_allclose(reported, expected.max(axis=1), atol=1e-3)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("format", "layer_bytes"), [("none", 128), ("q8_0", 34), ("q4_0", 18)])
def test_what_is_loaded(tmp_path: Path, load_format: Any, format: Any, layer_bytes: int) -> None:
    """Bytes of 32 weights in the layers; tables have 34 wherever the layers are quantized, norms are float32."""
    shapes = llama_shapes()
    folder = write_folder(tmp_path / "m", random_tensors(shapes), LLAMA_CONFIG)
    options = {"quantization": format, "load_format": load_format, "linear": "xla", "dtype": "float32"}
    engine = Engine.from_pretrained(str(folder), config(**options))
    table_bytes = 128 if format == "none" else 34
    expected = 0
    for name, shape in shapes.items():
        in_layer = name.startswith("model.layers.")
        each = 128 if len(shape) == 1 else layer_bytes if in_layer else table_bytes
        expected += math.prod(shape) // 32 * each
    assert engine._runner.weights_bytes == expected
    assert engine._runner.dtype == jnp.float32


def test_new_weights_are_quantized_first() -> None:
    engine = Engine(quantized("q8_0"), None, config(linear="xla"))
    with pytest.raises(ConfigError, match=r"float32\[272, 32\], but the model that is being served has uint8"):
        engine.update_weights(random_model(tiny_config(), seed=1))
    new = quantized("q8_0", seed=1)
    engine.update_weights(new)
    logprobs = logprobs_of(dense_copy(new), PLAIN_PRODUCTS)
    for prompt, (tokens, _) in zip(PROMPTS, generate(engine), strict=True):
        assert tokens[0] == logprobs(prompt)[-1].argmax()


def test_a_request_whose_numbers_break_ends_alone() -> None:
    """One token's embedding is NaN: the tokens that are multiplied together with it are not."""
    broken, answers = 7, []
    for is_broken in (False, True):
        model = quantized("q4_0")
        table = model.model.embed_tokens
        packed = np.array(table.weight[...])
        scales = packed[broken // 16, 16 * table.shape[1] :].view(np.float16).reshape(-1, 16)
        if is_broken:
            scales[:, broken % 16] = np.nan
        table.weight.set_value(jnp.asarray(packed))
        engine = Engine(model, None, config())
        for name, prompt in (("with", [1, broken, 3]), ("without", [1, 2, 3, 4])):
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        answers.append(list(done["without"].token_ids))
    assert (done["with"].finish_reason, done["without"].finish_reason) == ("error", "length")
    assert answers[0] == answers[1]


def test_dense_weights_are_not_what_was_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'q8_0', but the weights .* quantize it first"):
        Engine(random_model(tiny_config()), None, config(quantization="q8_0"))
    with pytest.raises(ConfigError, match="quantization is 'int8', but must be one of auto, none, q8_0, q4_0"):
        config(quantization="int8")
