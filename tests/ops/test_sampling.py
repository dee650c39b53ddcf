"""Draws and log-probabilities against exact probabilities in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from jaxpaged.ops import filters
from jaxpaged.ops.sampling import _pick, gather_logprobs, sample

Floats = npt.NDArray[np.float64]
NUM_DRAWS = 4096


def probabilities(
    logits: npt.ArrayLike, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """The distribution that `sample` draws one row from: a full sort, in float64."""
    p = special.softmax(np.asarray(logits, np.float64) / temperature)
    p[p < min_p * p.max()] = 0
    if top_k and top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    if top_p < 1:
        p /= p.sum()
        above = np.array([p[p > x].sum() for x in p])
        p[above >= top_p] = 0
    return p / p.sum()


def draw(
    logits: npt.ArrayLike,
    *,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
    seed: npt.ArrayLike = (0, 0),
    position: npt.ArrayLike = 0,
    vocab_size: int | None = None,
) -> npt.NDArray[np.int32]:
    """`sample` with every setting spread over the rows of `logits`."""
    logits = jnp.asarray(logits, jnp.float32)
    n = logits.shape[0]
    rows = [(temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32), (min_p, jnp.float32)]
    settings = [jnp.broadcast_to(jnp.asarray(value, dtype), (n,)) for value, dtype in rows]
    seed = jnp.broadcast_to(jnp.asarray(seed, jnp.uint32), (n, 2))
    position = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (n,))
    return np.asarray(jitted(logits, *settings, seed, position, vocab_size=vocab_size))


jitted = jax.jit(sample, static_argnames="vocab_size")


def random_logits(n: int, vocab: int, seed: int = 0, spread: float = 2.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * spread).astype(np.float32)


SETTINGS = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"top_k": 6, "top_p": 0.7},
    {"min_p": 0.05, "top_p": 0.9},
    {"temperature": 1.7, "min_p": 0.02, "top_k": 7, "top_p": 0.85},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_frequencies(options: dict[str, float]) -> None:
    logits = random_logits(1, 12, seed=3, spread=1.0)
    expected = probabilities(logits[0], **options)
    tokens = draw(np.repeat(logits, NUM_DRAWS, 0), position=np.arange(NUM_DRAWS), seed=(5, 9), **options)
    counts = np.bincount(tokens, minlength=12)
    assert counts[expected == 0].sum() == 0
    rare = expected * NUM_DRAWS < 5  # too few for the test: together they are one class
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    if (expected > 0).sum() > 1:
        assert stats.chisquare(counts[expected > 0], expected[expected > 0] * NUM_DRAWS).pvalue > 1e-3


@pytest.mark.parametrize("vocab", [700, 1024])
def test_frequencies_over_many_columns(vocab: int) -> None:
    """A vocabulary wider than one row of the table, with and without padding of the last."""
    logits = random_logits(1, vocab, spread=0.7)
    tokens = np.concatenate(
        [draw(np.repeat(logits, NUM_DRAWS, 0), position=np.arange(NUM_DRAWS), seed=(i, 0)) for i in range(4)]
    )
    expected = probabilities(logits[0])
    groups = np.arange(vocab) * 97 % 50  # scattered, so that neither rows nor columns line up with them
    counts, mass = (np.bincount(groups, x) for x in (np.bincount(tokens, minlength=vocab), expected))
    assert stats.chisquare(counts, mass * len(tokens)).pvalue > 1e-3


def test_draw_is_the_inverse_of_the_cdf() -> None:
    """The token of a given seed and position, computed apart: column by column, then within the column."""
    n, vocab = 300, 1024
    logits = random_logits(n, vocab)
    tokens = draw(logits, seed=(7, 0), position=np.arange(n))
    for position in range(n):
        u = jax.random.uniform(jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), position), (2,))
        table = special.softmax(logits[position].astype(np.float64)).reshape(-1, 512)
        column = np.searchsorted(np.cumsum(table.sum(0)), float(u[0]), side="right")
        sums = np.cumsum(table[:, column])
        assert tokens[position] == np.searchsorted(sums, float(u[1]) * sums[-1], side="right") * 512 + column


def kept_tokens(logits: npt.NDArray[np.float32], options: list[dict[str, float]]) -> npt.NDArray[np.bool_]:
    """Which tokens `apply_filters` keeps, [N, V]."""
    table = jnp.asarray(logits)[:, :, None]
    weights = jnp.exp(table - table.max(axis=1, keepdims=True))
    columns = [
        jnp.asarray([row.get(name, default) for row in options], dtype)
        for name, default, dtype in (("top_k", 0, jnp.int32), ("top_p", 1, jnp.float32), ("min_p", 0, jnp.float32))
    ]
    return np.asarray(filters.apply_filters(table, weights, *columns)[..., 0] > 0)


# With 4 candidates most thresholds are found by bisection, with 256 none is.
@pytest.mark.parametrize("candidates", [4, 256])
def test_kept_sets(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    monkeypatch.setattr(filters, "CANDIDATES", candidates)
    rng = np.random.default_rng(1)
    n, vocab = 200, 40
    logits = random_logits(n, vocab, seed=2)
    logits[::2] = np.round(logits[::2])  # many ties
    options: list[dict[str, float]] = [
        {
            "top_k": int(rng.choice([0, 1, 3, 5, 20, 39, 40, 41, 10**9])),
            "top_p": float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9])),
            "min_p": float(rng.choice([0.0, 0.003, 0.07, 1.0])),
        }
        for _ in range(n)
    ]
    kept = kept_tokens(logits, options)
    for row in range(n):
        np.testing.assert_array_equal(kept[row], probabilities(logits[row], **options[row]) > 0, str(options[row]))


@pytest.mark.parametrize("candidates", [2, 256])
def test_ties_stay_together(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    monkeypatch.setattr(filters, "CANDIDATES", candidates)
    logits = np.array([[1, 3, 3, 2, 3, 2, -1, -1]], np.float32)
    cases: list[tuple[dict[str, float], list[int]]] = [
        ({"top_k": 1}, [1, 2, 4]),
        ({"top_k": 4}, [1, 2, 3, 4, 5]),
        ({"top_k": 5}, [1, 2, 3, 4, 5]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.1}, [1, 2, 4]),
        ({"top_p": 0.76}, [1, 2, 4]),  # they hold 0.768
        ({"top_p": 0.78}, [1, 2, 3, 4, 5]),
        ({"min_p": 1.0}, [1, 2, 4]),
    ]
    kept = kept_tokens(np.repeat(logits, len(cases), 0), [options for options, _ in cases])
    for row, (options, expected) in enumerate(cases):
        assert np.flatnonzero(kept[row]).tolist() == expected, options


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=30, max_size=30),
    top_k=st.integers(0, 31),
    candidates=st.sampled_from([3, 64]),
)
def test_top_k_of_any_floats(values: list[float], top_k: int, candidates: int) -> None:
    """Negative, denormal, equal: the k-th largest is exact."""
    logits = np.array([values], np.float32)
    top = -np.sort(-logits)[:, : min(candidates, 30)]
    kth = filters._kth_largest(jnp.asarray(logits)[:, :, None], jnp.asarray(top), jnp.asarray([top_k or 30]))
    assert kth[0] == (np.sort(logits[0])[-top_k] if 0 < top_k < 30 else -np.inf)


def test_greedy() -> None:
    logits = random_logits(50, 700)
    np.testing.assert_array_equal(draw(logits, temperature=0.0), logits.argmax(1))
    np.testing.assert_array_equal(draw(logits, top_k=1, position=np.arange(50)), logits.argmax(1))
    np.testing.assert_array_equal(draw(logits, top_p=1e-9, position=np.arange(50)), logits.argmax(1))
    tied = np.zeros((2, 700), np.float32)
    tied[0, [650, 3, 515]] = 1
    assert draw(tied, temperature=0.0).tolist() == [3, 0]


def test_top_k_1_of_logits_whose_probabilities_are_equal_in_float32() -> None:
    logits = np.full((64, 5), -5, np.float32)
    logits[:, 1], logits[:, 3] = 1e-3, np.nextafter(np.float32(1e-3), np.float32(1))
    assert set(draw(logits, top_k=1, position=np.arange(64))) == {3}


def test_padding_ids_are_never_drawn() -> None:
    logits = random_logits(256, 600)
    logits[:, 590:] = 50
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 10), (2.0, 300)):
        tokens = draw(logits, temperature=temperature, top_k=top_k, position=np.arange(256), vocab_size=590)
        assert tokens.max() < 590
    np.testing.assert_array_equal(draw(logits, temperature=0.0, vocab_size=590), logits[:, :590].argmax(1))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.full((NUM_DRAWS, 1030), -np.inf, np.float32)
    logits[:, [5, 517, 1029]] = [0, 1, -100]  # exp(-101) is 0 in float32, once denormals are flushed
    assert set(draw(logits, position=np.arange(NUM_DRAWS))) == {5, 517}


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(np.float32(1), np.float32(0))])
@pytest.mark.parametrize("scale", [1.0, 1e-37, 3e37])
def test_ends_of_the_cdf(uniform: float, scale: float) -> None:
    weights = np.array([[0, 0, 0.3, 0, 0.1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]], np.float32) * np.float32(scale)
    picked = _pick(jnp.asarray(weights), jnp.full(2, uniform, jnp.float32))
    assert picked.tolist() == ([2, 7] if uniform == 0 else [5, 7])


def test_draw_does_not_depend_on_the_batch() -> None:
    """Rows that take every way through the filters, alone, together and in another order."""
    n, vocab = 12, 1500
    logits = random_logits(n, vocab)
    logits[::3] *= 0.01  # so flat that their nucleus is wider than the candidates
    options = {
        "temperature": np.array([0, 1, 1.3, 0.7] * 3),
        "top_k": np.array([0, 5, 700, 0, 0, 1] * 2),
        "top_p": np.array([1, 0.9, 0.5, 0.99] * 3),
        "min_p": np.array([0, 0, 0.1] * 4),
        "seed": np.random.default_rng(0).integers(0, 2**32, (n, 2), dtype=np.uint32),
        "position": np.arange(n) * 7,
    }
    together = draw(logits, **options)
    order = np.random.default_rng(1).permutation(n)
    np.testing.assert_array_equal(
        draw(logits[order], **{name: value[order] for name, value in options.items()}), together[order]
    )
    for row in range(n):
        alone = draw(logits[row : row + 1], **{name: value[row : row + 1] for name, value in options.items()})
        assert alone[0] == together[row]


def test_both_halves_of_the_seed_count() -> None:
    flat = np.zeros((1, 1024), np.float32)
    tokens = {int(draw(flat, seed=seed, position=3)[0]) for seed in ((1, 0), (0, 1), (1, 1), (1, 2**31), (2**31, 1))}
    assert len(tokens) == 5
    assert draw(flat, seed=(1, 2**31), position=4)[0] != draw(flat, seed=(1, 2**31), position=3)[0]


def test_nan_logits_give_an_id() -> None:
    logits = np.full((2, 700), np.nan, np.float32)
    tokens = draw(logits, temperature=[0, 1], vocab_size=690)
    assert ((tokens >= 0) & (tokens < 690)).all()


@pytest.mark.parametrize("vocab_size", [None, 580])
def test_logprobs(vocab_size: int | None) -> None:
    logits = random_logits(20, 600, spread=5)
    logits[:, 7] = logits[:, 3]  # equals
    logits[10:] -= 300  # a softmax that does not shift would underflow
    real = logits[:, :vocab_size].astype(np.float64)
    expected = special.log_softmax(real, axis=1)
    ids = np.random.default_rng(5).integers(0, 580, 20)
    ids[:2] = 3, 7
    logprobs, ranks, top_ids, top_logprobs = gather_logprobs(
        jnp.asarray(logits), jnp.asarray(ids, jnp.int32), 5, vocab_size=vocab_size
    )
    rows = np.arange(20)
    np.testing.assert_allclose(logprobs, expected[rows, ids], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ranks, 1 + (real > real[rows, ids][:, None]).sum(1))
    best = np.argsort(-real, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(top_ids, best)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(expected, best, 1), rtol=1e-5, atol=1e-5)


def test_logprobs_of_the_drawn_token_alone() -> None:
    logits = jnp.asarray(random_logits(3, 50))
    logprobs, ranks, top_ids, top_logprobs = gather_logprobs(logits, jnp.argmax(logits, axis=1), 0)
    assert top_ids.shape == top_logprobs.shape == (3, 0)
    assert ranks.tolist() == [1, 1, 1]
    np.testing.assert_allclose(logprobs, special.log_softmax(np.asarray(logits, np.float64), axis=1).max(1), rtol=1e-5)
