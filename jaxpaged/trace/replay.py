"""Rebuilds the state of a scheduler's memory from its trace, one record after another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from jaxpaged.trace.format import Decode, Finish, Header, NewRequest, Prefill, Record, TableChange, TraceError

Key = tuple[int, int]
Status = Literal["waiting", "running", "swapped"]


@dataclass
class Totals:
    """Sums since the start of the trace; `looked_up` and `hits` are tokens, of all admissions."""

    admissions: int = 0
    looked_up: int = 0
    hits: int = 0
    preemptions: int = 0
    copies: int = 0
    swapped_blocks: int = 0
    finished: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass
class Replay:
    """The state after the records that were applied.

    Attributes:
        requests, status: of the unfinished requests, by number.
        open_sequences: of each of them, how many sequences have not ended.
        tables, host_tables: by (request, sequence); none is empty.
        references: of each owned block of the device pool, how many table entries refer to it.
        findable: blocks that the prefix cache can find, owned or free.
        kv_lens: tokens in the pool of each sequence that has computed any since it got its blocks.
        decodes: sequences that decode in this step, with their lengths; `prefills` are the others of the step.
    """

    header: Header
    step: int = 0
    t: float = 0.0
    is_idle: bool = True
    requests: dict[int, NewRequest] = field(default_factory=dict)
    status: dict[int, Status] = field(default_factory=dict)
    open_sequences: dict[int, set[int]] = field(default_factory=dict)
    tables: dict[Key, list[int]] = field(default_factory=dict)
    host_tables: dict[Key, list[int]] = field(default_factory=dict)
    references: Counter[int] = field(default_factory=Counter)
    findable: set[int] = field(default_factory=set)
    kv_lens: dict[Key, int] = field(default_factory=dict)
    decodes: dict[Key, int] = field(default_factory=dict)
    prefills: list[Prefill] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    @property
    def num_usable(self) -> int:
        return self.header.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self.num_usable - len(self.references)

    @property
    def shared(self) -> dict[int, int]:
        """Blocks with more than one reference, and how many they have."""
        return {block: count for block, count in self.references.items() if count > 1}

    @property
    def queue(self) -> list[int]:
        """Waiting and swapped requests in the order of service."""
        waiting = [r for r, status in self.status.items() if status != "running"]
        return sorted(waiting, key=lambda r: (self.requests[r].priority, self.requests[r].arrived, r))

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Of this step: (of prefills, of decodes)."""
        return sum(p.tokens for p in self.prefills), len(self.decodes)

    def apply(self, record: Record) -> None:
        """Takes in the next record.

        Raises:
            TraceError: it does not fit the records before it.
        """
        if record.reset:
            self._forget()
        elif record.step < self.step:
            raise TraceError(f"step {record.step} of the trace follows step {self.step}")
        self.step, self.t, self.is_idle = record.step, record.t, record.idle
        for new in record.new:
            if new.request in self.requests:
                raise self._error(f"request {new.request} is new twice")
            self.requests[new.request] = new
            self.status[new.request] = "waiting"
            self.open_sequences[new.request] = set(range(new.n))
        self._apply_status(record)
        for change in record.tables:
            self._change_table(change, self.tables, self.header.num_blocks, first=1)
        for change in record.host_tables:
            self._change_table(change, self.host_tables, self.header.num_host_blocks, first=0)
        if record.tables or record.host_tables:
            for key in [key for key in self.kv_lens if key not in self.tables and key not in self.host_tables]:
                del self.kv_lens[key]
        if not self.findable.issuperset(record.uncached) or not self.findable.isdisjoint(record.cached):
            raise self._error("a block becomes findable or lost twice")
        # In place: there may be far more of them than a step changes.
        self.findable.difference_update(record.uncached)
        self.findable.update(record.cached)
        self._apply_work(record)
        self._close_finished(record)
        self._check(record)

    def snapshot(self) -> Record:
        """One record that holds the whole state; the numbers of the requests stay."""
        return Record(
            self.step,
            self.t,
            self.num_free,
            len(self.findable),
            idle=self.is_idle,
            reset=True,
            new=list(self.requests.values()),
            finished=[
                Finish(r, s, "")
                for r, new in self.requests.items()
                for s in range(new.n)
                if s not in self.open_sequences[r]
            ],
            running=[r for r, status in self.status.items() if status == "running"],
            tables=[TableChange(r, s, 0, list(table)) for (r, s), table in self.tables.items()],
            host_tables=[TableChange(r, s, 0, list(table)) for (r, s), table in self.host_tables.items()],
            cached=sorted(self.findable),
            prefills=list(self.prefills),
            decodes=[Decode(r, s, kv_len) for (r, s), kv_len in self.decodes.items()],
        )

    def _forget(self) -> None:
        self.requests, self.status, self.open_sequences = {}, {}, {}
        self.tables, self.host_tables, self.references, self.findable = {}, {}, Counter(), set()
        self.kv_lens, self.decodes, self.prefills = {}, {}, []

    def _apply_status(self, record: Record) -> None:
        for r in record.running:
            self._set_status(r, "running")
        for admission in record.admitted:
            self._set_status(admission.request, "running")
            self.totals.admissions += 1
            self.totals.looked_up += admission.tokens
            self.totals.hits += admission.hits
        for preemption in record.preempted:
            self._set_status(preemption.request, "swapped" if preemption.way == "swap" else "waiting")
            self.totals.preemptions += preemption.way != "reset"
        self.totals.copies += len(record.copies)
        self.totals.swapped_blocks += len(record.swapped_out) + len(record.swapped_in)

    def _set_status(self, request: int, status: Status) -> None:
        if request not in self.requests:
            raise self._error(f"request {request} is not known")
        self.status[request] = status

    def _change_table(self, change: TableChange, tables: dict[Key, list[int]], num_blocks: int, *, first: int) -> None:
        key = change.request, change.sequence
        if change.request not in self.requests or change.sequence >= self.requests[change.request].n:
            raise self._error(f"sequence {change.sequence} of request {change.request} is not known")
        before = tables.get(key, [])
        bad = next((b for b in change.blocks if not first <= b < num_blocks), None)
        if bad is not None:
            raise self._error(f"block {bad} is none of the pool's {num_blocks}")
        if change.keep > len(before):
            raise self._error(f"a table of {len(before)} blocks keeps {change.keep}")
        table = before[: change.keep] + change.blocks
        if tables is self.tables:
            self.references.update(change.blocks)
            for block in before[change.keep :]:
                self.references[block] -= 1
                if not self.references[block]:
                    del self.references[block]
        if table:
            tables[key] = table
        else:
            tables.pop(key, None)

    def _apply_work(self, record: Record) -> None:
        for key in record.decodes_ended:
            if self.decodes.pop(key, None) is None:
                raise self._error(f"sequence {key[1]} of request {key[0]} ends to decode, but did not")
        for key in self.decodes:
            self.decodes[key] += 1
        for decode in record.decodes:
            self.decodes[decode[:2]] = decode.kv_len
        self.prefills = record.prefills
        work = list(self.decodes.items()) + [((p.request, p.sequence), p.kv_len) for p in self.prefills]
        for key, kv_len in work:
            if len(self.tables.get(key, ())) * self.header.block_size < kv_len:
                raise self._error(f"sequence {key[1]} of request {key[0]} has {kv_len} tokens in too few blocks")
            self.kv_lens[key] = kv_len
        prefill, decode_tokens = self.num_tokens
        self.totals.prefill_tokens += prefill
        self.totals.decode_tokens += decode_tokens

    def _close_finished(self, record: Record) -> None:
        for finish in record.finished:
            still_open = self.open_sequences.get(finish.request, set())
            if finish.sequence not in still_open:
                raise self._error(f"sequence {finish.sequence} of request {finish.request} ends, but was not open")
            still_open.remove(finish.sequence)
            if not still_open:
                self.totals.finished += 1
                del self.requests[finish.request], self.status[finish.request], self.open_sequences[finish.request]

    def _check(self, record: Record) -> None:
        if record.free != self.num_free:
            raise self._error(f"the pool counted {record.free} free blocks, the tables leave {self.num_free}")
        if record.findable != len(self.findable):
            raise self._error(f"the pool counted {record.findable} findable blocks, here are {len(self.findable)}")

    def _error(self, what: str) -> TraceError:
        return TraceError(f"step {self.step} of the trace: {what}; the file is damaged")
