"""Compiles one lowered program for a GPU and measures it: registers, shared memory, launches, buffers."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# Thunks that hold others; every other kind is a launch: a kernel, a library call, a copy or a fill.
_CONTAINERS = {"kCommandBuffer", "kWhile", "kConditional", "kSequential"}
_DYNAMIC = {"kWhile", "kConditional"}
_THUNK = re.compile(r"^( *)\d+: (k\w+)\s+\[[^\]]*\]\s*(\S*)(?:.*shared_memory: (\d+) bytes)?")
_PTXAS_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """What ptxas gave one kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes that a thread writes to and reads from memory because registers ran out.
        shared_memory: bytes of a block, static and asked for at launch.
    """

    name: str
    registers: int
    spilled: int
    shared_memory: int


@dataclass(frozen=True)
class Launch:
    """One entry of the launch sequence.

    Attributes:
        name: the kernel's, or the kind for what is no kernel, e.g. "kCopy".
        shared_memory: bytes of a block.
        is_dynamic: inside of a loop or a branch, so that it is launched any number of times.
    """

    name: str
    shared_memory: int
    is_dynamic: bool


@dataclass(frozen=True)
class Measured:
    """A compiled program.

    Attributes:
        kernels: all, by name.
        launches: in order.
        temporary_bytes: beside arguments and results.
        aliased_bytes: of arguments that results take the place of.
        value_bytes: sizes of the values in temporaries, largest first.
        spills_in_xla: XLA's own assembler says that a kernel spills, whatever ptxas says.
        seconds: that XLA took to compile it.
    """

    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    temporary_bytes: int
    aliased_bytes: int
    value_bytes: tuple[int, ...]
    spills_in_xla: bool
    seconds: float

    @property
    def num_launches(self) -> int:
        """Launches outside of loops and branches."""
        return sum(not launch.is_dynamic for launch in self.launches)


def compile_and_measure(lowered: jax.stages.Lowered, arch: str, ptxas: str) -> Measured:
    """Compiles `lowered` for the device that it was lowered for.

    Args:
        arch: of that device, as ptxas calls it.
        ptxas: path of the assembler, which tells registers and spills of every kernel.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile it.
    """
    with tempfile.TemporaryDirectory(prefix="gpu_compile_") as name:
        folder = Path(name)
        start = time.perf_counter()
        compiled, refused = _compile(lowered, name)
        seconds = time.perf_counter() - start
        launches = read_launches(folder)
        shared_memory = {launch.name: launch.shared_memory for launch in launches}
        memory: Any = compiled.memory_analysis()
        return Measured(
            kernels=_kernels(folder, arch, ptxas, shared_memory),
            launches=launches,
            temporary_bytes=int(memory.temp_size_in_bytes),
            aliased_bytes=int(memory.alias_size_in_bytes),
            value_bytes=_temporary_values(folder),
            spills_in_xla=refused,
            seconds=seconds,
        )


def _compile(lowered: jax.stages.Lowered, dump: str) -> tuple[jax.stages.Compiled, bool]:
    """Also whether XLA found that a kernel spills; then it is compiled a second time, to see which and how much."""
    # jax 0.11 and later leave the kernels' PTX out unless they are asked for it.
    options: dict[str, str | bool] = {"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"}
    refuse_spills = "xla_gpu_fail_ptx_compilation_on_register_spilling"
    try:
        return lowered.compile(compiler_options={**options, refuse_spills: True}), False
    except jax.errors.JaxRuntimeError as error:
        if "register spilling" not in str(error):
            raise
    return lowered.compile(compiler_options=options), True


def layer_launches(launches: Sequence[Launch], num_layers: int) -> list[str]:
    """Names of what one layer in the middle of a model launches, loops and branches left out.

    Layers are told apart by a kernel that runs once in each. Empty where there is none.
    """
    names = [launch.name for launch in launches if not launch.is_dynamic]
    once_a_layer = [name for name, count in Counter(names).items() if count == num_layers]
    if num_layers < 2 or not once_a_layer:
        return []
    at = [i for i, name in enumerate(names) if name == once_a_layer[0]]
    middle = num_layers // 2
    return names[at[middle - 1] : at[middle]]


def read_launches(folder: Path) -> tuple[Launch, ...]:
    """The launch sequence in XLA's dump `folder`; thunk passes put most of it into command buffers (CUDA graphs)."""
    files = sorted(folder.glob("*.thunk_sequence*.txt"), key=lambda path: "after_thunk_passes" in path.name)
    if not files:
        raise RuntimeError("XLA wrote no *.thunk_sequence.txt: this version calls it otherwise")
    launches: list[Launch] = []
    around: list[tuple[int, str]] = []  # indent and kind of the containers that the current line may be in
    for line in files[-1].read_text().splitlines():
        if not (match := _THUNK.match(line)):
            continue
        indent, kind, name, shared_memory = match.groups()
        while around and around[-1][0] >= len(indent):
            around.pop()
        if kind in _CONTAINERS:
            around.append((len(indent), kind))
            continue
        is_dynamic = any(outer in _DYNAMIC for _, outer in around)
        launches.append(Launch(name or kind, int(shared_memory or 0), is_dynamic))
    return tuple(launches)


def parse_ptxas(log: str, shared_memory: dict[str, int]) -> list[Kernel]:
    """The kernels in what `ptxas -v` prints.

    Args:
        shared_memory: by kernel, bytes of a block that a launch asks for; the log has what the kernel itself declares.
    """
    return [
        Kernel(
            name=match["name"],
            registers=int(match["registers"]),
            spilled=int(match["stores"]) + int(match["loads"]),
            shared_memory=max(int(match["shared"] or 0), shared_memory.get(match["name"], 0)),
        )
        for match in _PTXAS_KERNEL.finditer(log)
    ]


def _kernels(folder: Path, arch: str, ptxas: str, shared_memory: dict[str, int]) -> tuple[Kernel, ...]:
    def assemble(path: Path) -> list[Kernel]:
        command = [ptxas, "-v", f"-arch={arch}", str(path), "-o", "/dev/null"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"ptxas failed on {path.name}: {run.stderr.strip()}")
        return parse_ptxas(run.stderr, shared_memory)

    with ThreadPoolExecutor() as threads:
        # One file may hold the program's constants, and no kernel.
        files = [path for path in folder.glob("*.ptx") if ".entry" in path.read_text()]
        found = {k.name: k for kernels in threads.map(assemble, files) for k in kernels}
    if not found:
        raise RuntimeError("XLA wrote no *.ptx with a kernel: this version wants to be asked for it otherwise")
    return tuple(found[name] for name in sorted(found))


def _temporary_values(folder: Path) -> tuple[int, ...]:
    """Distinct sizes of the values that live neither in an argument nor in a result, largest first."""
    sizes: set[int] = set()
    for path in folder.glob("*buffer-assignment.txt"):
        is_temporary = False
        for line in path.read_text().splitlines():
            if line.startswith("allocation "):
                is_temporary = "preallocated-temp" in line
            elif is_temporary and (match := re.search(r"\(size=(\d+),", line)):
                sizes.add(int(match[1]))
    return tuple(sorted(sizes, reverse=True))
