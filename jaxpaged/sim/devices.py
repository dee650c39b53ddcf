"""Accelerators by name: the vendors' figures, of dense 16-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpaged.config import GIB
from jaxpaged.errors import ConfigError

GB, GB_PER_S, TFLOPS = 10**9, 10**9, 10**12


@dataclass(frozen=True)
class Device:
    """An accelerator, or several that work on one model together.

    Attributes:
        memory: bytes of each.
        bandwidth: of each one's memory, bytes a second.
        flops: of each, bfloat16 or float16 operations a second, dense.
        host_link: bytes a second to the host's memory, one way.
        link: bytes a second of each to the others, one way; 0 = none needed.
        count: how many.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    host_link: float
    link: float = 0.0
    count: int = 1

    def times(self, count: int) -> Device:
        """`count` of them; weights and KV are split evenly.

        Raises:
            ConfigError: a count below 1.
        """
        if count < 1:
            raise ConfigError(f"the number of devices is {count}, but must be at least 1")
        return replace(self, count=count)

    @property
    def total_memory(self) -> int:
        return self.memory * self.count

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.count} x {self.name}"


def _device(name: str, memory: int, bandwidth: float, tflops: float, host_link: float, link: float) -> Device:
    return Device(name, memory, bandwidth * GB_PER_S, tflops * TFLOPS, host_link * GB_PER_S, link * GB_PER_S)


# Name, memory, GB/s of the memory, TFLOP/s, GB/s to the host, GB/s to the other devices (one way each).
_CATALOG = (
    _device("v100-32gb", 32 * GIB, 900, 125, 16, 150),
    _device("t4", 16 * GIB, 320, 65, 16, 16),
    _device("a10", 24 * GIB, 600, 125, 32, 32),
    _device("a100-40gb", 40 * GIB, 1555, 312, 32, 300),
    _device("a100-80gb", 80 * GIB, 2039, 312, 32, 300),
    _device("l4", 24 * GIB, 300, 121, 32, 32),
    _device("l40s", 48 * GIB, 864, 362, 32, 32),
    _device("rtx3090", 24 * GIB, 936, 71, 32, 28),
    _device("rtx4090", 24 * GIB, 1008, 165, 32, 32),
    _device("rtx5090", 32 * GIB, 1792, 209, 64, 64),
    _device("h100", 80 * GIB, 3352, 989, 64, 450),
    _device("h200", 141 * GB, 4800, 989, 64, 450),
    _device("b200", 180 * GB, 8000, 2250, 64, 900),
    _device("mi300x", 192 * GB, 5300, 1307, 64, 448),
    _device("tpu-v5e", 16 * GB, 819, 197, 32, 200),
    _device("tpu-v5p", 95 * GB, 2765, 459, 32, 600),
    _device("tpu-v6e", 32 * GB, 1640, 918, 32, 400),
)
DEVICES = {device.name: device for device in _CATALOG}
_OTHER_NAMES = {"a100": "a100-80gb", "v100": "v100-32gb", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090"}


def find_device(name: str) -> Device:
    """A device of the catalog, several of them as "4xa100-40gb".

    Raises:
        ConfigError: there is none of this name.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "")
    count, separator, rest = wanted.partition("x")
    if not (separator and count.isdecimal()):
        count, rest = "1", wanted
    device = DEVICES.get(_OTHER_NAMES.get(rest, rest))
    if device is None:
        raise ConfigError(f"there is no device {name!r} in the catalog; it has {', '.join(DEVICES)}")
    return device.times(int(count))
