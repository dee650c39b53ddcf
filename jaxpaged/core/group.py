"""All sequences of one request, which are admitted, preempted and finished with each other."""

from __future__ import annotations

from jaxpaged.core.kv_manager import group_blocks
from jaxpaged.request import Request, Sequence, SequenceStatus

OrderKey = tuple[int, float, int]


class SequenceGroup:
    """A request inside the scheduler.

    The prompt of n > 1 sequences is computed once, by the leader; then the others fork from it.

    Attributes:
        key: place in the order of service, lower first; never changes, so a preempted group keeps its place.
        started: has been admitted before; then it waits because it gave way.
        forked: every unfinished sequence has its own table; before that only the leader has one.
    """

    __slots__ = ("forked", "key", "request", "started")

    def __init__(self, request: Request, key: OrderKey) -> None:
        self.request = request
        self.key = key
        self.started = False
        self.forked = False

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences still to be completed; the first is the leader."""
        return [s for s in self.request.sequences if not s.is_finished]

    @property
    def is_swapped(self) -> bool:
        return self.unfinished[0].status is SequenceStatus.SWAPPED

    @property
    def reads_prefix_cache(self) -> bool:
        """Log-probabilities of a prompt need the logits of all its tokens, and a mean their hidden states; of both the
        cache has none.
        """
        request = self.request
        if request.pooling is not None and request.pooling.pooling == "mean":
            return False
        known = request.num_prompt_logprobs >= len(request.prompt_token_ids) - 1
        return request.params.prompt_logprobs is None or known

    @property
    def waits_for_beams(self) -> bool:
        """Whether a beam has more to compute than its newest token. All beams are ranked at once, so the others then
        wait with theirs.
        """
        if self.request.beams is None or not self.forked or len(self.request.sequences) == 1:
            return False
        return any(s.num_tokens - s.num_computed > 1 for s in self.unfinished)

    def target(self, sequence: Sequence) -> int:
        """Tokens of `sequence` whose KV is to be computed before anything new can come of it."""
        if self.forked:
            return sequence.num_tokens
        is_leader = sequence is self.unfinished[0]
        return len(self.request.prompt_token_ids) if is_leader else 0

    def blocks_now(self, block_size: int) -> int:
        """Device blocks that hold all tokens known so far."""
        lengths = [s.num_tokens for s in self.unfinished]
        return group_blocks(len(self.request.prompt_token_ids), lengths, block_size)
