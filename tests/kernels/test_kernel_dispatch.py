from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import make_case

from jaxpaged_kernels import api, check_block_tables, paged_attention, pool_dtype
from jaxpaged_kernels.target import Target


@pytest.fixture
def arguments() -> dict[str, jax.Array]:
    names = ("q", "k_pool", "v_pool", "block_tables", "kv_lens", "query_starts", "num_decodes")
    return dict(zip(names, make_case([(9, 1), (12, 4)]).arguments, strict=True))


@pytest.fixture(autouse=True)
def forget_what_was_logged() -> None:
    api._log_pick.cache_clear()


def refuse(*_: object, **__: object) -> jax.Array:
    raise NotImplementedError("heads too large")


def pick(caplog: pytest.LogCaptureFixture, arguments: dict[str, jax.Array], times: int = 1) -> list[logging.LogRecord]:
    with caplog.at_level(logging.INFO, logger="jaxpaged_kernels"):
        for _ in range(times):
            jax.eval_shape(functools.partial(paged_attention, scale=1.0), **arguments)
    return caplog.records


def test_pick_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]
) -> None:
    monkeypatch.setitem(api.IMPLEMENTATIONS, "native", api.IMPLEMENTATIONS["xla"])
    (record,) = pick(caplog, arguments, times=3)
    assert record.levelno == logging.INFO and "'native'" in record.getMessage()


def test_gpu_warns_that_its_kernel_is_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]
) -> None:
    monkeypatch.setattr(api, "current_target", lambda: Target("gpu", "NVIDIA H200", (9, 0), 132))
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {k: v for k, v in api.IMPLEMENTATIONS.items() if k != "triton"})
    (record,) = pick(caplog, arguments)
    assert record.levelno == logging.WARNING
    assert "'xla'" in record.getMessage() and "triton: not part of this version" in record.getMessage()


def test_the_next_is_asked_when_one_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]
) -> None:
    monkeypatch.setitem(api.IMPLEMENTATIONS, "native", refuse)
    (record,) = pick(caplog, arguments)
    assert record.levelno == logging.WARNING
    assert "'xla'" in record.getMessage() and "native: heads too large" in record.getMessage()


def test_none_can(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]) -> None:
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"xla": refuse})
    with pytest.raises(NotImplementedError, match=r"native: not part.*xla: heads too large; reference: not part"):
        paged_attention(**arguments, scale=1.0)


def test_forced(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]) -> None:
    monkeypatch.setitem(api.IMPLEMENTATIONS, "xla", refuse)
    with pytest.raises(NotImplementedError, match="heads too large"):
        paged_attention(**arguments, scale=1.0, implementation="xla")
    monkeypatch.setitem(api.IMPLEMENTATIONS, "marked", lambda q, *_, **__: q + 7)
    marked = paged_attention(**arguments, scale=1.0, implementation="marked")
    np.testing.assert_array_equal(marked, arguments["q"] + 7)


def test_unknown_implementation(arguments: dict[str, jax.Array]) -> None:
    with pytest.raises(
        ValueError, match="implementation 'cuda' does not exist: use one of triton, native, xla, reference"
    ):
        paged_attention(**arguments, scale=1.0, implementation="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((5, 64))}, r"q is \[5, 64\]"),
        ({"q": jnp.zeros((5, 3, 16))}, "3 query heads are not a multiple of 2 KV heads"),
        ({"q": jnp.zeros((5, 4, 8))}, "heads of 8 but the pools of 16"),
        ({"q": jnp.zeros((5, 4, 16), jnp.bfloat16)}, "bfloat16, float32 and float32"),
        ({"q": jnp.zeros((5, 4, 16), jnp.int32)}, "float dtype"),
        ({"v_pool": jnp.zeros((2, 8, 2, 16))}, "the pools are"),
        ({"block_tables": jnp.zeros((2,), jnp.int32)}, "block_tables is"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, "neither of them 0"),
        ({"block_tables": jnp.zeros((2, 2), jnp.uint8)}, "block_tables is uint8, but must be int32"),
        ({"kv_lens": jnp.zeros((3,), jnp.int32)}, r"kv_lens is \[3\]"),
        ({"query_starts": jnp.zeros((2,), jnp.int32)}, r"query_starts \[2\]"),
        ({"num_decodes": jnp.zeros((1,), jnp.int32)}, r"num_decodes \[1\]"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"sinks": jnp.zeros(3)}, r"sinks is \[3\]"),
        ({"k_scales": jnp.zeros((9, 8, 2))}, "scales were given for pools of float32"),
        ({"decode_only": True}, "one query token a row, but there are 5 for 2 rows"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, jax.Array], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        paged_attention(**{"scale": 1.0, **arguments, **changes})
    assert "\n" not in str(error.value)


