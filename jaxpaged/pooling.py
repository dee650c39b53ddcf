"""How an embedding is made of a prompt's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpaged.errors import InvalidRequestError

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@dataclass(frozen=True)
class PoolingParams:
    """How to make the embedding of one prompt.

    Attributes:
        pooling: "last" takes the final-norm hidden state of the last token, "mean" the mean over all tokens. A request
            for a mean does not read the prefix cache.
        normalize: scale the embedding to length 1.

    Raises:
        InvalidRequestError: another pooling, or normalize is no bool.
    """

    pooling: Pooling = "last"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidRequestError(
                f"pooling is {self.pooling!r}, but must be one of {', '.join(POOLINGS)}", param="pooling"
            )
        if not isinstance(self.normalize, bool):
            raise InvalidRequestError(f"normalize is {self.normalize!r}, but must be True or False", param="normalize")
