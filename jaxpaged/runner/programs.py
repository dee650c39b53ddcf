"""The compiled programs of an engine: from the store where they are there, else traced, lowered and compiled."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxpaged.progress import as_they_finish
from jaxpaged.runner.buckets import Program
from jaxpaged.runner.compile_cache import jax_cache_disabled
from jaxpaged.runner.host_memory import release_free_memory
from jaxpaged.runner.lowering import Leaf, StepLowering
from jaxpaged.runner.pack import Layout
from jaxpaged.runner.program_store import ProgramStore

logger = logging.getLogger(__name__)

# XLA's compiler runs without the GIL, but each compilation of a large step holds hundreds of megabytes.
MAX_COMPILE_THREADS = 8

Programs = dict[Program, jax.stages.Compiled]


def make_programs(
    lowering: StepLowering, layouts: Mapping[Program, Layout], leaves: Sequence[Leaf], store: ProgramStore | None
) -> Programs:
    """A compiled step for each of `layouts`.

    Args:
        leaves: the model's.
        store: None: there is none, or it does not know all that decides these programs.
    """
    start = time.perf_counter()
    programs: Programs = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILE_THREADS)) as threads:
        if store is not None:
            programs = _find(lowering, layouts, leaves, store, threads)
        # Largest first, so that the last to finish is a small one.
        missing = sorted(layouts.keys() - programs.keys(), key=lambda p: p.num_tokens, reverse=True)
        if missing:
            logger.info("compiling %d programs", len(missing))
            programs |= _compile({p: layouts[p] for p in missing}, lowering, leaves, store, threads)
    release_free_memory()
    seconds = time.perf_counter() - start
    logger.info("%d programs in %.1f s, %d of them lowered anew", len(layouts), seconds, len(missing))
    return programs


def _find(
    lowering: StepLowering,
    layouts: Mapping[Program, Layout],
    leaves: Sequence[Leaf],
    store: ProgramStore,
    threads: ThreadPoolExecutor,
) -> Programs:
    futures = {
        program: threads.submit(
            store.find, store.key(lowering.description(layout, leaves)), lowering.arguments(layout, leaves)
        )
        for program, layout in layouts.items()
    }
    found = {program: future.result() for program, future in futures.items()}
    return {program: compiled for program, compiled in found.items() if compiled is not None}


def _compile(
    layouts: Mapping[Program, Layout],
    lowering: StepLowering,
    leaves: Sequence[Leaf],
    store: ProgramStore | None,
    threads: ThreadPoolExecutor,
) -> Programs:
    """Traces and lowers in sequence (the GIL), compiles in threads (XLA's work)."""
    if store is None:
        futures = {threads.submit(lowering.lower(layout, leaves).compile): p for p, layout in layouts.items()}
        return {futures[future]: future.result() for future in as_they_finish(futures, "Compiling")}
    # What comes from JAX's cache cannot be stored again, and what is stored need not be in JAX's cache.
    with jax_cache_disabled():
        futures = {
            threads.submit(
                _compile_and_store,
                lowering.lower(layout, leaves),
                store.key(lowering.description(layout, leaves)),
                lowering.arguments(layout, leaves),
                store,
            ): p
            for p, layout in layouts.items()
        }
        return {futures[future]: future.result() for future in as_they_finish(futures, "Compiling")}


def _compile_and_store(
    lowered: jax.stages.Lowered, key: str, arguments: tuple[Any, ...], store: ProgramStore
) -> jax.stages.Compiled:
    digest = store.digest(lowered)
    compiled = store.load(digest, arguments)
    if compiled is None:
        compiled = lowered.compile()
        store.save(digest, compiled)
    store.link(key, digest)
    return compiled
