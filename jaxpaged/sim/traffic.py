"""Requests over time: drawn, or read from a file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ConfigError
from jaxpaged.sim.lengths import Counts, Dataset

Seconds = npt.NDArray[np.float64]

MAX_REQUESTS = 5_000_000
_FIELDS = ("arrival", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, eq=False)
class Traffic:
    """N requests in the order of their arrival.

    Attributes:
        arrivals: [N] float64, seconds from the start.
        prompts: [N] int32, tokens of each prompt.
        outputs: [N] int32, tokens that each output has (every one of them, where a request has several).
        about: where it is from, for reports.
    """

    arrivals: Seconds
    prompts: Counts
    outputs: Counts
    about: str = ""

    def __len__(self) -> int:
        return len(self.arrivals)


def poisson(dataset: Dataset, rate: float, duration: float, *, seed: int, max_model_len: int) -> Traffic:
    """Independent arrivals, `rate` a second on average.

    Raises:
        ConfigError: a rate or duration that is not positive, or too many requests.
    """
    rng = np.random.default_rng(seed)
    count = _expected(rate, duration)
    # More gaps than will be needed; what lies behind the end is cut off.
    gaps = rng.exponential(1 / rate, int(count + 6 * math.sqrt(count) + 10))
    arrivals = np.cumsum(gaps)
    arrivals = arrivals[arrivals < duration]
    prompts, outputs = dataset.draw(max(len(arrivals), 1), rng, max_model_len)
    about = f"Poisson, {rate:g} requests/s for {duration:g} s; {dataset}"
    return Traffic(arrivals, prompts[: len(arrivals)], outputs[: len(arrivals)], about)


def bursts(dataset: Dataset, rate: float, duration: float, *, size: int, seed: int, max_model_len: int) -> Traffic:
    """Arrivals `size` at a time at Poisson moments, so that there are `rate` requests a second on average.

    Raises:
        ConfigError: as `poisson`, or a size below 1.
    """
    if size < 1:
        raise ConfigError(f"the size of a burst is {size}, but must be at least 1")
    rng = np.random.default_rng(seed)
    _expected(rate, duration)
    count = _expected(rate / size, duration)
    moments = np.cumsum(rng.exponential(size / rate, int(count + 6 * math.sqrt(count) + 10)))
    arrivals = np.repeat(moments[moments < duration], size)
    prompts, outputs = dataset.draw(max(len(arrivals), 1), rng, max_model_len)
    about = f"bursts of {size}, {rate:g} requests/s for {duration:g} s; {dataset}"
    return Traffic(arrivals, prompts[: len(arrivals)], outputs[: len(arrivals)], about)


def saturating(dataset: Dataset, count: int, *, seed: int, max_model_len: int) -> Traffic:
    """`count` requests, all there from the start."""
    prompts, outputs = dataset.draw(count, np.random.default_rng(seed), max_model_len)
    return Traffic(np.zeros(count), prompts, outputs, f"{count} requests at once; {dataset}")


def read_trace(path: Path) -> Traffic:
    """A file with one JSON object a line: {"arrival": seconds, "prompt_tokens": n, "output_tokens": n}.

    Lines may be in any order; fields beside these are ignored.

    Raises:
        ConfigError: the file cannot be read, is empty, or has a bad line; names the line and the field.
    """
    rows: list[tuple[float, int, int]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(line, f"{path}, line {number}"))
                if len(rows) > MAX_REQUESTS:
                    raise ConfigError(f"{path} has more than {MAX_REQUESTS:,} requests; cut it")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no requests")
    rows.sort(key=lambda row: row[0])
    arrivals, prompts, outputs = zip(*rows, strict=True)
    return Traffic(
        np.array(arrivals), np.array(prompts, np.int32), np.array(outputs, np.int32), f"the trace {path.name}"
    )


def _row(line: str, where: str) -> tuple[float, int, int]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {row!r} is no object with the fields {', '.join(_FIELDS)}")
    for field in _FIELDS:
        if field not in row:
            raise ConfigError(f"{where}: the field {field} is missing")
    arrival = row["arrival"]
    is_number = isinstance(arrival, (int, float)) and not isinstance(arrival, bool)
    if not is_number or not 0 <= arrival < math.inf:
        raise ConfigError(f"{where}: arrival is {arrival!r}, but must be seconds, 0 or more")
    for field in _FIELDS[1:]:
        value = row[field]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ConfigError(f"{where}: {field} is {value!r}, but must be a whole number, 1 or more")
    return float(arrival), row["prompt_tokens"], row["output_tokens"]


def _expected(rate: float, duration: float) -> float:
    for name, value in (("the rate", rate), ("the duration", duration)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value:g}, but must be above 0")
    if rate * duration > MAX_REQUESTS:
        raise ConfigError(
            f"{rate:g} requests/s for {duration:g} s are more than the {MAX_REQUESTS:,} requests that are simulated at "
            "most; lower one of them"
        )
    return rate * duration
