"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Totals:
    """Counters that only grow; `SchedulerStats` says what they count."""

    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    preemptions_total: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    copied_blocks_total: int = 0


@dataclass(frozen=True)
class SchedulerStats:
    """State of the scheduler now, and totals since it started.

    Attributes:
        num_running: requests in the batch.
        num_running_sequences: their sequences (rows in use).
        num_waiting: requests in the queue that hold no blocks, preempted ones included.
        num_swapped: requests in the queue whose blocks are in the host pool.
        num_free_blocks: device blocks that can be handed out, cached and free ones included.
        num_total_blocks: device blocks without the null block.
        num_cached_blocks: device blocks that the prefix cache can find, in use or free.
        num_free_host_blocks, num_total_host_blocks: the same of the host pool.
        prefix_queries_total: tokens looked up in the prefix cache when a request was first admitted.
        prefix_hits_total: those of them that were found.
        preemptions_total: requests preempted, by either way.
        swapped_out_blocks_total, swapped_in_blocks_total: blocks moved to and from the host pool.
        copied_blocks_total: blocks copied before a write, because a sibling refers to them.
    """

    num_running: int
    num_running_sequences: int
    num_waiting: int
    num_swapped: int
    num_free_blocks: int
    num_total_blocks: int
    num_cached_blocks: int
    num_free_host_blocks: int
    num_total_host_blocks: int
    prefix_queries_total: int
    prefix_hits_total: int
    preemptions_total: int
    swapped_out_blocks_total: int
    swapped_in_blocks_total: int
    copied_blocks_total: int
