"""Compiled programs on disk: a warm start neither traces, nor lowers, nor compiles.

JAX's own compilation cache is keyed by the lowered program, so that using it takes tracing and lowering every program:
a third of a second each, of Python, one after the other. Here a program is found by what decides it: versions, options,
shapes, and the source that it is traced from.

    KEY.link         which program that is, by the digest of its lowered text; a change of the source that leaves the
                     program as it was adds a link and compiles nothing
    DIGEST.program   SHA-256 of the rest; then, compressed, what `jax.experimental.serialize_executable` makes

Such a file holds machine code, and a pickle: whoever can write it can run code as the one who reads it. So the folder
is the user's alone, and nothing is read from a folder or file that others own or may write.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import re
import zlib
from pathlib import Path
from typing import Any

import flax
import jax
from flax import nnx
from jax.experimental import serialize_executable
from jaxlib.version import __version__ as jaxlib_version

import jaxpaged
import jaxpaged_kernels
from jaxpaged.private_folder import PrivateFolder
from jaxpaged_kernels import native

logger = logging.getLogger(__name__)

# Packages of jaxpaged that no program is traced from; everything else counts, so that nothing is forgotten.
_NOT_TRACED = ("commands", "engine", "grammars", "server", "sim", "trace")
# Whose classes a model may be made of: the source of ours is hashed, and of the others the versions.
_KNOWN = frozenset({"builtins", "flax", "jax", "jaxlib", "jaxpaged", "jaxpaged_kernels", "ml_dtypes", "numpy"})
_DIGEST_BYTES = hashlib.sha256().digest_size


class ProgramStore:
    """Programs for one device, in a folder that processes share."""

    def __init__(self, folder: Path, device: jax.Device) -> None:
        self._folder = PrivateFolder(folder)
        self._device = device
        self._environment = _environment(device)

    def key(self, description: str) -> str:
        """Stands for the program that `description`, the source, the versions and the machine decide."""
        return _hex(self._environment, _source(), description)

    def digest(self, lowered: jax.stages.Lowered) -> str:
        """Stands for a lowered program on this machine."""
        return _hex(self._environment, str(lowered.in_avals), lowered.as_text())

    def find(self, key: str, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        """The program that was linked to `key`, if it is there; `arguments` have the structure of its arguments."""
        digest = self._folder.read(f"{key}.link")
        return None if digest is None else self.load(digest.decode("ascii", "replace"), arguments)

    def load(self, digest: str, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        """The program of `digest`, if it is there and whole."""
        content = self._folder.read(f"{digest}.program") if re.fullmatch("[0-9a-f]{64}", digest) else None
        if content is None:
            return None
        expected, packed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(packed).digest() != expected:
            logger.warning("%s is damaged; the program is compiled again", self._folder.path / f"{digest}.program")
            return None
        try:
            payload, out_tree = pickle.loads(zlib.decompress(packed))
            return serialize_executable.deserialize_and_load(
                payload,
                jax.tree.structure((arguments, {})),
                out_tree,
                backend=self._device.client,
                execution_devices=[self._device],
            )
        except Exception as error:  # of JAX, XLA or a class that has moved: a program can always be compiled again
            logger.warning("a stored program cannot be loaded (%s); it is compiled again", " ".join(str(error).split()))
            return None

    def link(self, key: str, digest: str) -> None:
        """Has `find` give the program of `digest` for `key`."""
        self._folder.write(f"{key}.link", digest.encode())

    def save(self, digest: str, compiled: jax.stages.Compiled) -> None:
        """Stores a program that was compiled here: one that came from a cache cannot be stored again."""
        try:
            payload, _, out_tree = serialize_executable.serialize(compiled)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            logger.warning("a program cannot be stored, so later starts compile it again: %s", error)
            return
        packed = zlib.compress(pickle.dumps((payload, out_tree)), level=1)
        self._folder.write(f"{digest}.program", hashlib.sha256(packed).digest() + packed)


def is_known(model: nnx.Module) -> bool:
    """Whether a key can stand for programs of `model`: not where somebody else's classes decide what it computes."""
    return {type(part).__module__.partition(".")[0] for _, part in nnx.iter_graph(model)} <= _KNOWN


def _hex(*parts: str) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _environment(device: jax.Device) -> str:
    """All beside the program that decides what XLA makes of it, and whether this machine can run it."""
    settings = {
        name: str(value)
        for name, value in jax.config.values.items()
        if isinstance(value, (bool, int, float, str)) and not name.endswith("_dir")
    }
    return repr(
        (
            [jax.__version__, jaxlib_version, flax.__version__, platform.python_version()],
            [device.platform, device.device_kind, device.id, device.client.platform_version],
            [platform.machine(), _processor(), _num_processors(), native.why_unavailable() is None],
            os.environ.get("XLA_FLAGS", ""),
            sorted(settings.items()),
        )
    )


def _processor() -> str:
    """Model and instruction sets of the processor, for which the code is made."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _num_processors() -> int | None:
    """Those that this process may run on: XLA divides the work of a program among as many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@functools.cache
def _source() -> str:
    """Digest of the source that programs are traced from."""
    digest = hashlib.sha256()
    for package in (jaxpaged, jaxpaged_kernels):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if relative.parts[0] not in _NOT_TRACED:
                content = path.read_bytes()
                digest.update(f"{package.__name__}/{relative} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# Now, while the files are what this process has imported: a later one may be started from others.
_source()
