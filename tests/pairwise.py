"""Samples of a product of options in which every two values of different options meet at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(options: dict[str, Sequence[Any]]) -> list[Case]:
    """A few of the combinations of `options`, the same at every call: each is the best of some random candidates."""
    rng = random.Random(0)
    names = list(options)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(options[names[a]]))
        for y in range(len(options[names[b]]))
    }
    cases = []
    while open_pairs:
        a, x, b, y = min(open_pairs)
        best: set[tuple[int, int, int, int]] = set()
        for _ in range(50):
            candidate = [rng.randrange(len(options[name])) for name in names]
            candidate[a], candidate[b] = x, y
            indexed = itertools.combinations(enumerate(candidate), 2)
            closes = {(i, u, j, v) for (i, u), (j, v) in indexed} & open_pairs
            if len(closes) > len(best):
                best, chosen = closes, candidate
        open_pairs -= best
        cases.append({name: options[name][i] for name, i in zip(names, chosen, strict=True)})
    return cases
