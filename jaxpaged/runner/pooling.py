"""Sums of a step's hidden states, for embeddings: a small program of its own, which other steps do not run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.plan import PoolSpan


def sum_spans(hidden: jax.Array, spans: tuple[PoolSpan, ...], num_rows: int) -> jax.Array:
    """The sum of the hidden states of each span's tokens. [num_rows, E] float32, the spans' first.

    Compiles once for each shape of `hidden`.

    Args:
        hidden: [T, E], of all tokens of the step.
        num_rows: most spans that a step may have.
    """
    owner = np.full(len(hidden), num_rows, np.int32)  # outside all rows: left out
    for row, span in enumerate(spans):
        owner[span.start : span.start + span.count] = row
    return _sum_by_owner(hidden, jax.device_put(owner, hidden.sharding), num_rows=num_rows)


@partial(jax.jit, static_argnames="num_rows")
def _sum_by_owner(hidden: jax.Array, owner: jax.Array, *, num_rows: int) -> jax.Array:
    # No product with a matrix of zeros and ones: a hidden state that is NaN must not reach the sums of others.
    return jax.ops.segment_sum(hidden.astype(jnp.float32), owner, num_segments=num_rows)
