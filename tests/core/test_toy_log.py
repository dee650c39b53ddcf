"""A schedule small enough to follow by hand: four requests in twelve blocks of sixteen, first come first served.

`toy_log` is a loop of its own: a sequence takes a block only when it must write into one, the latest arrival gives way
when none is left, and whoever fits is admitted again. The real scheduler, driven in the same configuration, does
the same at the same steps, except where its accounting rightly differs: the last test says where and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_model import PagedModel

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 12, 16
LENGTHS = {"A": (40, 40), "B": (30, 24), "C": (60, 30), "D": (20, 16)}
Event = tuple[int, str, str] | tuple[int, str, str, int]


@dataclass
class Toy:
    name: str
    tokens: int
    end: int
    blocks: int = 0


def toy_log() -> list[Event]:
    """(step, event, name[, tokens]). Step 0 only admits; in each later step every running sequence writes a token."""
    waiting = [Toy(name, prompt, prompt + output) for name, (prompt, output) in LENGTHS.items()]
    running: list[Toy] = []
    log: list[Event] = []
    free, step = NUM_BLOCKS, 0
    while waiting or running:
        preempted = False
        for toy in list(running if step else []):
            if toy not in running:
                continue
            if toy.tokens == toy.blocks * BLOCK_SIZE:
                while free == 0:
                    victim = running.pop()
                    free, victim.blocks, preempted = free + victim.blocks, 0, True
                    waiting = sorted([victim, *waiting], key=lambda t: t.name)
                    log.append((step, "preempted", victim.name, victim.tokens))
                free, toy.blocks = free - 1, toy.blocks + 1
            toy.tokens += 1
        for toy in [t for t in running if t.tokens == t.end]:
            running.remove(toy)
            free += toy.blocks
            log.append((step, "finished", toy.name))
        while waiting and not preempted and -(-waiting[0].tokens // BLOCK_SIZE) <= free:
            toy = waiting.pop(0)
            toy.blocks = -(-toy.tokens // BLOCK_SIZE)
            free -= toy.blocks
            running.append(toy)
            log.append((step, "admitted", toy.name))
        step += 1
    return log


def real_log() -> list[Event]:
    """The same from the real scheduler; tokens are those whose KV was in the pool."""
    cache = CacheConfig(num_blocks=NUM_BLOCKS + 1, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    config = SchedulerConfig(
        max_model_len=128, max_num_batched_tokens=256, enable_chunked_prefill=False, debug_checks=True
    )
    scheduler, model = Scheduler(config, cache), PagedModel(cache)
    requests = []
    for name, (prompt_len, output_len) in LENGTHS.items():
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        requests.append(Request(name, [ord(name)] * prompt_len, params, output_len, seed=0))
        scheduler.add(requests[-1])
    log: list[Event] = []
    inside: set[str] = set()
    computed: dict[str, int] = {}
    step = 0
    while (plan := scheduler.schedule()) is not None:
        now = {s.request.request_id for s in plan.scheduled}
        log += [(step, "preempted", name, computed[name]) for name in sorted(inside - now, reverse=True)]
        log += [(step, "admitted", name) for name in sorted(now - inside)]
        scheduler.update(plan, model.run(plan))
        computed = {r.request_id: r.sequences[0].num_computed for r in requests}
        done = {r.request_id for r in requests if r.is_finished}
        log += [(step, "finished", name) for name in sorted(now & done)]
        inside = now - done
        step += 1
    return log


def test_the_toy_loop_logs_the_known_schedule() -> None:
    assert toy_log() == [
        *((0, "admitted", name) for name in "ABCD"),
        (5, "preempted", "D", 24),
        (19, "preempted", "C", 78),
        (24, "finished", "B"),
        (24, "admitted", "C"),
        (24, "admitted", "D"),
        (27, "preempted", "D", 26),
        (36, "finished", "C"),
        (36, "admitted", "D"),
        (40, "finished", "A"),
        (46, "finished", "D"),
    ]


def test_the_real_scheduler_differs_from_it_only_where_it_should() -> None:
    assert real_log() == [
        *((0, "admitted", name) for name in "ABCD"),
        # The same victims at the same steps, with as many tokens in the pool: a block is taken when it is written.
        # (One token more is known: it was drawn from the last one's logits, and will be written next.)
        (5, "preempted", "D", 24),
        (19, "preempted", "C", 78),
        # One step earlier than the toy's 24: the step that computes a prompt already draws the first token, and
        # the last token drawn is never written. So k tokens take k steps, from 0 to k - 1.
        (23, "finished", "B"),
        # The same step for C: what is freed when a step ends serves the next one.
        (24, "admitted", "C"),
        # D stays out. The toy lets it in with 1 block to spare for three sequences and throws it out again at 27,
        # having computed its 24 tokens for nothing. Coming back takes a spare block for each running sequence.
        # C ends two steps earlier than the toy's 36: one as B, one because its readmission draws a token at once.
        (34, "finished", "C"),
        (35, "admitted", "D"),
        (39, "finished", "A"),  # as B
        # It gave way once, with 5 of its 16 tokens drawn, and draws the other 11 in steps 35 to 45.
        (45, "finished", "D"),
    ]
