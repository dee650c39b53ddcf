"""A model made of numpy: KV memory that only holds token ids, and a "next token" that depends on all of them.

What a sequence reads it reads through its block table, from memory that is moved by nothing but the plan's copies and
swaps; so one wrong block anywhere changes every later token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from beam_reference import beam_search

from jaxpaged.config import CacheConfig
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.request import Request

VOCAB = 50
# Of logits and beams.
LOGPROB_SPREAD = 2.0
GARBAGE = -7


def next_token(history: list[int], seed: int) -> int:
    """Deterministic hash of all tokens so far and the sequence's seed."""
    digest = hashlib.blake2b(np.array([seed, *history], np.uint64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def next_logprobs(history: list[int]) -> np.ndarray:
    """[VOCAB] float32, as the hash of all tokens so far has it."""
    digest = hashlib.blake2b(np.array(history, np.uint64).tobytes(), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(digest, "little")).normal(size=VOCAB) * LOGPROB_SPREAD
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def tokens_alone(request: Request, max_model_len: int) -> list[list[int]]:
    """Output tokens of each sequence of `request`, computed with no memory at all."""
    stops = set(request.params.stop_token_ids)
    if not request.params.ignore_eos:
        stops |= request.eos_token_ids
    limit = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    settings = request.params.beam_search
    if settings is not None:
        found = beam_search(
            lambda output: next_logprobs(request.prompt_token_ids + output),
            width=request.params.n,
            max_tokens=limit,
            stop_ids=stops,
            length_penalty=settings.length_penalty,
            early_stopping=settings.early_stopping,
        )
        return [f.token_ids for f in found]
    outputs = []
    for sequence in request.sequences:
        out: list[int] = []
        while len(out) < limit and not (out and out[-1] in stops):
            out.append(next_token(request.prompt_token_ids + out, sequence.seed))
        outputs.append(out)
    return outputs


@dataclass
class PagedModel:
    """Runs plans over block memory of token ids."""

    cache: CacheConfig
    device: np.ndarray = field(init=False)  # [blocks, block_size]
    newest: dict[int, int] = field(default_factory=dict)  # row -> token last drawn
    host: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.device = np.full((self.cache.num_blocks, self.cache.block_size), GARBAGE)
        self.host = np.full((self.cache.num_host_blocks, self.cache.block_size), GARBAGE)

    def move(self, plan: StepPlan) -> None:
        """Swap out, swap in, copy: each list at once, in this order."""
        for destination, source, pairs in (
            (self.host, self.device, plan.swap_out),
            (self.device, self.host, plan.swap_in),
            (self.device, self.device, plan.copies),
        ):
            assert len(set(pairs[:, 1].tolist())) == len(pairs), "two sources for one destination"
            destination[pairs[:, 1]] = source[pairs[:, 0]]

    def slots(self, plan: StepPlan) -> np.ndarray:
        """[T], where the plan writes."""
        rows = np.repeat(np.arange(len(plan.kv_lens)), np.diff(plan.query_starts))
        blocks = plan.block_tables[rows, plan.positions // self.cache.block_size]
        assert (blocks > 0).all(), "a write into the null block"
        return blocks * self.cache.block_size + plan.positions % self.cache.block_size

    def spoil(self, plan: StepPlan) -> None:
        """Leave garbage where the plan writes, as a step that failed may."""
        self.device.reshape(-1)[self.slots(plan)] = GARBAGE

    def run(self, plan: StepPlan) -> StepResult:
        """Check the plan's shape, move blocks, write the tokens, read the histories back, draw."""
        starts, counts = plan.query_starts, np.diff(plan.query_starts)
        assert (counts[: plan.num_decodes] == 1).all() and (counts > 0).all()
        assert starts[-1] == len(plan.token_ids) == len(plan.positions)
        assert plan.block_tables.shape[0] == len(plan.scheduled) == len(plan.kv_lens)
        self.move(plan)
        rows = np.repeat(np.arange(len(counts)), counts)
        slots = self.slots(plan)
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        token_ids = plan.token_ids.tolist()
        assert all(token >= 0 for token in token_ids[plan.num_decodes :]), "only a decode takes a token not known yet"
        self.device.reshape(-1)[slots] = [token if token >= 0 else self.newest[-1 - token] for token in token_ids]
        drawn = []
        num_top = max(plan.sample.num_logprobs, 0)
        top_ids, top = np.zeros((len(plan.sampled), num_top), np.int32), np.zeros((len(plan.sampled), num_top))
        for i, sequence in enumerate(plan.sampled):
            index = int(plan.sample.token_index[i])
            row = rows[index]
            length = int(plan.positions[index]) + 1
            assert plan.kv_lens[row] == length, "a draw from a token that is not the row's last"
            assert plan.sample.position[i] == length
            history = self.device[plan.block_tables[row]].reshape(-1)[:length].tolist()
            low, high = plan.sample.seed[i].tolist()
            assert low + (high << 32) == sequence.seed
            drawn.append(next_token(history, sequence.seed))
            if num_top:
                logprobs = next_logprobs(history)
                top_ids[i] = np.argsort(-logprobs, kind="stable")[:num_top]
                top[i] = logprobs[top_ids[i]]
        self.newest.update(zip(plan.sample.row.tolist(), drawn, strict=True))
        return StepResult(np.array(drawn, np.int32), top_token_ids=top_ids, top_logprobs=top.astype(np.float32))
