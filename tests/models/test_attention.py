"""Dense attention against a loop in float64, at an angle of zero: `test_rope.py` and the families test the rotation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models.attention import DenseAttention


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_equals_a_loop_over_queries(num_heads: int, num_kv_heads: int, window: int | None) -> None:
    batch, length, head_dim, scale = 2, 7, 6, 0.37
    random = np.random.RandomState(0)
    q = random.standard_normal((batch, length, num_heads, head_dim))
    k, v = random.standard_normal((2, batch, length, num_kv_heads, head_dim))
    expected = np.empty_like(q)
    for b, i, h in np.ndindex(batch, length, num_heads):
        first = 0 if window is None else max(0, i + 1 - window)
        kv = h // (num_heads // num_kv_heads)
        weights = np.exp(scale * k[b, first : i + 1, kv] @ q[b, i, h])
        expected[b, i, h] = weights @ v[b, first : i + 1, kv] / weights.sum()

    flat = [jnp.asarray(x.reshape(batch * length, *x.shape[2:]), jnp.float32) for x in (q, k, v)]
    unrotated = jnp.ones((batch * length, head_dim // 2)), jnp.zeros((batch * length, head_dim // 2))
    out = DenseAttention(batch, length)(0, *flat, unrotated, scale=scale, window=window)
    np.testing.assert_allclose(out, expected.reshape(out.shape), atol=1e-5)
