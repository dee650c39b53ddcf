"""Every family against transformers' logits, names and shapes; whole sequences, token by token, and compiled."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.typing import NDArray
from tiny_models import BATCH, CONFIGS, LENGTH, VOCAB, token_ids, weight

from jaxpaged.models.attention import Rope
from jaxpaged.models.config import model_config_from_hf
from jaxpaged.models.decoder import DecoderForCausalLM, DecoderLayer
from jaxpaged.models.registry import get_model_class
from jaxpaged_kernels import apply_rope

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "tiny_models.npz")


def abstract(name: str, dtype: str = "float32") -> DecoderForCausalLM:
    config = model_config_from_hf(CONFIGS[name])
    return nnx.eval_shape(lambda: get_model_class(config.architecture)(config, dtype=dtype, rngs=nnx.Rngs(0)))


def build(name: str, dtype: str = "float32") -> DecoderForCausalLM:
    """The tiny model `name`, its seeded weights put in by their Hugging Face names."""
    model = abstract(name, dtype)
    for key, parameter in parameters(model).items():
        parameter.set_value(jnp.asarray(weight(key, parameter.get_value().shape).astype(jnp.dtype(dtype))))
    return model


def parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}


class CachedAttention:
    """Attention of one sequence over what it has seen so far, in float64 numpy: one token a call."""

    def __init__(self) -> None:
        self.keys: dict[int, list[NDArray]] = {}
        self.values: dict[int, list[NDArray]] = {}

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
    ) -> jax.Array:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        self.keys.setdefault(layer, []).append(np.float64(k[0]))
        self.values.setdefault(layer, []).append(np.float64(v[0]))
        first = 0 if window is None else max(len(self.keys[layer]) - window, 0)
        keys, values = np.stack(self.keys[layer][first:]), np.stack(self.values[layer][first:])
        group = q.shape[1] // k.shape[1]
        out = []
        for head, query in enumerate(np.float64(q[0])):
            scores = np.exp(scale * keys[:, head // group] @ query)
            out.append(scores / scores.sum() @ values[:, head // group])
        return jnp.asarray(np.stack(out)[None], q.dtype)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    logits = build(name)(jnp.asarray(token_ids()))
    assert logits.dtype == jnp.float32
    assert logits.shape == (BATCH, LENGTH, VOCAB)
    np.testing.assert_allclose(logits, GOLDENS[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_named_and_shaped_as_in_transformers(name: str) -> None:
    ours = {f"{key} {','.join(map(str, p.get_value().shape))}" for key, p in parameters(abstract(name)).items()}
    assert ours == set(GOLDENS[f"{name}/parameters"].tolist())


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3_layer_types"])
def test_one_token_at_a_time_with_a_cache_equals_transformers(name: str) -> None:
    model, attention = build(name), CachedAttention()
    for position, token in enumerate(token_ids()[0]):
        hidden = model.hidden_states(jnp.array([token]), jnp.array([position]), attention)
        np.testing.assert_allclose(model.logits(hidden)[0], GOLDENS[name][0, position], atol=1e-4, rtol=0)


def test_tokens_of_several_sequences_in_one_flat_call_do_not_mix() -> None:
    """Order and neighbours of the flat tokens are the attention's business alone."""
    model, ids = build("qwen2"), token_ids()
    order = np.random.RandomState(1).permutation(BATCH * LENGTH)
    back = np.argsort(order)
    sequence, positions = order // LENGTH, order % LENGTH
    visible = (sequence[:, None] == sequence) & (positions[:, None] >= positions)

    def attention(
        layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
    ) -> jax.Array:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * scale
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")

    hidden = model.hidden_states(jnp.asarray(ids.reshape(-1)[order]), jnp.asarray(positions), attention)
    logits = model.logits(hidden)[back].reshape(BATCH, LENGTH, VOCAB)
    np.testing.assert_allclose(logits, GOLDENS["qwen2"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama3_tied", "qwen2_window"])
def test_compiled_over_flat_leaves_equals_transformers(name: str) -> None:
    graphdef, state = nnx.split(build(name))
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def forward(leaves: list[jax.Array], ids: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(ids)

    np.testing.assert_allclose(forward(leaves, token_ids()), GOLDENS[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama_multi_head_biases", "qwen3"])
def test_bfloat16_stays_bfloat16_and_near_float32(name: str) -> None:
    model = build(name, "bfloat16")
    seen = []

    def attention(
        layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
    ) -> jax.Array:
        seen.append((layer, q.dtype, k.dtype, v.dtype, scale, window))
        return q

    assert model.hidden_states(jnp.arange(4), jnp.arange(4), attention).dtype == jnp.bfloat16
    assert seen == [(i, *[jnp.bfloat16] * 3, model.config.head_dim**-0.5, None) for i in range(2)]
    logits = model(jnp.asarray(token_ids()))
    assert logits.dtype == jnp.float32
    # bfloat16 keeps 8 bits: some 1 % of error after two layers.
    error = np.linalg.norm(logits - GOLDENS[name]) / np.linalg.norm(GOLDENS[name])
    assert 1e-4 < error < 0.03


def test_random_initialization_has_the_given_dtype_and_depends_on_the_seed() -> None:
    config = model_config_from_hf(CONFIGS["qwen2"])
    first, again, other = (
        parameters(get_model_class(config.architecture)(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(seed)))
        for seed in (0, 0, 1)
    )
    key = "model.layers.1.mlp.up_proj.weight"
    assert {p.get_value().dtype for p in first.values()} == {jnp.dtype(jnp.bfloat16)}
    assert (first[key].get_value() == again[key].get_value()).all()
    assert (first[key].get_value() != other[key].get_value()).mean() > 0.9
    assert (first[key].get_value() != first["model.layers.1.mlp.gate_proj.weight"].get_value()).mean() > 0.9


@pytest.mark.parametrize("name", CONFIGS)
def test_without_random_numbers_there_are_the_shapes_of_what_would_be_drawn(name: str) -> None:
    config = model_config_from_hf(CONFIGS[name])
    graphdef, state = nnx.split(get_model_class(config.architecture)(config, dtype=jnp.bfloat16, rngs=None))
    expected = nnx.split(build(name, "bfloat16"))
    assert graphdef == expected[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), expected[1])


def test_tied_model_has_no_head_of_its_own() -> None:
    assert abstract("qwen3").lm_head is None
    assert "lm_head.weight" in parameters(abstract("llama"))


def test_id_outside_the_vocabulary_is_clipped() -> None:
    model = build("llama")
    np.testing.assert_array_equal(model(jnp.array([[1, VOCAB, -1]])), model(jnp.array([[1, VOCAB - 1, 0]])))


def test_layers_share_one_trace() -> None:
    """Deep models must stay cheap to trace: each half of a layer is lowered once, however many layers there are."""
    config = model_config_from_hf(CONFIGS["llama"] | {"num_hidden_layers": 12})
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DecoderForCausalLM(config, dtype="float32", rngs=nnx.Rngs(0))))

    def forward(state: nnx.State, ids: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state).hidden_states(ids, ids, lambda i, q, k, v, rope, scale, window: q)

    text = jax.jit(forward).lower(state, jnp.arange(4)).as_text()
    for half in (DecoderLayer.before_attention, DecoderLayer.after_attention):
        assert text.count(f"func.func private @{half.__name__}(") == 1
        assert text.count(f"call @{half.__name__}(") == 12
