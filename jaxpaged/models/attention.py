"""What a decoder asks of attention, and the plain dense implementation for whole sequences."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged_kernels import apply_rope

# cos and sin of each token's angles, float32 [T, D / 2] each.
Rope = tuple[jax.Array, jax.Array]


class AttentionFn(Protocol):
    """Causal attention of one layer over whatever context the caller keeps, e.g. a paged KV cache.

    `q` [T, H, D], `k` and `v` [T, KVH, D] are this call's tokens; the result is [T, H, D] in q's dtype. A query at
    position p sees keys at positions p - window + 1 .. p (0 .. p without window). The callback applies `rope` to q and
    k, which on a GPU is part of writing k and v to the cache, and it writes them before it reads them back.
    """

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
    ) -> jax.Array: ...


class DenseAttention:
    """Attention of a batch of whole sequences of equal length, their tokens flattened to T = batch * length.

    Keeps nothing between calls and holds all [length, length] scores at once: for users and tests, not for serving.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch = batch
        self.length = length

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
    ) -> jax.Array:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return _attend_sequence(q, k, v, scale=scale, window=window)

        split = (self.batch, self.length)
        out = jax.vmap(attend)(*(x.reshape(*split, *x.shape[1:]) for x in (q, k, v)))
        return out.reshape(q.shape)


def _attend_sequence(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None) -> jax.Array:
    """Causal attention of one sequence: q [L, H, D], k and v [L, KVH, D] -> [L, H, D]; softmax in float32."""
    length, num_heads, head_dim = q.shape
    grouped = q.reshape(length, k.shape[1], -1, head_dim)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = scale * jnp.einsum("qhgd,khd->hgqk", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("hgqk,khd->qhgd", probabilities, v, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(length, num_heads, head_dim).astype(q.dtype)
