"""Stored programs: found by what decides them, refused where they may be another's, and the same programs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from support import Alone, random_model, tiny_config
from transformers import PreTrainedTokenizerFast

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.models.layers import Initializer, RMSNorm
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.runner import program_store
from jaxpaged.runner.compile_cache import jax_cache_disabled
from jaxpaged.runner.compile_guard import CompileGuard
from jaxpaged.runner.lowering import StepLowering
from jaxpaged.runner.program_store import ProgramStore, is_known
from jaxpaged.runner.programs import make_programs
from jaxpaged_kernels import native

ARGUMENTS = (np.arange(6, dtype=np.float32), np.float32(3))


def scaled(x: jax.Array, factor: jax.Array) -> dict[str, jax.Array]:
    return {"product": x * factor, "sum": jnp.sort(-x) + factor}


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path / "programs", jax.devices()[0])


@pytest.fixture
def digest(store: ProgramStore) -> str:
    """Of `scaled`, stored and linked to the key of "scaled"."""
    lowered = jax.jit(scaled).lower(*ARGUMENTS)
    digest = store.digest(lowered)
    with jax_cache_disabled():
        store.save(digest, lowered.compile())
    store.link(store.key("scaled"), digest)
    return digest


@pytest.fixture
def cache_folder(tmp_path: Path) -> Iterator[Path]:
    """JAX's cache, in a folder of this test."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


class TestStore:
    def test_a_stored_program_computes_the_same(self, store: ProgramStore, digest: str) -> None:
        found = store.find(store.key("scaled"), ARGUMENTS)
        assert found is not None
        result = found(*ARGUMENTS)
        assert np.asarray(result["product"]).tolist() == [0, 3, 6, 9, 12, 15]
        assert np.asarray(result["sum"]).tolist() == [-2, -1, 0, 1, 2, 3]

    def test_loading_compiles_nothing(self, store: ProgramStore, digest: str) -> None:
        guard = CompileGuard()
        assert store.load(digest, ARGUMENTS) is not None
        assert guard.count == 0

    def test_what_decides_a_program_decides_the_key(
        self, store: ProgramStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = store.key("scaled")
        assert store.key("scaled") == key != store.key("scaled twice")
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert ProgramStore(tmp_path, jax.devices()[0]).key("scaled") != key
        monkeypatch.undo()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000), raising=False)
        assert ProgramStore(tmp_path, jax.devices()[0]).key("scaled") != key
        monkeypatch.undo()
        with jax.default_matmul_precision("float32"):
            assert ProgramStore(tmp_path, jax.devices()[0]).key("scaled") != key
        assert ProgramStore(tmp_path, jax.devices()[0]).key("scaled") == key
        monkeypatch.setattr(program_store, "_source", lambda: "another source")
        assert store.key("scaled") != key

    def test_the_source_is_that_which_was_imported(self) -> None:
        """Not what lies in the files when an engine starts: programs are traced from what is in memory."""
        script = """
            from pathlib import Path
            from jaxpaged.runner import program_store
            read = Path.read_bytes
            Path.read_bytes = lambda path: read(path) + b"# edited since"
            edited = program_store._source.__wrapped__()
            assert program_store._source() != edited, "the files were read at the first use"
            """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_a_device_that_is_not_jaxs_default(
        self, store: ProgramStore, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Such as the CPU of a machine with a GPU."""
        monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(client="another backend")])
        found = store.load(digest, ARGUMENTS)
        assert found is not None
        assert np.asarray(found(*ARGUMENTS)["product"]).tolist() == [0, 3, 6, 9, 12, 15]

    @pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b[:40] + b"x" + b[41:], lambda b: b[:7]])
    def test_a_damaged_program_is_not_loaded(
        self, store: ProgramStore, digest: str, tmp_path: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        path = tmp_path / "programs" / f"{digest}.program"
        path.write_bytes(damage(path.read_bytes()))
        assert store.load(digest, ARGUMENTS) is None

    @pytest.mark.parametrize("name", ["", "{}.program"])
    def test_what_others_may_write_is_not_loaded(
        self, store: ProgramStore, digest: str, tmp_path: Path, name: str
    ) -> None:
        path = tmp_path / "programs" / name.format(digest)
        path.chmod(path.stat().st_mode | 0o020)
        assert store.load(digest, ARGUMENTS) is None

    def test_a_link_leads_nowhere_but_to_a_program(self, store: ProgramStore, digest: str, tmp_path: Path) -> None:
        (tmp_path / "outside.program").write_bytes((tmp_path / "programs" / f"{digest}.program").read_bytes())
        store.link(store.key("other"), "../outside")
        assert store.find(store.key("other"), ARGUMENTS) is None


class Doubled(RMSNorm):
    """A user's own layer."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * super().__call__(x)


def test_a_model_with_layers_of_others_is_not_known() -> None:
    model = random_model(tiny_config())
    assert is_known(model)
    model.model.norm = Doubled(32, eps=1e-6, init=Initializer(nnx.Rngs(0), jnp.float32))
    assert not is_known(model)


CONFIG = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)


