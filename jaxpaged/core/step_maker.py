"""Chooses what one step computes: running groups first, in the order of service; then, if nobody had to give way,
groups from the queue for as long as they fit.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.admission import Admission
from jaxpaged.core.batch import Batch
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.kv_manager import Pair
from jaxpaged.core.rules import Rules
from jaxpaged.core.stats import Totals
from jaxpaged.request import Sequence, SequenceStatus


@dataclass
class Moves:
    """What a step moves before it computes, and who gave way for it."""

    copies: list[Pair] = field(default_factory=list)
    swap_out: list[Pair] = field(default_factory=list)
    swap_in: list[Pair] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)


class StepMaker:
    """Sets how many tokens each row computes in the next step, and gives the rows the blocks for them."""

    def __init__(self, config: SchedulerConfig, batch: Batch, totals: Totals, rules: Rules) -> None:
        self._config = config
        self._rules = rules
        self._batch = batch
        self._kv = batch.kv
        self._rows = batch.rows
        self._admission = Admission(config, batch.kv, batch.rows)
        self._totals = totals
        self._moves = Moves()

    @property
    def admission(self) -> Admission:
        return self._admission

    def make(self, *, may_preempt: bool) -> Moves | None:
        """Chooses the next step; nothing is scheduled where nothing can be computed now.

        Returns:
            None: someone has to give way, and not `may_preempt`. Nothing has changed then.
        """
        moves = self._moves = Moves()
        budget = self._schedule_running(may_preempt)
        # All that could have run may have given way to a prompt that waits for the whole budget: now it has it.
        while moves.preempted and not self._rows.scheduled.any():
            budget = self._schedule_running(may_preempt)
        if budget is None:
            self._rows.scheduled[:] = 0
            return None
        if not moves.preempted:
            self._admit(budget)
        if self._config.debug_checks:
            self._check_writes()
        return moves

    def prefill_rows(self) -> list[int]:
        """The scheduled rows that are more, or less, than a decode: one token in, one draw out."""
        rows = self._rows
        is_other = (rows.target - rows.num_computed != 1) | rows.leads | rows.pools
        others = ((rows.scheduled > 0) & is_other).nonzero()[0]
        return self._batch.in_order(others.tolist()) if len(others) else []

    # Running groups

    def _schedule_running(self, may_preempt: bool) -> int | None:
        """Set how many tokens each running row computes and grow the tables for them. Returns what is left of the
        token budget, or None if someone has to give way and not `may_preempt`."""
        rows = self._rows
        remaining = rows.target - rows.num_computed - rows.held
        remaining[rows.ended] = 0
        single, many = remaining == 1, (remaining > 1).nonzero()[0]
        rows.scheduled[:] = single
        budget = self._config.max_num_batched_tokens - int(np.count_nonzero(single))
        if len(many):
            budget = self._cut_prefills(many.tolist(), budget)
        room = rows.num_blocks * self._kv.block_size - rows.num_computed
        short = ((rows.scheduled > room) | (rows.may_share & (rows.scheduled > 0))).nonzero()[0]
        if not len(short) or self._append_blocks(short):
            return budget
        groups = {self._batch.group_of(rows.holder(row)) for row in short.tolist()}
        if not may_preempt:
            needed = sum(self._kv.blocks_to_write(self._writes(group)) for group in groups)
            if needed > self._kv.pool.num_free:
                return None
        for group in sorted(groups, key=lambda g: g.key, reverse=self._rules.victim == "oldest"):
            if group.unfinished[0].row >= 0:
                self._grow_or_preempt(group)
        return budget

    def _cut_prefills(self, prefilling: list[int], budget: int) -> int:
        """Share the budget among rows with more than one token to compute, in the order of service."""
        rows = self._rows
        for row in self._batch.in_order(prefilling):
            count = self._admission.chunk(int(rows.target[row] - rows.num_computed[row] - rows.held[row]), budget)
            if count == 0:
                return 0  # whoever is behind must not overtake
            rows.scheduled[row] = count
            budget -= count
        return budget

    def _append_blocks(self, short: npt.NDArray[np.intp]) -> bool:
        """Give all rows in `short` their blocks at once, if there are enough and none is shared; whether it was so."""
        rows = self._rows
        if rows.may_share[short].any():
            return False
        end, before = rows.num_computed[short] + rows.scheduled[short], rows.num_blocks[short]
        counts = (-(-end // self._kv.block_size) - before).tolist()
        sequences = [rows.holder(row) for row in short.tolist()]
        blocks = self._kv.append(sequences, counts)
        if blocks is None:
            return False
        if len(blocks) == len(sequences):  # one each, as decodes take them
            rows.block_tables[short, before] = blocks
            rows.num_blocks[short] = before + 1
            return True
        for sequence, start in zip(sequences, before.tolist(), strict=True):
            rows.set_table(sequence, start=start)
        return True

    def _writes(self, group: SequenceGroup) -> list[tuple[Sequence, int]]:
        scheduled = self._rows.scheduled
        return [(s, s.num_computed + int(scheduled[s.row])) for s in group.unfinished if scheduled[s.row]]

    def _grow_or_preempt(self, group: SequenceGroup) -> None:
        """Give `group` the blocks its step needs, all or none, at the cost of the groups at that end of the order where
        victims are taken.

        Groups are grown from the other end, so a victim has not been grown in this step (unless it is the group itself,
        which then gives way before anything was done for it).
        """
        writes = self._writes(group)
        needed = self._kv.blocks_to_write(writes)
        while needed > self._kv.pool.num_free:
            victim = self._batch.running.pop(0 if self._rules.victim == "oldest" else -1)
            self._preempt(victim)
            if victim is group:
                return
        self._grow(writes)

    def _grow(self, writes: list[tuple[Sequence, int]]) -> None:
        for sequence, end in writes:
            last = max(len(sequence.block_table) - 1, 0)
            copy = self._kv.grow(sequence, end)
            if copy is not None:
                self._moves.copies.append(copy)
            self._rows.set_table(sequence, start=last)
            self._rows.may_share[sequence.row] = False

    def _preempt(self, group: SequenceGroup) -> None:
        sequences = group.unfinished
        for sequence in sequences:
            self._rows.release(sequence)
        pairs = None
        if self._config.preemption_mode == "swap" and group.forked:
            pairs = self._kv.swap_out(sequences)
        if pairs is None:
            self._batch.forget(group)
        else:
            self._moves.swap_out += pairs
            for sequence in sequences:
                sequence.status = SequenceStatus.SWAPPED
        group.request.num_preemptions += 1
        self._totals.preemptions_total += 1
        self._moves.preempted.append(group)
        self._batch.queue.push(group)

    # Groups from the queue

    def _admit(self, budget: int) -> None:
        """Admit from the head of the queue while it fits; nobody overtakes a head that does not."""
        if self._rules.static_batches and self._rows.num_computed.any():
            return
        batch = self._batch
        while budget > 0 and (group := batch.queue.peek()) is not None:
            if not group.is_swapped:
                group.forked = len(group.unfinished) == 1  # one alone computes prompt and output in one go
            offer = self._admission.consider(group, budget)
            if offer is None:
                return
            batch.queue.pop()
            bisect.insort(batch.running, group, key=lambda g: g.key)
            sequences = group.unfinished
            if group.is_swapped:
                pairs = self._kv.swap_in(sequences)
                assert pairs is not None, "the host pool holds more than was counted"
                self._moves.swap_in += pairs
            else:
                self._kv.attach(sequences[0], offer.hits)
                if not group.started and group.reads_prefix_cache:
                    group.request.num_cached_tokens = sequences[0].num_computed
                    self._totals.prefix_queries_total += group.target(sequences[0])
                    self._totals.prefix_hits_total += sequences[0].num_computed
            group.started = True
            for sequence in sequences:
                self._rows.assign(sequence, max_model_len=self._config.max_model_len)
                batch.take_over(sequence, group, num_cached=len(offer.hits))
            for sequence, end in offer.writes:
                self._rows.scheduled[sequence.row] = end - sequence.num_computed
                budget -= end - sequence.num_computed
            self._grow(offer.writes)

    def _check_writes(self) -> None:
        for row in np.flatnonzero(self._rows.scheduled).tolist():
            self._kv.check_write(self._rows.holder(row), int(self._rows.num_computed[row] + self._rows.scheduled[row]))
