"""The running batch as a struct of arrays, so that a step of decodes is planned by a few numpy gathers."""

from __future__ import annotations

import numpy as np

from jaxpaged.core.beam import num_candidates
from jaxpaged.core.plan import IntArray
from jaxpaged.request import GREEDY_EPS, MIN_TEMPERATURE, Sequence, SequenceStatus

CONSTRAINED, PENALIZED, MATCHED = 1, 2, 4


def _depends_on_output(sequence: Sequence) -> bool:
    constraints = sequence.request.constraints
    return constraints is not None and bool(constraints.phrases)


def _device_temperature(temperature: float) -> float:
    return 0.0 if temperature < GREEDY_EPS else max(temperature, MIN_TEMPERATURE)


class BatchRows:
    """One row for each running sequence (R in all); arrays mirror the sequence that holds the row.

    A free row has target = num_computed = 0, so that it never has anything to compute.

    Attributes:
        sequences: [R] the holder of each row, or None.
        version: changes whenever a row changes hands.
        block_tables: [R, P] int32, padded with the null block.
        num_blocks: [R] int32, used entries of the block table.
        num_computed: [R] int32, tokens whose KV is in the pool, or will be before anything that is planned now runs.
        target: [R] int32, tokens that are to be computed: the known ones, and one that is drawn but not known yet.
        scheduled: [R] int32, tokens that the newest plan computes.
        num_cached: [R] int32, leading blocks that have been offered to the prefix cache.
        last_token: [R] int32, token at position target - 1; `on_device` while that has been drawn by a step whose
            results are not known yet.
        on_device: [R] int32, -1 - row: how plans refer to the token last drawn for the row.
        may_share: [R] bool, the next write may hit a block that a sibling refers to.
        leads: [R] bool, computes a prompt from which its siblings will fork.
        pools: [R] bool, its request is for an embedding: nothing is drawn at the end.
        held: [R] bool, stops short of its last known token, until all beams of its search have come as far.
        ended: [R] bool, its last possible token has been drawn, but is not known yet: there is nothing to compute.
        waits: [R] bool, what its next draw may be depends on the tokens before it, so the host must know them first.
        max_len: [R] int32, number of tokens at which the sequence ends for its length.
        stop_ids: [R] tokens that end the sequence.
        adjusts: [R] uint8, CONSTRAINED if the request has `constraints`, plus PENALIZED if a penalty is in force, plus
            MATCHED if it has a grammar.
        repetition, frequency, presence, prompt_len: as in `Penalties`.
        temperature, top_k, top_p, min_p, seed, num_logprobs: as in `SampleBatch`; seed is [R, 2].
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.stop_ids: list[frozenset[int]] = [frozenset()] * num_rows
        self.version = 0
        self._any_stop_ids: frozenset[int] = frozenset()
        self._stops_version = 0
        self._free = list(range(num_rows))[::-1]
        self.block_tables: IntArray = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks: IntArray = np.zeros(num_rows, np.int32)
        self.num_computed: IntArray = np.zeros(num_rows, np.int32)
        self.target: IntArray = np.zeros(num_rows, np.int32)
        self.scheduled: IntArray = np.zeros(num_rows, np.int32)
        self.num_cached: IntArray = np.zeros(num_rows, np.int32)
        self.last_token: IntArray = np.zeros(num_rows, np.int32)
        self.on_device: IntArray = -1 - np.arange(num_rows, dtype=np.int32)
        self.may_share = np.zeros(num_rows, np.bool_)
        self.leads = np.zeros(num_rows, np.bool_)
        self.pools = np.zeros(num_rows, np.bool_)
        self.held = np.zeros(num_rows, np.bool_)
        self.ended = np.zeros(num_rows, np.bool_)
        self.waits = np.zeros(num_rows, np.bool_)
        self.max_len: IntArray = np.zeros(num_rows, np.int32)
        self.adjusts = np.zeros(num_rows, np.uint8)
        self.repetition = np.ones(num_rows, np.float32)
        self.frequency = np.zeros(num_rows, np.float32)
        self.presence = np.zeros(num_rows, np.float32)
        self.prompt_len: IntArray = np.zeros(num_rows, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k: IntArray = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros((num_rows, 2), np.uint32)
        self.num_logprobs: IntArray = np.full(num_rows, -1, np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.sequences) - len(self._free)

    def holder(self, row: int) -> Sequence:
        """The sequence that holds `row`, which must not be free."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def assign(self, sequence: Sequence, *, max_model_len: int) -> None:
        """Give `sequence` a row; `set_table` and `set_target` follow."""
        row = self._free.pop()
        params = sequence.request.params
        sequence.row = row
        sequence.status = SequenceStatus.RUNNING
        self.version += 1
        self.sequences[row] = sequence
        self.stop_ids[row] = sequence.request.stop_ids
        self.pools[row] = sequence.request.pooling is not None
        self.max_len[row] = min(len(sequence.request.prompt_token_ids) + sequence.request.max_tokens, max_model_len)
        self.temperature[row] = _device_temperature(params.temperature)
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = (sequence.seed & 0xFFFFFFFF, sequence.seed >> 32)
        self.num_logprobs[row] = -1 if not params.wants_logprobs else params.logprobs or 0
        if params.beam_search is not None:
            self.num_logprobs[row] = num_candidates(params.n, self.stop_ids[row])
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        is_constrained = sequence.request.constraints is not None
        is_matched = sequence.matcher is not None
        self.adjusts[row] = CONSTRAINED * is_constrained + PENALIZED * (penalties != (1, 0, 0)) + MATCHED * is_matched
        self.repetition[row], self.frequency[row], self.presence[row] = penalties
        self.waits[row] = is_matched or params.beam_search is not None or _depends_on_output(sequence)
        self.prompt_len[row] = len(sequence.request.prompt_token_ids)

    def set_table(self, sequence: Sequence, *, start: int = 0) -> None:
        """Take over the sequence's block table from entry `start` on."""
        row, table = sequence.row, sequence.block_table
        self.block_tables[row, start : len(table)] = table[start:]
        self.num_blocks[row] = len(table)

    def set_target(self, sequence: Sequence, target: int, *, leads: bool) -> None:
        """Set how far `sequence` is to be computed, and take over how far it is."""
        row = sequence.row
        self.num_computed[row] = sequence.num_computed
        self.target[row] = target
        self.leads[row] = leads
        if target:
            self.last_token[row] = sequence.tokens(target - 1, target)[0]

    def release(self, sequence: Sequence) -> None:
        """Take the row of `sequence` back, if it has one."""
        row, sequence.row = sequence.row, -1
        if row < 0:
            return
        self.version += 1
        self.sequences[row] = None
        self.stop_ids[row] = frozenset()
        self._free.append(row)
        self.block_tables[row, : self.num_blocks[row]] = 0
        for array in (self.num_blocks, self.num_computed, self.target, self.scheduled, self.num_cached):
            array[row] = 0
        self.may_share[row] = self.leads[row] = self.held[row] = self.ended[row] = self.waits[row] = False

    def hand_over(self, old: Sequence, new: Sequence) -> None:
        """`new`, which has a row, goes on with the work of `old`, whose row is released."""
        for array in (self.scheduled, self.num_cached):
            array[new.row] = array[old.row]
        self.set_table(new)
        self.set_target(new, int(self.target[old.row]), leads=True)
        self.release(old)

    def any_stop_ids(self) -> frozenset[int]:
        """Tokens that end some row's sequence."""
        if self._stops_version != self.version:
            self._any_stop_ids = frozenset().union(*self.stop_ids)
            self._stops_version = self.version
        return self._any_stop_ids

    def check(self) -> None:
        """Assert that each row mirrors its holder and that free rows are empty."""
        for row, sequence in enumerate(self.sequences):
            table = [] if sequence is None else sequence.block_table
            num_computed = 0 if sequence is None else sequence.num_computed
            assert self.num_blocks[row] == len(table), f"row {row}: {self.num_blocks[row]} blocks, not {len(table)}"
            assert self.block_tables[row, : len(table)].tolist() == table, f"row {row} differs from {table}"
            assert not self.block_tables[row, len(table) :].any(), f"row {row} refers to blocks behind its table"
            assert self.num_computed[row] == num_computed, f"row {row}: {self.num_computed[row]} tokens computed"
            assert sequence is None or sequence.row == row, f"row {row} is held by {sequence}, who has {sequence.row}"
        assert self.num_used == sum(s is not None for s in self.sequences), "the list of free rows is wrong"
