"""The device that a program is being traced for: the one that is here, or one that it is compiled for ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import jax

# Compute capability of the GPUs whose name alone is known when a program is compiled for them without one.
COMPUTE_CAPABILITIES = {
    "A100": (8, 0),
    "A10": (8, 6),
    "L4": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
}


@dataclass(frozen=True)
class Target:
    """A device as far as a kernel's choices depend on it.

    Attributes:
        platform: "cpu", "gpu", "tpu".
        name: as the maker calls it, e.g. "NVIDIA H200".
        compute_capability: (major, minor) of an NVIDIA GPU, None elsewhere and where it is not known.
        num_cores: streaming multiprocessors of a GPU; 1 where it is not known.
    """

    platform: str
    name: str
    compute_capability: tuple[int, int] | None
    num_cores: int


def current_target() -> Target:
    """The device of the abstract mesh in use (`jax.sharding.use_abstract_mesh`), else JAX's default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        platform, name, num_cores = abstract.platform, abstract.device_kind, abstract.num_cores
        capability = _capability_by_name(name) if platform == "gpu" else None
        return Target(platform, name, capability, num_cores or 1)
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if not isinstance(device, jax.Device):  # the name of a platform, or None
        device = jax.devices(device)[0]
    if device.platform != "gpu":
        return Target(device.platform, device.device_kind, None, 1)
    numbers = str(device.compute_capability).split(".")
    capability = (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else None
    return Target("gpu", device.device_kind, capability, int(device.core_count))


def _capability_by_name(name: str) -> tuple[int, int] | None:
    for word in name.replace("-", " ").split():
        if word in COMPUTE_CAPABILITIES:
            return COMPUTE_CAPABILITIES[word]
    return None
