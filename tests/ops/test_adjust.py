"""Masks, additions and penalties against their definitions in numpy, and distributions with all of them at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from scipy import special, stats

from jaxpaged.ops import adjust
from jaxpaged.ops.adjust import History, edit_logits, mask_logits, penalize, unless_empty, write_tokens
from jaxpaged.ops.sampling import NOTHING, gather_logprobs, sample

Logits = npt.NDArray[np.float32]
BLOCK = 4


def random_logits(n: int, vocab: int, seed: int = 0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * 3).astype(np.float32)


def penalized(
    logits: npt.NDArray[np.floating], prompt: list[int], output: list[int], r: float, f: float, p: float
) -> npt.NDArray[np.float64]:
    """One row by the definitions, token by token, in float64."""
    result = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        result[token] = result[token] / r if result[token] > 0 else result[token] * r
    for token in set(output):
        result[token] -= f * output.count(token)
        result[token] -= p
    return result


def paged(histories: list[list[int]], max_len: int, seed: int = 0) -> History:
    """Histories scattered over blocks, with garbage in every other slot."""
    rng = np.random.default_rng(seed)
    width = -(-max_len // BLOCK)
    tables = 1 + rng.permutation(len(histories) * width).reshape(len(histories), width).astype(np.int32)
    tokens = rng.integers(0, 5, (tables.size + 1, BLOCK)).astype(np.int32)
    for table, history in zip(tables, histories, strict=True):
        for i, token in enumerate(history):
            tokens[table[i // BLOCK], i % BLOCK] = token
    return History(jnp.asarray(tokens), jnp.asarray(tables), jnp.asarray([len(h) for h in histories], jnp.int32))


@pytest.mark.parametrize("at_once", [3, 256])
def test_penalties(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Rows of all kinds side by side; with 3 tokens at once, prompts and outputs span many rounds."""
    monkeypatch.setattr(adjust, "COUNTED_AT_ONCE", at_once)
    rng = np.random.default_rng(1)
    n, vocab, max_len = 12, 40, 33
    logits = random_logits(n, vocab)
    lengths = [(int(rng.integers(1, 20)), int(rng.integers(0, 13))) for _ in range(n)]
    prompts = [rng.integers(0, vocab, length).tolist() for length, _ in lengths]
    outputs = [rng.integers(0, 6, length).tolist() for _, length in lengths]  # many repeats
    settings = [(1.3, 0.7, 0.5), (0.7, 0, 0), (1, -1.5, 0), (1, 0, 2), (1, 0, 0), (1.1, -0.2, -2)] * 2
    columns = [jnp.asarray(c, jnp.float32) for c in zip(*settings, strict=True)]
    history = paged([p + o for p, o in zip(prompts, outputs, strict=True)], max_len)
    prompt_len = jnp.asarray([len(p) for p in prompts], jnp.int32)
    result = np.asarray(penalize(jnp.asarray(logits), history, prompt_len, *columns))
    for row in range(n):
        expected = penalized(logits[row], prompts[row], outputs[row], *settings[row])
        np.testing.assert_allclose(result[row], expected, rtol=1e-5, atol=1e-5)
        if settings[row] == (1, 0, 0):
            np.testing.assert_array_equal(result[row], logits[row])


def test_repetition_penalty_is_that_of_transformers() -> None:
    """As its RepetitionPenaltyLogitsProcessor has it: gather, divide or multiply by the sign, scatter back."""
    scores, ids = random_logits(4, 50, seed=8), np.random.default_rng(9).integers(0, 50, (4, 30))
    scores[:, 0] = 0
    found = np.take_along_axis(scores, ids, axis=1)
    expected = scores.copy()
    np.put_along_axis(expected, ids, np.where(found < 0, found * np.float32(1.3), found / np.float32(1.3)), axis=1)
    prompt_len, one = jnp.asarray([30, 10, 0, 1], jnp.int32), jnp.ones(4, jnp.float32)
    result = penalize(jnp.asarray(scores), paged(ids.tolist(), 30), prompt_len, 1.3 * one, 0 * one, 0 * one)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_repetition_penalty_of_transformers_itself() -> None:
    """RepetitionPenaltyLogitsProcessor(1.3)(ids, scores) gave these, in transformers 5 on torch."""
    scores, ids = np.float32([[1.5, -2.0, 0.0, 3.25, -0.5, 0.75]]), [[0, 1, 1, 4, 0, 2]]
    expected = [[1.1538461446762085, -2.5999999046325684, 0.0, 3.25, -0.6499999761581421, 0.75]]
    one = jnp.ones(1)
    result = penalize(jnp.asarray(scores), paged(ids, 8), jnp.asarray([6], jnp.int32), 1.3 * one, 0 * one, 0 * one)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_a_long_prompt_counts_to_its_end() -> None:
    prompt = list(range(1000)) + [0] * 3000
    history = paged([prompt, [1]], 4001)
    logits = jnp.ones((2, 1100))
    args = [jnp.asarray(x, jnp.float32) for x in ([2, 1], [0, 0], [0, 0])]
    result = np.asarray(penalize(logits, history, jnp.asarray([4000, 1], jnp.int32), *args))
    np.testing.assert_array_equal(result[0], [0.5] * 1000 + [1] * 100)
    np.testing.assert_array_equal(result[1], 1)


def test_tokens_are_written_to_their_slots_and_padding_nowhere() -> None:
    tokens = write_tokens(jnp.zeros((3, 2), jnp.int32), jnp.asarray([7, 8, 9]), jnp.asarray([5, 2, 6]))
    assert tokens.tolist() == [[0, 0], [8, 0], [0, 7]]


