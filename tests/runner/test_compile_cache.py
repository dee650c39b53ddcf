"""Where what makes a start fast is kept, and where nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.runner.compile_cache import enable_compilation_cache, start_folder

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    """The process has chosen no cache yet; afterwards it is as before."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_folder_that_was_asked_for_is_made(tmp_path: Path) -> None:
    enable_compilation_cache(EngineConfig(compilation_cache=str(tmp_path / "a" / "b")))
    assert (tmp_path / "a" / "b").is_dir()
    assert start_folder() == tmp_path / "a" / "b"


def test_a_folder_that_the_process_has_chosen_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    enable_compilation_cache(EngineConfig(compilation_cache=str(tmp_path / "other")))
    assert start_folder() == tmp_path / "own"
    assert not (tmp_path / "other").exists()


def test_nothing_is_kept_where_nothing_shall_be(tmp_path: Path) -> None:
    enable_compilation_cache(EngineConfig(compilation_cache=""))
    assert start_folder() is None
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert start_folder() is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    assert start_folder() is None


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the folder .*inside .*set compilation_cache to another one"):
        enable_compilation_cache(EngineConfig(compilation_cache=str(tmp_path / "file" / "inside")))
    assert start_folder() is None


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def home(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(home))
    with pytest.raises(ConfigError, match=r"no folder for compiled programs .*set HOME, or compilation_cache"):
        enable_compilation_cache(EngineConfig())
