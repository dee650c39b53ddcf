"""Sums of hidden states, against float64 numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.plan import PoolSpan
from jaxpaged.request import Request, SamplingParams
from jaxpaged.runner.pooling import sum_spans

REQUEST = Request("a", [1], SamplingParams(), max_tokens=0, seed=0)


def span(start: int, count: int) -> PoolSpan:
    return PoolSpan(REQUEST, start, count, is_first=True, is_last=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_each_span_is_summed_in_float32(dtype: jnp.dtype) -> None:
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(64, 5)) * 100, dtype)
    spans = (span(3, 40), span(50, 1), span(60, 4))
    exact = np.asarray(hidden, np.float64)
    expected = [exact[s.start : s.start + s.count].sum(0) for s in spans]
    sums = np.asarray(sum_spans(hidden, spans, 4))[:3]
    assert sums.shape == (3, 5) and sums.dtype == np.float32
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-3)


def test_what_is_not_a_number_stays_where_it_is() -> None:
    hidden = np.ones((8, 2), np.float32)
    hidden[[0, 4, 7]] = [[np.nan], [np.inf], [np.nan]]
    sums = sum_spans(jnp.asarray(hidden), (span(1, 3), span(4, 1), span(5, 2)), 3)
    np.testing.assert_array_equal(sums, np.float32([[3, 3], [np.inf, np.inf], [2, 2]]))
