"""The Mosaic GPU prototype in interpret mode, which also looks for races, against float64 numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_case import PagedCase, Rows, make_case

from jaxpaged_kernels import mosaic, paged_attention
from jaxpaged_kernels.api import DEFAULT_PREFERENCE, IMPLEMENTATIONS, PREFERENCES
from jaxpaged_kernels.target import Target

SCALE = 0.3
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax cannot interpret Mosaic GPU kernels; 0.11 and later can"
)


def attend(case: PagedCase, **options: object) -> jax.Array:
    arguments: dict[str, Any] = {"scale": SCALE, "decode_only": True, "implementation": "mosaic"} | options
    return jax.jit(functools.partial(paged_attention, **arguments))(*case.arguments)


def pretend(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(mosaic, "current_target", lambda: target)


@interpreted
@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "dtype", "num_cores"),
    [(8, 64, 3, "bfloat16", 1), (16, 128, 4, "float16", 12), (128, 64, 9, "bfloat16", 24)],
)
def test_decodes(
    monkeypatch: pytest.MonkeyPatch, block_size: int, head_dim: int, group: int, dtype: str, num_cores: int
) -> None:
    # More tiles of 64 keys than the ring holds, lengths around a tile and around a block, and a padding row.
    lengths = [block_size + 1, 1, 64, 391]
    rows: Rows = [*((length, 1) for length in lengths), (0, 0)]
    case = make_case(
        rows,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_tokens=len(rows),
    )
    pretend(monkeypatch, Target("cpu", "cpu", None, num_cores))  # more than 5 cores: rows are split
    detect_races = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", detect_races)
    out = attend(case)
    assert out.dtype == jnp.dtype(dtype)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected(SCALE), rtol=tolerance, atol=tolerance)


def test_only_by_name() -> None:
    assert all("mosaic" not in names for names in (IMPLEMENTATIONS, DEFAULT_PREFERENCE, *PREFERENCES.values()))


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ({}, {"decode_only": False}, "only decode_only"),
        ({}, {"window": 4}, "no window"),
        ({}, {"soft_cap": 1.0, "sinks": jnp.zeros(4)}, "no soft_cap, sinks"),
        ({"dtype": "float32"}, {}, "not float32"),
        ({"head_dim": 96}, {}, "not 96 and 16"),
        ({"block_size": 4}, {}, "not 64 and 4"),
        ({"num_heads": 65, "num_kv_heads": 1}, {}, "65 query heads of a KV head"),
    ],
)
def test_refuses(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, object], options: dict[str, object], reason: str
) -> None:
    pretend(monkeypatch, Target("gpu", "NVIDIA H200", mosaic.CAPABILITY, 132))
    defaults: dict[str, Any] = {"head_dim": 64, "block_size": 16, "dtype": "bfloat16"}
    case = make_case([(5, 1), (9, 1)], **defaults | shape)
    with pytest.raises(NotImplementedError, match=reason):
        attend(case, **options)


def test_refuses_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Target("gpu", "NVIDIA A100", (8, 0), 108))
    with pytest.raises(NotImplementedError, match=r"A100 is not of compute capability 9\.0"):
        attend(make_case([(5, 1)], head_dim=64, dtype="bfloat16"))
