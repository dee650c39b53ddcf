"""What a simulation or an experiment may swap in the scheduler. The engine serves with the defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxpaged.config import CacheConfig
from jaxpaged.core.kv_manager import KVManager

Victim = Literal["newest", "oldest"]


@dataclass(frozen=True)
class Rules:
    """How memory is handed out, who gives way when there is none left, and when the batch is open.

    Attributes:
        make_kv: makes the owner of the pools.
        victim: end of the order of service from which running groups give way. The others are grown from the other
            end, so that no victim has been grown in the same step.
        static_batches: admit only into an empty batch, which then runs until all of it has finished.
    """

    make_kv: Callable[[CacheConfig], KVManager] = KVManager
    victim: Victim = "newest"
    static_batches: bool = False
