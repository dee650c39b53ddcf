"""GPUs that programs can be compiled for on a machine that has none, and what that takes to be installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies

# What all of these GPUs have in common, as XLA's GpuTargetConfigProto in text form.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory_per_block}
  threads_per_core_limit: {threads_per_core}
  core_count: {cores} fpus_per_core: {fpus_per_core}
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
  l2_cache_size: {l2_cache} clock_rate_ghz: {clock}
  cuda_compute_capability {{ {capability} }}
  device_vendor: "NVIDIA Corporation" name: "{name}" platform_version: "Compute Capability {version}"
  device_address_bits: 64 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class GpuTarget:
    """A GPU as XLA's compiler sees it.

    Attributes:
        name: as the driver calls it.
        capability: compute capability, (major, minor).
        cores: streaming multiprocessors.
        memory: bytes.
        bandwidth: bytes/s of its memory.
        shared_memory_per_block: bytes that one block may ask for; a core has 1 KiB more.
        l2_cache: bytes.
        clock: GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: int
    l2_cache: int
    clock: float
    shared_memory_per_block: int
    threads_per_core: int = 2048
    fpus_per_core: int = 128

    @property
    def arch(self) -> str:
        """What ptxas calls it, e.g. "sm_90a". From 9.0 on the "a" stands for instructions of this generation alone."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def config(self) -> str:
        """A GpuTargetConfigProto in text form."""
        major, minor = self.capability
        accelerated = major >= 9
        return _CONFIG.format(
            name=self.name,
            capability=f"major: {major} minor: {minor}" + accelerated * " feature_extension: ACCELERATED_FEATURES",
            version=f"{major}.{minor}{'a' * accelerated}",
            cores=self.cores,
            memory=self.memory,
            bandwidth=self.bandwidth,
            l2_cache=self.l2_cache,
            clock=self.clock,
            shared_memory_per_block=self.shared_memory_per_block,
            shared_memory_per_core=self.shared_memory_per_block + 1024,
            threads_per_core=self.threads_per_core,
            fpus_per_core=self.fpus_per_core,
        )

    def mesh(self) -> jax.sharding.Mesh:
        """A mesh of one such device, for compiling only.

        Raises:
            NotImplementedError, RuntimeError: see `missing`.
        """
        topology = topologies.get_topology_desc(platform="cuda", target_config=self.config, topology="1x1x1")
        return jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))


TARGETS: dict[str, GpuTarget] = {
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 151_397_597_184, 4_800_000_000_000, 50 << 20, 1.98, 232_448),
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 84_942_979_072, 3_352_320_000_000, 50 << 20, 1.98, 232_448),
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_100_068_864, 2_039_040_000_000, 40 << 20, 1.41, 166_912, 2048, 64
    ),
    "l4": GpuTarget("NVIDIA L4", (8, 9), 58, 23_580_639_232, 300_096_000_000, 48 << 20, 2.04, 101_376, 1536),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965, 232_448),
}


def missing() -> str | None:
    """What compiling for a GPU lacks here and how to get it, in one line; None when all is there."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        version = importlib.metadata.version("jax")
        return (
            "JAX's CUDA plugin is not installed: "
            f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        )
    if find_ptxas() is None:
        return "ptxas is not on the PATH: install a CUDA 13 toolkit, or pip install 'jax[cuda13]'"
    return None


def find_ptxas() -> str | None:
    """ptxas of a CUDA toolkit, or of NVIDIA's wheels."""
    if on_path := shutil.which("ptxas"):
        return on_path
    toolkit = Path("/usr/local/cuda/bin/ptxas")
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or []) if wheels else []
    candidates = [toolkit, *(path for folder in folders for path in sorted(Path(folder).glob("*/bin/ptxas")))]
    return next((str(path) for path in candidates if path.is_file()), None)
