"""Which programs exist: a step is padded to the smallest one that holds it.

Two families, so that the number of programs is a sum over buckets and never a product:

- decode[S]: S rows with one token each.
- mixed[T]: T tokens in any split over rows; the rows are pinned to the most there can be.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from jaxpaged.core.plan import StepPlan

# One bf16 row is several times slower than two on a CPU, where XLA has no kernel for a matrix-vector product.
MIN_DECODE_ROWS = 2
# The sizes that follow. XLA computes padding, too, so its sizes are close; but up to 8 rows, or 32 tokens, a step is
# bound by reading the weights, and a size between would cost a program and save little.
NEXT_DECODE_ROWS = 8
MIN_MIXED_TOKENS = 32
# The native kernels skip padding: what is left is the work of sampling, on all rows of a program.
GROWTH_WITHOUT_PADDING = 8


@dataclass(frozen=True)
class Program:
    """Static shape of one compiled step.

    Attributes:
        num_tokens: T, tokens of the flat batch.
        num_rows: S, sequences; also the number of draws.
    """

    kind: Literal["decode", "mixed"]
    num_tokens: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.kind}[{self.num_tokens}]"


def _growing(low: int, high: int, factor: int) -> list[int]:
    """`low`, `factor` times `low` and so on while below `high`, then `high` itself."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return [*sizes, high]


class Buckets:
    """The programs for a batch of at most `max_num_seqs` sequences and `max_num_batched_tokens` tokens."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, *, skips_padding: bool = False) -> None:
        """`skips_padding`: whether the products with weights, most of a step's work, leave out what is padding."""
        rows = max(max_num_seqs, MIN_DECODE_ROWS)
        most_tokens = max(max_num_batched_tokens, MIN_MIXED_TOKENS)
        decode_rows = [MIN_DECODE_ROWS]
        if skips_padding:
            decode_rows = _growing(MIN_DECODE_ROWS, rows, GROWTH_WITHOUT_PADDING)
            tokens = _growing(2 * MIN_MIXED_TOKENS, most_tokens, GROWTH_WITHOUT_PADDING)
        else:
            decode_rows += _growing(NEXT_DECODE_ROWS, rows, 2) if rows > MIN_DECODE_ROWS else []
            tokens = _growing(MIN_MIXED_TOKENS, most_tokens, 2)
        self.decode = [Program("decode", size, size) for size in decode_rows]
        self.mixed = [Program("mixed", size, rows) for size in tokens]
        self._decode_rows = decode_rows
        self._mixed_tokens = tokens

    @property
    def programs(self) -> list[Program]:
        return [*self.decode, *self.mixed]

    def pick(self, plan: StepPlan) -> Program:
        """The smallest program that holds `plan`."""
        num_seqs = len(plan.kv_lens)
        if plan.num_decodes == num_seqs:
            return self.decode[bisect_left(self._decode_rows, num_seqs)]
        return self.mixed[bisect_left(self._mixed_tokens, plan.num_tokens)]
