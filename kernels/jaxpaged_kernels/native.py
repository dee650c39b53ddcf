"""The compiled CPU kernels: a shared library beside this file, built when the package is installed with a compiler."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import jax

LIBRARY = Path(__file__).with_name("_native.so")

# Versions of the kernels in the library, the best last; of these the processor's best one runs.
INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")

# Of the handlers' arguments; csrc/kernels.cc has the same number.
_INTERFACE = 2

# Bytes between arrays that were allocated one after the other.
_MAX_GAP = 1 << 16

# FFI target name -> symbol of the library.
_HANDLERS = {
    "jaxpaged_linear": "JaxpagedLinear",
    "jaxpaged_zeros": "JaxpagedZeros",
    "jaxpaged_attention": "JaxpagedAttention",
    "jaxpaged_rotate_and_write": "JaxpagedRotateAndWrite",
}


@functools.cache
def why_unavailable() -> str | None:
    """Loads the library and makes its kernels known to XLA. None when they can be called, else the reason why not."""
    if not LIBRARY.exists():
        return (
            "the native CPU kernels were not built: install a C++20 compiler (see pip install -v), then jaxpaged again"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if (reason := _does_not_fit(library)) is not None:
            return f"the native CPU kernels {reason}: install jaxpaged again"
        for target, symbol in _HANDLERS.items():
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    except (OSError, AttributeError, IndexError, RuntimeError, ValueError) as error:
        return f"the native CPU kernels cannot be used: {error}"
    return None


def _does_not_fit(library: ctypes.CDLL) -> str | None:
    """Why `library` must not be registered: JAX may find that out only when its CPU backend starts, and then fail."""
    if (version := library.jaxpaged_interface()) != _INTERFACE:
        return f"are of another version (interface {version}, not {_INTERFACE})"
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    built = library.jaxpaged_xla_api_major(), library.jaxpaged_xla_api_minor()
    here = tuple(int(re.findall(rf"define XLA_FFI_API_{name} (\d+)", header)[0]) for name in ("MAJOR", "MINOR"))
    if built[0] != here[0] or built[1] > here[1]:
        return f"were built for another jaxlib (XLA's interface {built[0]}.{built[1]}; here it is {here[0]}.{here[1]})"
    return None


def prefer_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Moves the memory of `arrays`, which stays where it is, to huge pages where Linux has them: large weights are then
    read 10 to 20 % faster. Does nothing where that is not possible."""
    if why_unavailable() is not None:
        return
    use = ctypes.CDLL(str(LIBRARY)).jaxpaged_prefer_huge_pages
    use.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    start = end = 0
    # Arrays that lie side by side share huge pages.
    for address, size in sorted((array.unsafe_buffer_pointer(), array.nbytes) for array in arrays):
        if address > end + _MAX_GAP:
            use(start, end - start)
            start = address
        end = address + size
    use(start, end - start)


def instruction_set() -> str:
    """Which version of the kernels runs: one of `INSTRUCTION_SETS`. Only where they are available."""
    isa = ctypes.CDLL(str(LIBRARY)).jaxpaged_instruction_set
    isa.restype = ctypes.c_char_p
    name: bytes = isa()
    return name.decode()


def use_instruction_set(name: str) -> bool:
    """Has the version for `name` run, in the whole process; False and no change where this processor cannot run it."""
    use = ctypes.CDLL(str(LIBRARY)).jaxpaged_use_instruction_set
    use.restype = ctypes.c_bool
    can: bool = use(name.encode())
    return can
