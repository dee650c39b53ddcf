"""Products of activations and weights, with what comes right before and after them in a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxpaged_kernels import native
from jaxpaged_kernels.quantized import WEIGHT_FORMATS, QuantizedWeight, dequantize_weight, packed_shape
from jaxpaged_kernels.target import current_target

LINEAR_IMPLEMENTATIONS = ("native", "xla")
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WEIGHTS = 3

Weight = jax.Array | QuantizedWeight


def linear(
    x: jax.Array,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None] | None = None,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    num_tokens: jax.Array | int | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, ...]:
    """y = x W^T + b for one to three weights, accumulated in float32.

    Args:
        x: [T, in] float32, bfloat16 or float16.
        weights: arrays [out_i, in] of x's dtype, or quantized ones.
        biases: [out_i] or None for each weight; None = no biases.
        norm: [in]; x is RMS-normalized (see `rms_norm`) and scaled by it first.
        eps: of the norm.
        swiglu: two weights of one shape; the result is the one array silu(y_0) * y_1 (Shazeer 2020, GLU variants).
        residual: [T, out_0], added to the one result.
        out_dtype: x's or float32; None = x's.
        num_tokens: int32 scalar; rows from there on are padding: "native" does not compute them, and leaves the results
            there uninitialized. None = T.
        implementation: "xla" runs everywhere and can be differentiated; "native" is for CPUs: there it multiplies
            weights where they are, and a token's result does not depend on how many tokens there are. By a quantized
            weight "xla" multiplies x as if it were dense, rounded to x's dtype. "native" rounds x (normalized, in
            float32) instead: each block of 32 values to 8 bits of its largest magnitude / 127. The products of a block
            add up exactly in integers, the blocks in float32.

    Returns:
        Arrays [T, out_i], or one.

    Raises:
        ValueError: shapes or dtypes that do not fit each other, or an implementation that does not exist.
        NotImplementedError: "native" where it cannot run.
    """
    biases = tuple(biases) if biases is not None else (None,) * len(weights)
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, weights, biases, norm, residual, dtype, swiglu=swiglu)
    if implementation not in LINEAR_IMPLEMENTATIONS:
        names = ", ".join(LINEAR_IMPLEMENTATIONS)
        raise ValueError(f"implementation {implementation!r} does not exist: use one of {names}")
    if implementation == "xla" or x.size == 0:
        return _xla(x, weights, biases, norm, eps, residual, dtype, swiglu)
    count = jnp.asarray(len(x) if num_tokens is None else num_tokens, jnp.int32)
    if len({isinstance(weight, QuantizedWeight) for weight in weights}) == 1:
        return _native(x, count, weights, biases, norm, eps, residual, dtype, swiglu)
    # Some are quantized and some are not: one by one.
    outs = [_native(x, count, [w], [b], norm, eps, None, dtype, False)[0] for w, b in zip(weights, biases, strict=True)]
    return (jax.nn.silu(outs[0]) * outs[1],) if swiglu else tuple(outs)


def best_linear() -> str:
    """The implementation to compute with, but not to differentiate, on the device that is being traced for."""
    return "native" if current_target().platform == "cpu" and native.why_unavailable() is None else "xla"


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis: normalized in float32, scaled in x's dtype (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    normalized = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normalized.astype(x.dtype)


def matmul_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in] transposed -> float32 [T, out].

    Accumulates in float32: more exact for 16-bit weights, and 2 to 18 times faster on CPUs, where XLA otherwise
    rounds partial sums in software. float32 weights are multiplied as such (no TF32 on GPUs).
    """
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _xla(
    x: jax.Array,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    norm: jax.Array | None,
    eps: float,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    swiglu: bool,
) -> tuple[jax.Array, ...]:
    h = x if norm is None else rms_norm(x, norm, eps)
    dense = [dequantize_weight(w, x.dtype) if isinstance(w, QuantizedWeight) else w for w in weights]
    products = [matmul_transposed(h, weight) for weight in dense]
    ys = [y if b is None else y + b.astype(jnp.float32) for y, b in zip(products, biases, strict=True)]
    outs = [y.astype(out_dtype) for y in ys]
    if swiglu:
        outs = [jax.nn.silu(outs[0]) * outs[1]]
    return tuple(outs) if residual is None else (residual + outs[0],)


