"""The groups of a scheduler, their rows and their blocks, and what keeps the three in step."""

from __future__ import annotations

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.kv_manager import KVManager, num_blocks_for
from jaxpaged.core.rows import BatchRows
from jaxpaged.core.waiting_queue import WaitingQueue
from jaxpaged.request import FinishReason, Sequence, SequenceStatus


class Batch:
    """Everything that is unfinished.

    Attributes:
        kv: block tables and pools.
        rows: one for each running sequence.
        groups: all, by request id.
        running: those with rows, in the order of service.
        queue: those without.
        max_model_len: most tokens of a sequence.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.max_model_len = config.max_model_len
        self.kv = kv
        self.rows = BatchRows(config.max_num_seqs, num_blocks_for(config.max_model_len, kv.block_size))
        self.groups: dict[str, SequenceGroup] = {}
        self.running: list[SequenceGroup] = []
        self.queue = WaitingQueue()

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        return self.groups[sequence.request.request_id]

    def in_order(self, rows: list[int]) -> list[int]:
        """Rows in the order of service, siblings by index."""
        if len(rows) == 1:
            return rows
        holders = [self.rows.holder(row) for row in rows]
        return [s.row for s in sorted(holders, key=lambda s: (self.group_of(s).key, s.index))]

    def take_over(self, sequence: Sequence, group: SequenceGroup, *, num_cached: int) -> None:
        """Bring the row of `sequence` up to its block table and target."""
        rows, target = self.rows, group.target(sequence)
        rows.set_table(sequence)
        rows.set_target(sequence, target, leads=not group.forked and target > 0)
        rows.held[sequence.row] = group.waits_for_beams
        rows.num_cached[sequence.row] = num_cached
        rows.may_share[sequence.row] = self.kv.shares_next_write(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """As `Scheduler.finish`."""
        if sequence.is_finished:
            # What the last token ended by itself: its length, or a grammar with nothing left to say.
            by_itself = sequence.finish_reason is FinishReason.LENGTH or (
                sequence.finish_reason is FinishReason.STOP and sequence.matcher is not None
            )
            if reason is FinishReason.STOP and by_itself and sequence.stop_reason is None:
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return
        group = self.group_of(sequence)
        if sequence.row >= 0 and self.rows.leads[sequence.row] and len(group.unfinished) > 1:
            heir = group.unfinished[1]
            self.kv.fork(sequence, heir)
            self.rows.hand_over(sequence, heir)
        self.kv.free(sequence)
        self.rows.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if group.request.is_finished:
            del self.groups[group.request.request_id]
            self.queue.discard(group)
            if group in self.running:
                self.running.remove(group)

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        for sequence in reversed(group.unfinished):  # the leader last, so that it hands its work to nobody
            self.finish(sequence, reason)

    def forget(self, group: SequenceGroup) -> None:
        """Free what the group has computed (the prefix cache may still find it); it starts again as a new one."""
        for sequence in reversed(group.unfinished):
            self.kv.free(sequence)
            sequence.status = SequenceStatus.WAITING

    def forget_all(self) -> None:
        """Every group starts again as a new one."""
        for group in self.running:
            for sequence in group.unfinished:
                self.rows.release(sequence)
            self.queue.push(group)
        self.running.clear()
        for group in self.queue:
            self.forget(group)

    def check(self) -> None:
        """Assert the invariants of blocks and tables, and that rows and sequences agree."""
        self.kv.check_invariants(s for group in self.groups.values() for s in group.request.sequences)
        if not self.groups:
            assert self.kv.pool.num_free == self.kv.pool.num_usable, "blocks are owned, but nothing is unfinished"
            assert self.kv.host_pool.num_free == self.kv.host_pool.num_usable, "host blocks leaked"
            assert self.rows.num_used == 0, "rows are in use, but nothing is unfinished"
        self.rows.check()