class TestPrograms:
    def test_a_second_start_compiles_nothing_and_a_changed_source_neither(
        self, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = random_model(tiny_config())
        scheduler = CONFIG.scheduler_config(64, device="cpu")
        store = ProgramStore(cache_folder / "programs", jax.devices()[0])
        guard, counts = CompileGuard(), []
        for source in ("one", "one", "two", "two"):
            monkeypatch.setattr(program_store, "_source", lambda source=source: source)
            lowering, leaves = StepLowering.of(model, CONFIG, scheduler, vocab_size=260)
            layouts = {p: lowering.layout(p, 64) for p in lowering.buckets.programs}
            guard.reset()
            programs = make_programs(lowering, layouts, leaves, store)
            counts.append(guard.count)
            assert programs.keys() == layouts.keys()
        assert counts == [len(layouts), 0, 0, 0]
        assert not list(cache_folder.glob("*-cache")), "JAX's cache has what the store has"

    def test_descriptions_differ_where_programs_do(self) -> None:
        def description(changes: dict[str, object], seqs: int = 2, dtype: object = jnp.float32, **shape: object) -> str:
            config = EngineConfig.from_options({**asdict(CONFIG), "max_num_seqs": seqs, **changes})
            model = random_model(tiny_config(**shape), dtype=dtype)
            lowering, leaves = StepLowering.of(model, config, config.scheduler_config(64, device="cpu"), vocab_size=260)
            return lowering.description(lowering.layout(lowering.buckets.mixed[-1], 64), leaves)

        assert description({}) == description({})
        different = [
            description({}),
            description({"attention": "reference"}),
            description({"max_logprobs": 3}),
            description({"debug_checks": True}),
            description({"kv_cache_dtype": "int8"}),
            description({}, seqs=3),
            description({}, dtype=jnp.bfloat16),
            description({}, rms_norm_eps=1e-5),
            description({}, windows=(8, None)),
        ]
        if native.why_unavailable() is None:
            different.append(description({"linear": "xla"}))
        assert len(set(different)) == len(different)

    def test_a_warm_engine_says_what_the_model_says(
        self, cache_folder: Path, alone: Alone, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        model = random_model(tiny_config())
        prompt = [5, 77, 130, 9, 9, 200, 31]
        expected = {"greedy": alone(prompt, 9), "drawn": alone(prompt, 9, temperature=1, seed=3)}
        for _ in range(2):
            engine = Engine(model, tiny_tokenizer, CONFIG)
            engine.add_request("greedy", prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
            engine.add_request("drawn", prompt, SamplingParams(temperature=1, seed=3, max_tokens=9, ignore_eos=True))
            outputs: dict[str, RequestOutput] = {}
            while engine.has_unfinished_requests():
                outputs |= {output.request_id: output for output in engine.step() if output.finished}
            assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == expected
            assert engine.stats().compiles_after_warmup == 0
            engine.shutdown()
        assert len(list((cache_folder / "programs").glob("*.program"))) == len(engine.temporaries())