def _native(
    x: jax.Array,
    num_tokens: jax.Array,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    norm: jax.Array | None,
    eps: float,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    swiglu: bool,
) -> tuple[jax.Array, ...]:
    if (reason := native.why_unavailable()) is not None:
        raise NotImplementedError(reason)
    if (platform := current_target().platform) != "cpu":
        raise NotImplementedError(f"native kernels run on a CPU, not on {platform}: use xla")
    shapes = [(x.shape[0], weight.shape[0]) for weight in weights[: 1 if swiglu else None]]
    call = jax.ffi.ffi_call("jaxpaged_linear", [jax.ShapeDtypeStruct(shape, out_dtype) for shape in shapes])
    optional = [array for array in (*biases, norm, residual) if array is not None]
    outs = call(
        x,
        num_tokens,
        *(weight.packed if isinstance(weight, QuantizedWeight) else weight for weight in weights),
        *optional,
        num_parts=len(weights),
        formats=sum(_format_code(weight) << (4 * i) for i, weight in enumerate(weights)),
        biases=sum(1 << i for i, bias in enumerate(biases) if bias is not None),
        norm=norm is not None,
        residual=residual is not None,
        swiglu=swiglu,
        eps=np.float32(eps),
    )
    return tuple(outs)


def _format_code(weight: Weight) -> int:
    """As `Format` of csrc/linear_args.h counts."""
    return 1 + WEIGHT_FORMATS.index(weight.format) if isinstance(weight, QuantizedWeight) else 0


def _check(
    x: jax.Array,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    norm: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    *,
    swiglu: bool,
) -> None:
    if x.ndim != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}, but must be [T, in] of float32, bfloat16 or float16")
    if not 1 <= len(weights) <= _MAX_WEIGHTS or len(biases) != len(weights):
        raise ValueError(f"there are {len(weights)} weights and {len(biases)} biases: give 1 to {_MAX_WEIGHTS} of both")
    if swiglu and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        raise ValueError(f"swiglu takes two weights of one shape, not {[list(w.shape) for w in weights]}")
    if residual is not None and (len(weights) != 1 or swiglu):
        raise ValueError("a residual goes with exactly one weight")
    expected: list[tuple[str, jax.Array, tuple[int, ...]]] = []
    for w in weights:
        if isinstance(w, QuantizedWeight):
            _check_quantized(w, x)
        else:
            expected.append(("weight", w, (w.shape[0], x.shape[1])))
    expected += [("bias", b, w.shape[:1]) for w, b in zip(weights, biases, strict=True) if b is not None]
    expected += [("norm", norm, x.shape[1:])] if norm is not None else []
    expected += [("residual", residual, (x.shape[0], weights[0].shape[0]))] if residual is not None else []
    for name, array, shape in expected:
        if array.shape != shape or array.dtype != x.dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, but x of {x.dtype}{list(x.shape)} needs "
                f"{x.dtype}{list(shape)}"
            )
    if out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"out_dtype is {out_dtype}, but must be {x.dtype} or float32")


def _check_quantized(weight: QuantizedWeight, x: jax.Array) -> None:
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight is {weight.format}{list(weight.shape)}, but x has {x.shape[1]} values a token")
    expected = packed_shape(weight.format, weight.shape)
    if weight.packed.shape != expected or weight.packed.dtype != jnp.uint8:
        raise ValueError(
            f"the packed bytes of a weight {weight.format}{list(weight.shape)} are "
            f"{weight.packed.dtype}{list(weight.packed.shape)}, but must be uint8{list(expected)}"
        )
