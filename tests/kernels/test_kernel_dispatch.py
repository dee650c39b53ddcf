from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import make_case

from jaxpaged_kernels import api, paged_attention


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


def test_pick_is_logged_once(caplog: pytest.LogCaptureFixture, arguments: dict[str, jax.Array]) -> None:
    (record,) = pick(caplog, arguments, times=3)
    assert record.levelno == logging.INFO and "'xla'" in record.getMessage()


def test_gpu_warns_that_its_kernel_is_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {k: v for k, v in api.IMPLEMENTATIONS.items() if k != "triton"})
    (record,) = pick(caplog, arguments)
    assert record.levelno == logging.WARNING
    assert "'xla'" in record.getMessage() and "triton: not part of this version" in record.getMessage()


def test_the_next_is_asked_when_one_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]
) -> None:
    monkeypatch.setitem(api.IMPLEMENTATIONS, "xla", refuse)
    (record,) = pick(caplog, arguments)
    assert record.levelno == logging.WARNING
    assert "'reference'" in record.getMessage() and "xla: heads too large" in record.getMessage()


def test_none_can(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]) -> None:
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"xla": refuse})
    with pytest.raises(NotImplementedError, match="xla: heads too large; reference: not part"):
        paged_attention(**arguments, scale=1.0)


def test_forced(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, jax.Array]) -> None:
    monkeypatch.setitem(api.IMPLEMENTATIONS, "xla", refuse)
    with pytest.raises(NotImplementedError, match="heads too large"):
        paged_attention(**arguments, scale=1.0, implementation="xla")
    monkeypatch.setitem(api.IMPLEMENTATIONS, "marked", lambda q, *_, **__: q + 7)
    marked = paged_attention(**arguments, scale=1.0, implementation="marked")
    np.testing.assert_array_equal(marked, arguments["q"] + 7)


def test_unknown_implementation(arguments: dict[str, jax.Array]) -> None:
    with pytest.raises(ValueError, match="implementation 'cuda' does not exist: use one of xla, reference"):
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
        ({"decode_only": True}, "one query token a row, but there are 5 for 2 rows"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, jax.Array], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        paged_attention(**{"scale": 1.0, **arguments, **changes})
    assert "\n" not in str(error.value)