@pytest.mark.parametrize("vocab", [64, 75])
def test_a_mask_leaves_its_tokens_only(vocab: int) -> None:
    logits = random_logits(3, vocab)
    allowed = [{0, 31, 32, 63}, set(range(vocab)), {vocab - 1}]
    words = np.zeros((3, -(-vocab // 32)), np.uint32)
    for row, ids in enumerate(allowed):
        for i in ids:
            words[row, i // 32] |= np.uint32(1 << (i % 32))
    result = np.asarray(mask_logits(jnp.asarray(logits), jnp.asarray(words)))
    for row, ids in enumerate(allowed):
        assert set(np.flatnonzero(np.isfinite(result[row]))) == ids
        np.testing.assert_array_equal(result[row, list(ids)], logits[row, list(ids)])


def test_edits_add_up_and_padding_is_dropped() -> None:
    rows, ids = np.int32([0, 0, 1, 1, 9]), np.int32([2, 2, 0, 1, 3])
    values = np.float32([1, 0.5, -np.inf, 100, 7])
    result = edit_logits(jnp.zeros((2, 4)), rows, ids, values)
    assert result.tolist() == [[0, 0, 1.5, 0], [-np.inf, 100, 0, 0]]
    both = edit_logits(jnp.zeros((1, 2)), np.int32([0, 0]), np.int32([1, 1]), np.float32([100, -np.inf]))
    assert both.tolist() == [[0, -np.inf]]


def test_a_row_without_a_token_left_is_as_it_was() -> None:
    before = jnp.asarray([[1.0, -jnp.inf], [2.0, 3.0]])
    after = jnp.asarray([[-jnp.inf, -jnp.inf], [-jnp.inf, 3.0]])
    assert unless_empty(after, before).tolist() == [[1.0, -np.inf], [-np.inf, 3.0]]


SHAPES = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.4, "min_p": 0.02, "top_k": 7, "top_p": 0.9},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frequencies_with_everything(shape: dict[str, float]) -> None:
    """Mask, bias, penalties, temperature and filters in their order, against exact probabilities."""
    n, vocab = 4096, 12
    logits = random_logits(1, vocab, seed=3)[0] / 6
    prompt, output = [1, 2, 3], [3, 4, 4, 4]
    allowed = [0, 1, 2, 3, 4, 5, 6, 8, 9, 11]
    bias = {0: 0.5, 4: 1.5, 9: -np.inf}
    exact = np.full(vocab, -np.inf)
    exact[allowed] = logits[allowed]
    for token, value in bias.items():
        exact[token] += value
    exact = penalized(exact, prompt, output, 1.2, 0.3, 0.4)
    p = special.softmax(exact / shape.get("temperature", 1.0))
    p[p < shape.get("min_p", 0) * p.max()] = 0
    if "top_k" in shape:
        p[p < np.sort(p)[-int(shape["top_k"])]] = 0
    p /= p.sum()
    p[np.array([p[p > x].sum() for x in p]) >= shape.get("top_p", 1.0)] = 0
    p /= p.sum()

    rows = jnp.tile(jnp.asarray(logits), (n, 1))
    words = jnp.full((n, 1), sum(1 << i for i in allowed), jnp.uint32)
    history = paged([prompt + output], 8)
    history = History(history.tokens, jnp.tile(history.block_tables, (n, 1)), jnp.full(n, 7, jnp.int32))
    full = [jnp.full(n, x, jnp.float32) for x in (1.2, 0.3, 0.4)]

    @jax.jit
    def draw() -> jax.Array:
        def adjusted() -> jax.Array:
            x = mask_logits(rows, words)
            for token, value in bias.items():
                x = edit_logits(x, jnp.arange(n), jnp.full(n, token), jnp.full(n, value))
            return penalize(x, history, jnp.full(n, 3, jnp.int32), *full)

        settings = [
            jnp.full(n, shape.get(name, default), dtype)
            for name, default, dtype in (
                ("temperature", 1, jnp.float32),
                ("top_k", 0, jnp.int32),
                ("top_p", 1, jnp.float32),
                ("min_p", 0, jnp.float32),
            )
        ]
        seed = jnp.tile(jnp.asarray([[5, 11]], jnp.uint32), (n, 1))
        return sample(rows, *settings, seed, jnp.arange(n), adjust=adjusted, adjusts=jnp.bool_(True))

    counts = np.bincount(np.asarray(draw()), minlength=vocab)
    assert counts[p == 0].sum() == 0
    rare = p * n < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, p))
    assert (expected > 0).sum() > 3
    assert stats.chisquare(counts[expected > 0], expected[expected > 0] * n).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_impossible_tokens_gives_none(temperature: float) -> None:
    logits = jnp.asarray(np.array([[-np.inf] * 70, [0] + [-np.inf] * 69], np.float32))
    full = [
        jnp.full(2, x, d) for x, d in ((temperature, jnp.float32), (0, jnp.int32), (1, jnp.float32), (0, jnp.float32))
    ]
    tokens = sample(logits, *full, jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.int32))
    assert tokens.tolist() == [NOTHING, 0]


def test_logprobs_of_several_tokens() -> None:
    logits = random_logits(3, 600)
    logits[:, 7] = logits[:, 3]
    ids = np.int32([[3, 7, 599, 5], [0, -1, 2, -1], [1, 2, -1, -1]])
    logprobs, ranks, *_ = gather_logprobs(jnp.asarray(logits), jnp.asarray(ids), 2)
    expected = special.log_softmax(logits.astype(np.float64), axis=1)
    for row, column in np.argwhere(ids >= 0):
        token = ids[row, column]
        assert logprobs[row, column] == pytest.approx(expected[row, token], abs=1e-5)
        assert ranks[row, column] == 1 + (logits[row] > logits[row, token]).sum()
