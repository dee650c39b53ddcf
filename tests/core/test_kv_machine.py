"""The KV manager under random operations, over memory that holds token ids: a sequence always reads its own."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.config import CacheConfig
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.request import Request, SamplingParams, Sequence

SIZE = 3
CACHE = CacheConfig(num_blocks=15, block_size=SIZE, num_host_blocks=8, num_eager_blocks=6)
STREAMS = np.random.default_rng(1).integers(0, 1000, (2, 30)).tolist()
FREE = -1


class KVMachine(RuleBasedStateMachine):
    """`family` numbers stand for groups: fork adds to one, and only whole families are swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(CACHE)
        self.device = np.full((CACHE.num_blocks, SIZE), FREE)
        self.host = np.full((CACHE.num_host_blocks, SIZE), FREE)
        self.live: list[Sequence] = []
        self.family: dict[Sequence, int] = {}
        self.tables: dict[Sequence, list[int]] = {}
        self.next_id = 0

    def running(self) -> list[Sequence]:
        return [s for s in self.live if s.block_table]

    def pick(self, data: st.DataObject, sequences: list[Sequence]) -> Sequence:
        return sequences[data.draw(st.integers(0, len(sequences) - 1))]

    def write(self, sequence: Sequence, end: int) -> bool:
        """Grow for tokens up to `end` and write them, unless blocks are short."""
        needed = self.kv.blocks_to_write([(sequence, end)])
        free_before, table_before = self.kv.pool.num_free, list(sequence.block_table)
        if needed > free_before:
            return False
        copy = self.kv.grow(sequence, end)
        assert self.kv.pool.num_free == free_before - needed
        table = sequence.block_table
        if copy is not None:
            source, destination = copy
            assert table_before[-1] == source and table[len(table_before) - 1] == destination
            self.device[destination] = self.device[source]
        else:
            assert table[: len(table_before)] == table_before
        self.kv.check_write(sequence, end)
        for position in range(sequence.num_computed, end):
            self.device[table[position // SIZE], position % SIZE] = sequence.tokens(position, position + 1)[0]
        first_new = sequence.num_computed // SIZE
        sequence.num_computed = end
        self.kv.cache_blocks(sequence, first_new)
        return True

    @rule(
        stream=st.sampled_from(STREAMS),
        length=st.integers(1, 30),
        salt=st.sampled_from([None, "", "a"]),
        computed=st.integers(1, 30),
    )
    def start(self, stream: list[int], length: int, salt: str | None, computed: int) -> None:
        request = Request(str(self.next_id), stream[:length], SamplingParams(), 16, seed=0, cache_salt=salt)
        (sequence,) = request.sequences
        hits = self.kv.match_prefix(sequence, length)
        assert len(hits) <= (length - 1) // SIZE
        assert self.device[hits].reshape(-1).tolist() == stream[: len(hits) * SIZE]
        self.kv.attach(sequence, hits)
        self.live.append(sequence)
        self.family[sequence] = self.next_id
        self.next_id += 1
        if not self.write(sequence, min(max(computed, sequence.num_computed + 1), length)) and not hits:
            self.drop(sequence)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), count=st.integers(1, 5), token=st.integers(0, 1000))
    def append(self, data: st.DataObject, count: int, token: int) -> None:
        """Compute what is known, then some output."""
        sequence = self.pick(data, self.running())
        sequence.output_token_ids += [token] * count
        if not self.write(sequence, sequence.num_tokens):
            del sequence.output_token_ids[-count:]

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data, self.running())
        if parent.num_computed < len(parent.request.prompt_token_ids):
            return
        del parent.output_token_ids[parent.num_computed - len(parent.request.prompt_token_ids) :]
        child = Sequence(parent.request, 1, 0)
        child.output_token_ids = list(parent.output_token_ids)
        free = self.kv.pool.num_free
        self.kv.fork(parent, child)
        assert self.kv.pool.num_free == free, "a fork takes no memory"
        assert child.block_table == parent.block_table
        self.live.append(child)
        self.family[child] = self.family[parent]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1000), min_size=8, max_size=8))
    def rank_beams(self, data: st.DataObject, tokens: list[int]) -> None:
        """Of a family's members that have come equally far some go on, once or more; the others become their forks."""
        first = self.pick(data, self.running())
        beams = [s for s in self.running() if self.family[s] == self.family[first]]
        beams = [s for s in beams if s.num_computed == first.num_computed == s.num_tokens][:8]
        if not beams:
            return
        going_on = data.draw(st.sets(st.sampled_from(beams), min_size=1))
        parents = {s: self.pick(data, list(going_on)) for s in beams if s not in going_on}
        blocks_before = {b for s in going_on for b in s.block_table}
        for dropped, parent in parents.items():
            self.kv.free(dropped)
            self.kv.fork(parent, dropped)
            self.tables.pop(dropped, None)
            dropped.output_token_ids = list(parent.output_token_ids)
        assert {b for s in beams for b in s.block_table} == blocks_before, "the dropped ones' blocks are free"
        writers = [(s, s.num_computed + 1) for s in beams]
        if self.kv.blocks_to_write(writers) > self.kv.pool.num_free:
            return
        sharers = [s for s in beams if self.kv.shares_next_write(s)]
        tables = {s: list(s.block_table) for s in beams}
        for beam, token in zip(beams, tokens, strict=False):
            beam.output_token_ids.append(token)
            assert self.write(beam, beam.num_tokens)
        copied = [s for s in beams if s.block_table[: len(tables[s])] != tables[s]]
        outside = {b for s in self.live if s not in beams for b in s.block_table}
        last = {tables[s][-1] for s in sharers}
        # In each shared block one may write, unless somebody who is no beam refers to it too.
        assert len(copied) == len(sharers) - len(last - outside)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        chosen = self.family[self.pick(data, self.running())]
        members = [s for s in self.running() if self.family[s] == chosen]
        distinct = {b for s in members for b in s.block_table}
        fits = len(distinct) <= self.kv.host_pool.num_free
        tables = [list(s.block_table) for s in members]
        pairs = self.kv.swap_out(members)
        assert (pairs is not None) == fits
        if pairs is None:
            assert [s.block_table for s in members] == tables
            return
        assert {source for source, _ in pairs} == distinct and len(pairs) == len(distinct)
        for source, destination in pairs:
            self.host[destination] = self.device[source]

    @precondition(lambda self: any(s.host_blocks for s in self.live))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        chosen = self.family[self.pick(data, [s for s in self.live if s.host_blocks])]
        members = [s for s in self.live if self.family[s] == chosen and s.host_blocks]
        distinct = {b for s in members for b in s.host_blocks}
        fits = len(distinct) <= self.kv.pool.num_free
        pairs = self.kv.swap_in(members)
        assert (pairs is not None) == fits
        for source, destination in pairs or []:
            self.device[destination] = self.host[source]
        if pairs is not None:
            for sequence in members:
                self.kv.cache_blocks(sequence, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.drop(self.pick(data, self.live))

    def drop(self, sequence: Sequence) -> None:
        self.kv.free(sequence)
        self.live.remove(sequence)
        del self.family[sequence]
        self.tables.pop(sequence, None)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        fresh = Request("probe", STREAMS[0], SamplingParams(), 16, seed=0)
        assert self.kv.match_prefix(fresh.sequences[0], 30) == []

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        for sequence in self.live:
            memory, blocks = (
                (self.device, sequence.block_table)
                if sequence.block_table
                else (
                    self.host,
                    sequence.host_blocks,
                )
            )
            read = memory[blocks].reshape(-1)[: sequence.num_computed].tolist()
            assert read == sequence.tokens(0, sequence.num_computed)

    @invariant()
    def blocks_are_counted_exactly(self) -> None:
        self.kv.check_invariants(self.live)
        for pool, tables in (
            (self.kv.pool, [s.block_table for s in self.live]),
            (self.kv.host_pool, [s.host_blocks for s in self.live]),
        ):
            entries = [b for table in tables for b in table]
            assert sum(pool.ref_counts) == len(entries)
            assert len(set(entries)) + pool.num_free == pool.num_usable
            assert all(pool.ref_counts[b] == entries.count(b) for b in entries)

    @invariant()
    def tables_only_grow_or_copy_their_last_block(self) -> None:
        for sequence in self.live:
            before, now = self.tables.get(sequence, []), sequence.block_table
            if before and now:
                assert now[: len(before) - 1] == before[:-1]
                assert len(now) >= len(before)
            self.tables[sequence] = list(now)

    def teardown(self) -> None:
        for sequence in list(self.live):
            self.drop(sequence)
        self.kv.check_invariants([])
        assert self.kv.pool.num_free == CACHE.num_blocks - 1
        assert self.kv.host_pool.num_free == CACHE.num_host_blocks


KVMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestKV = KVMachine.TestCase
