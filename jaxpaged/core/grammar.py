"""What the scheduler knows of grammars: where each sequence is in its own, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Masks = npt.NDArray[np.uint32]


class Matcher(Protocol):
    """Where one sequence is in its grammar."""

    @property
    def is_finished(self) -> bool:
        """Nothing can follow: the text is complete, or matching failed."""

    @property
    def error(self) -> str | None:
        """Why matching failed; None if it did not."""

    def accept(self, token_id: int) -> None:
        """Go on behind `token_id`, which the last mask allowed."""


class Grammar(Protocol):
    """A grammar that is ready for use."""

    def new_matcher(self) -> Matcher:
        """At the start."""


class MaskFiller(Protocol):
    """Finds what may come next for many sequences at once."""

    def __call__(self, matchers: Sequence[Matcher], /) -> Masks:
        """[N, W] uint32, as in `Adjustments.masks`, for N matchers."""
