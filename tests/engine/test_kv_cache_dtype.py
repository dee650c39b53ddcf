"""Engines with a quantized pool against dense attention over keys and values that are quantized right here.

A token's expected logits come from one dense pass over the whole sequence; the engine reaches them through chunks,
prefix hits, forks and swaps. Where two quantized values are equally near, a last bit decides, so the drawn token need
not be the best one of the reference, but it must be as good.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx
from support import GOLDENS, NUM_TOKENS, random_model, tiny_config

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import ConfigError
from jaxpaged.models.attention import DenseAttention, Rope
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.runner import kv_cache
from jaxpaged_kernels import apply_rope
from jaxpaged_kernels.target import Target

# Bytes of a block of 4 tokens of the tiny model: 2 layers, K and V, 2 heads of 8 bytes and a scale.
BLOCK_BYTES = 4 * 2 * 2 * 2 * (8 + 4)
LARGEST = {"int8": 127.0, "fp8": 448.0}
STREAMS = np.random.default_rng(0).integers(0, NUM_TOKENS - 4, (3, 40)).tolist()

Logits = Callable[[list[int]], npt.NDArray[np.float32]]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class QuantizedDense:
    """Dense attention of one sequence over keys and values that went through one byte each."""

    dense: DenseAttention
    dtype: str

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
    ) -> jax.Array:
        k = self.rounded(apply_rope(k, *rope))
        unrotated = jnp.ones_like(rope[0]), jnp.zeros_like(rope[1])
        return self.dense(layer, apply_rope(q, *rope), k, self.rounded(v), unrotated, scale=scale, window=window)

    def rounded(self, x: jax.Array) -> jax.Array:
        scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST[self.dtype]
        stored = jnp.rint(x / scales) if self.dtype == "int8" else (x / scales).astype(jnp.float8_e4m3fn)
        return stored.astype(x.dtype) * scales


@pytest.fixture(scope="module")
def logits(tiny_model: nnx.Module, dtype: str) -> Logits:
    """[L, vocabulary] of a sequence of L tokens."""
    length = tiny_model.config.max_position_embeddings
    graphdef, state = nnx.split(tiny_model)

    @jax.jit
    def forward(ids: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        attention = QuantizedDense(DenseAttention(1, length), dtype)
        return model.logits(model.hidden_states(ids, jnp.arange(length), attention))

    def padded(tokens: list[int]) -> npt.NDArray[np.float32]:
        return np.asarray(forward(jnp.asarray(tokens + [0] * (length - len(tokens)))))[: len(tokens)]

    return padded


def start(model: nnx.Module, dtype: str, **changes: object) -> Engine:
    options: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 40,
        "max_model_len": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_logprobs": 5,
        "compilation_cache": "",
        "warmup": False,
        "debug_checks": True,
    }
    return Engine(model, None, EngineConfig(kv_cache_dtype=dtype, **{**options, **changes}))  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step()})
    return outputs


def test_logprobs_are_those_of_quantized_dense_attention(tiny_model: nnx.Module, logits: Logits, dtype: str) -> None:
    engine = start(tiny_model, dtype)
    prompt = STREAMS[0][:30]
    engine.add_request("0", prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3))
    (completion,) = finish(engine)["0"].outputs
    tokens = prompt + completion.token_ids

    def reference(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1 : -1]))

    quantized, exact = reference(logits(tokens)), reference(np.asarray(tiny_model(jnp.array([tokens]))[0]))
    assert completion.logprobs is not None
    found = [(i, token, e.logprob) for i, entry in enumerate(completion.logprobs) for token, e in entry.items()]
    rows, columns, values = (np.array(column) for column in zip(*found, strict=True))
    np.testing.assert_allclose(values, quantized[rows, columns], atol=1e-3)
    assert np.abs(values - exact[rows, columns]).max() > 0.01  # what was quantized can be told from what was not


@pytest.mark.parametrize("layout", [{}, {"block_size": 3, "max_num_batched_tokens": 11}], ids=["even", "odd"])
def test_any_schedule(tiny_model: nnx.Module, logits: Logits, dtype: str, layout: dict[str, int]) -> None:
    """Random requests in a pool so small that they are swapped out, with forks and common prefixes."""
    engine = start(tiny_model, dtype, num_blocks=25, swap_space=20 * BLOCK_BYTES, **layout)
    rng = np.random.default_rng(1)
    equal = total = 0
    for _ in range(8):
        prompts: dict[str, list[int]] = {}
        for name in map(str, range(int(rng.integers(2, 8)))):
            n = int(rng.choice([1, 1, 2, 3]))
            prompts[name] = STREAMS[rng.integers(3)][: rng.integers(1, 40 if n == 1 else 20)]
            tokens = int(rng.integers(1, 16))
            # Siblings draw from few tokens, so that they part and each writes its own copy of a block.
            params = SamplingParams(
                n=n, temperature=0.0 if n == 1 else 1.0, top_k=2, seed=5, max_tokens=tokens, ignore_eos=True
            )
            engine.add_request(name, prompts[name], params)
            for _ in range(rng.integers(3)):
                engine.step()
        for name, output in finish(engine).items():
            prompt = prompts[name]
            for completion in output.outputs:
                expected = logits(prompt + completion.token_ids)[len(prompt) - 1 : -1]
                best = np.sort(expected[:, :NUM_TOKENS], axis=1)
                drawn = expected[np.arange(len(expected)), completion.token_ids]
                limit = best[:, -1 if len(output.outputs) == 1 else -2]
                assert (drawn > limit - 0.05).all()
                equal += int((drawn >= limit).sum())
                total += len(drawn)
    assert total > 250 and equal > 0.99 * total
    stats = engine.stats().scheduler
    assert stats.preemptions_total and stats.swapped_out_blocks_total and stats.prefix_hits_total
    assert stats.num_free_blocks == stats.num_total_blocks


def test_pool_is_as_small_as_it_says(tiny_model: nnx.Module, dtype: str) -> None:
    engine = start(tiny_model, dtype, num_blocks=None, kv_cache_memory=100 * BLOCK_BYTES + 5)
    assert engine.cache_config.num_blocks == 100
    assert sum(array.nbytes for array in jax.tree.leaves(engine._runner.cache.pools)) == 100 * BLOCK_BYTES
    assert engine.cache_config.cache_dtype == {"int8": "int8", "fp8": "float8_e4m3fn"}[dtype]


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
def test_steps_neither_copy_the_pool_nor_convert_it(dtype: str, model_dtype: str) -> None:
    config = tiny_config(num_heads=4, num_kv_heads=4, head_dim=32, num_layers=3)
    engine = start(
        random_model(config, dtype=jnp.dtype(model_dtype)), dtype, num_blocks=2000, max_num_seqs=2, warmup=True
    )
    one_layer = engine._runner.cache.shape.bytes_per_layer
    temporaries = engine._runner.temporaries()
    assert temporaries and all(size < one_layer / 4 for size in temporaries.values()), (temporaries, one_layer)


def test_a_gpu_without_fp8_is_told_what_to_do(tiny_model: nnx.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "current_target", lambda: Target("gpu", "NVIDIA A100", (8, 0), 108))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8', but NVIDIA A100 .* 8\.0.*8\.9.*int8"):
        start(tiny_model, "fp8")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp4', but must be one of auto, fp8, int8"):
        EngineConfig(kv_cache_dtype="fp4")  # type: ignore[arg-type]


@pytest.mark.real_model
def test_int8_hardly_changes_a_real_model() -> None:
    """SmolLM2-135M-Instruct in float32: log-probabilities beside those of transformers, as long as tokens agree."""
    cases = json.loads((GOLDENS / "smollm2_135m.json").read_text(encoding="utf-8"))["cases"]
    options = EngineConfig(
        dtype="float32", kv_cache_dtype="int8", max_model_len=1024, kv_cache_memory=128 << 20, warmup=False
    )
    engine = Engine.from_pretrained("smollm2-135m-instruct", options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
    for case in cases:
        engine.add_request(case["name"], case["prompt_token_ids"], params)
    outputs = finish(engine)
    errors = []
    for case in cases:
        (completion,) = outputs[case["name"]].outputs
        best = case["top_logprobs"][0][0][1]
        likely = [token for token, x in case["top_logprobs"][0] if x > best - 0.1]  # one case is nearly a tie
        assert completion.token_ids[0] in likely and completion.logprobs is not None
        for i, entry in enumerate(completion.logprobs):
            errors += [abs(entry[token].logprob - x) for token, x in case["top_logprobs"][i] if token in entry]
            if completion.token_ids[i] != case["token_ids"][i]:
                break
    assert 0.001 < np.mean(errors) < 0.1
