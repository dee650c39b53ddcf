"""JAX's persistent compilation cache: a second start fetches its programs instead of compiling them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.weights.catalog import cache_dir

logger = logging.getLogger(__name__)

# The setting is the process's: of two that change it at once, the later would put back what the earlier had set.
_DISABLING = threading.Lock()


def enable_compilation_cache(config: EngineConfig) -> None:
    """Points JAX at the cache folder of `config`. A folder that the process has chosen itself stays.

    JAX has one such setting a process; it holds from here on for everything that the process compiles.

    Raises:
        ConfigError: the folder cannot be made.
    """
    if config.compilation_cache == "" or jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        folder = Path(config.compilation_cache) if config.compilation_cache else cache_dir() / "xla"
    except RuntimeError as error:  # of a user who is not known to the system
        raise ConfigError(
            f"there is no folder for compiled programs ({str(error).rstrip('.')}); set HOME, or compilation_cache to "
            'a folder, or to "" to keep none'
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder} for compiled programs ({error.strerror or error}); set compilation_cache "
            'to another one, or to "" to keep none'
        ) from error
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _use(str(folder))
    logger.debug("compiled programs are kept in %s", folder)


def start_folder() -> Path | None:
    """Where else to keep what makes a start fast: JAX's cache folder. None where there is none, it is no path, or JAX's
    cache is switched off."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    is_on = jax.config.values["jax_enable_compilation_cache"]
    return Path(folder) if is_on and folder and "://" not in folder else None


@contextmanager
def jax_cache_disabled() -> Iterator[None]:
    """What is compiled meanwhile, by any thread, neither comes from JAX's cache nor goes there. One at a time."""
    with _DISABLING:
        folder = jax.config.values["jax_compilation_cache_dir"]
        _use(None)
        try:
            yield
        finally:
            _use(folder)


def _use(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    # JAX looks at the setting once, at the first compilation, which may have been before this.
    compilation_cache.reset_cache()