def quantized(dtype: str = "int8", blocks: int = 9, **changes: object) -> dict[str, object]:
    pool = jax.ShapeDtypeStruct((blocks, 8, 2, 16), jnp.dtype(dtype))
    scales = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    return {"k_pool": pool, "v_pool": pool, "k_scales": scales, "v_scales": scales, **changes}


POOL_2_GIB = 2**31 // (8 * 2 * 16)  # blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (quantized(v_scales=None), "pools of int8 need k_scales and v_scales"),
        (quantized(k_scales=None, v_scales=None), "pools of int8 need k_scales and v_scales"),
        (quantized(k_scales=jnp.zeros((9, 8))), r"k_scales is float32\[9, 8\], but a pool .* needs float32\[9, 8, 2\]"),
        (quantized(v_scales=jnp.zeros((9, 8, 2), jnp.bfloat16)), r"v_scales is bfloat16\[9, 8, 2\]"),
        (
            quantized(v_pool=jnp.zeros((9, 8, 2, 16))),
            "float32, int8 and float32, but quantized pools must both",
        ),
        (quantized(v_pool=jnp.zeros((9, 8, 2, 16), jnp.float8_e4m3fn)), "int8 and float8_e4m3fn"),
        (quantized(q=jnp.zeros((5, 4, 16), jnp.int8)), "q float32, bfloat16 or float16"),
        (quantized("float8_e5m2"), "float8_e5m2"),
        (quantized(blocks=POOL_2_GIB), "2147483648 bytes, but .* at most 2147483647.*; use fewer blocks"),
        (quantized("uint8", blocks=POOL_2_GIB), "at most 2147483647"),
    ],
)
def test_quantized_arguments_that_do_not_fit(
    arguments: dict[str, jax.Array], changes: dict[str, object], message: str
) -> None:
    arrays = {**arguments, **changes}
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(functools.partial(paged_attention, scale=1.0), **arrays)
    assert "\n" not in str(error.value)


def test_the_largest_one_byte_pool(arguments: dict[str, jax.Array]) -> None:
    arrays = {**arguments, **quantized(blocks=POOL_2_GIB - 1)}
    out = jax.eval_shape(functools.partial(paged_attention, scale=1.0), **arrays)
    assert out.shape == arguments["q"].shape


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]) -> None:
    def attend(gpu: Target, dtype: str) -> None:
        monkeypatch.setattr(api, "current_target", lambda: gpu)
        attention = functools.partial(paged_attention, scale=1.0, implementation="xla")
        jax.eval_shape(attention, **{**arguments, **quantized(dtype)})

    a100, l4 = Target("gpu", "NVIDIA A100", (8, 0), 108), Target("gpu", "NVIDIA L4", (8, 9), 58)
    message = "A100 has compute capability 8.0, but fp8 pools need 8.9 or later; use int8 or 16-bit pools"
    with pytest.raises(ValueError, match=message):
        attend(a100, "float8_e4m3fn")
    attend(a100, "int8")
    attend(l4, "float8_e4m3fn")


def test_the_target_of_a_mesh_is_the_one_that_counts(
    caplog: pytest.LogCaptureFixture, arguments: dict[str, jax.Array]
) -> None:
    """A program that is compiled ahead for a GPU takes the GPU's kernel, whatever device is here."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert pool_dtype("bfloat16") == jnp.bfloat16
        (record,) = pick(caplog, arguments)
    assert "on gpu runs the 'triton' kernel" in record.getMessage()
    assert pool_dtype("bfloat16") == jnp.uint16


def test_block_ids_are_checked_before_anything_runs() -> None:
    tables = np.array([[1, 2, 0], [7, 0, 0]], np.int32)
    check_block_tables(tables, 8)
    check_block_tables(jnp.asarray(tables), 8)
    with pytest.raises(IndexError, match=r"block_tables\[1, 0\] is 7, but the pool has blocks 0 to 6"):
        check_block_tables(jnp.asarray(tables), 7)
    with pytest.raises(IndexError, match=r"block_tables\[0, 2\] is -1, but the pool has blocks 0 to 7"):
        check_block_tables(np.array([[0, 1, -1]]), 8)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda tables: check_block_tables(tables, 8))(tables)
