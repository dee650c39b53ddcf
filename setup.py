"""Builds the native CPU kernels where there is a C++ compiler; without one the package works, through XLA alone."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = Path("kernels/jaxpaged_kernels/csrc")

# The kernels are compiled once for each of these, and the library picks what the processor can run.
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_AVX512_VNNI = [*_AVX512, "-mavx512vnni"]
X86_FLAGS = {
    "generic": [],
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": _AVX512_VNNI,
    "avx512_bf16": [*_AVX512_VNNI, "-mavx512bf16"],
}
# maybe-uninitialized: GCC 12 says so of its own intrinsics.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi", "-g0"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]


class BuildNative(build_ext):
    """A plain shared library that is loaded with ctypes: it needs no headers of Python and fits every version of it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            import jaxlib
        except ImportError as error:
            raise CompileError("the native CPU kernels need jaxlib's headers") from error
        headers = str(Path(jaxlib.__file__).parent / "include")
        folder = Path(self.build_temp)

        def compile_one(source: str, flags: list[str], name: str) -> list[str]:
            objects: list[str] = self.compiler.compile(
                [source],
                output_dir=str(folder / name),
                include_dirs=[str(CSRC)],
                extra_postargs=[*FLAGS, "-isystem", headers, *flags],
            )
            return objects

        isas = X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"generic": []}
        # What fits every processor first: of a function that several objects bring along, the linker takes the first.
        jobs = [(source, [], "common") for source in ext.sources if not source.endswith("kernels_isa.cc")]
        jobs += [(str(CSRC / "kernels_isa.cc"), [f"-DJAXPAGED_ISA={isa}", *flags], isa) for isa, flags in isas.items()]
        with ThreadPoolExecutor() as pool:
            objects = [o for made in pool.map(lambda job: compile_one(*job), jobs) for o in made]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"], target_lang="c++")


native = Extension(
    "jaxpaged_kernels._native",
    sorted(str(path) for path in CSRC.glob("*.cc")),
    depends=sorted(str(path) for path in CSRC.glob("*.h")),
    optional=True,
)
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
