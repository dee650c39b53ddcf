"""How long prompts and outputs are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ConfigError

Counts = npt.NDArray[np.int32]


class Lengths(Protocol):
    """A distribution of token counts, each at least 1."""

    def draw(self, count: int, rng: np.random.Generator, longest: int) -> Counts:
        """[count] int32 lengths of at most `longest`."""

    def __str__(self) -> str:
        """What it is, for reports."""


@dataclass(frozen=True)
class LogNormal:
    """Lognormal lengths whose sample mean is `mean`, as far as the longest length allows.

    Attributes:
        sigma: standard deviation of the logarithm; 0 = all equal.
    """

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise ConfigError(f"the mean of a length is {self.mean:g}, but must be at least 1")
        if not 0 <= self.sigma <= 4:
            raise ConfigError(f"the sigma of a lognormal length is {self.sigma:g}, but must be between 0 and 4")

    def draw(self, count: int, rng: np.random.Generator, longest: int) -> Counts:
        drawn = rng.lognormal(0, self.sigma, count)
        for _ in range(20):  # what is cut off goes to the others
            drawn = np.clip(drawn * (self.mean / drawn.mean()), 1, longest)
        rounded = np.floor(drawn + rng.random(count))  # up or down at random, so that the mean stays
        return np.clip(rounded, 1, longest).astype(np.int32)

    def __str__(self) -> str:
        return f"lognormal (mean {self.mean:g}, sigma {self.sigma:g})"


@dataclass(frozen=True)
class Fixed:
    """The same length always."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"a length is {self.length}, but must be at least 1")

    def draw(self, count: int, rng: np.random.Generator, longest: int) -> Counts:
        return np.full(count, min(self.length, longest), np.int32)

    def __str__(self) -> str:
        return f"always {self.length}"


@dataclass(frozen=True)
class Histogram:
    """Lengths drawn from bins; within a bin every length is equally likely.

    Attributes:
        edges: B + 1 ascending token counts; bin i holds the lengths from edges[i] to edges[i + 1] - 1.
        counts: B weights, not all zero.
    """

    edges: tuple[int, ...]
    counts: tuple[float, ...]
    name: str = "histogram"

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise ConfigError(
                f"the histogram has {len(self.edges)} edges and {len(self.counts)} counts, but needs one "
                "edge more than counts"
            )
        if self.edges[0] < 1 or any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ConfigError("the edges of a histogram must ascend, from 1 or more")
        if min(self.counts) < 0 or not 0 < sum(self.counts) < math.inf:
            raise ConfigError("the counts of a histogram must not be negative, and not all zero")

    def draw(self, count: int, rng: np.random.Generator, longest: int) -> Counts:
        weights = np.array(self.counts) / sum(self.counts)
        bins = rng.choice(len(weights), count, p=weights)
        lengths = rng.integers(np.array(self.edges)[bins], np.array(self.edges)[bins + 1])
        return np.minimum(lengths, longest).astype(np.int32)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Dataset:
    """Lengths of requests: prompts and outputs, drawn independently."""

    prompt: Lengths
    output: Lengths

    def draw(self, count: int, rng: np.random.Generator, max_model_len: int) -> tuple[Counts, Counts]:
        """[count] prompts and outputs; together each pair is at most `max_model_len`.

        A prompt is at most half of that.
        """
        prompts = self.prompt.draw(count, rng, max_model_len // 2)
        outputs = self.output.draw(count, rng, max_model_len)
        return prompts, np.minimum(outputs, max_model_len - prompts)

    def __str__(self) -> str:
        return f"prompts {self.prompt}, outputs {self.output}"


# The means are the paper's (Kwon et al., 2023), which says no more of the distributions. The sigmas are chosen: with
# them the batches that fit the memory of the paper's reserving systems come near those that it reports.
DATASETS = {
    "sharegpt": Dataset(LogNormal(161.31, 1.0), LogNormal(337.99, 0.79)),
    "alpaca": Dataset(LogNormal(19.31, 0.6), LogNormal(58.45, 0.87)),
}


def read_dataset(path: Path) -> Dataset:
    """A dataset of two histograms: {"prompt": {"edges": [...], "counts": [...]}, "output": {...}}.

    Raises:
        ConfigError: the file is not there or not of this form; names the field.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no histogram of lengths: {error}") from error
    parts: list[Histogram] = []
    for field in ("prompt", "output"):
        try:
            edges, counts = content[field]["edges"], content[field]["counts"]
            histogram = Histogram(
                tuple(int(e) for e in edges), tuple(float(c) for c in counts), f"{path.name}: {field}"
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise ConfigError(f"{path}, {field}: {error}") from error
            raise ConfigError(f'{path}: {field} must be {{"edges": [...], "counts": [...]}} of numbers') from error
        parts.append(histogram)
    return Dataset(*parts)
