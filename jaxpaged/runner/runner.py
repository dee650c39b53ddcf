"""Holds the weights, the pool and the compiled programs, and runs one plan at a time."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.config import EngineConfig, SchedulerConfig, format_size
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.errors import ConfigError
from jaxpaged.progress import as_they_finish
from jaxpaged.runner.buckets import Buckets, Program
from jaxpaged.runner.compile_guard import CompileGuard
from jaxpaged.runner.host_memory import release_free_memory
from jaxpaged.runner.kv_cache import KVCache, PoolShape
from jaxpaged.runner.memory import pool_blocks
from jaxpaged.runner.pack import Layout, pack
from jaxpaged.runner.step import StepFunction, StepOutputs

logger = logging.getLogger(__name__)

# XLA's compiler runs without the GIL, but each compilation of a large step holds hundreds of megabytes.
MAX_COMPILE_THREADS = 8


class Runner:
    """Executes plans.

    Attributes:
        cache: device and host pools.
        num_blocks: blocks of the device pool, the null block included.
        num_host_blocks: blocks of the host pool.
        guard: counts compilations since warm-up.
    """

    def __init__(self, model: nnx.Module, config: EngineConfig, scheduler: SchedulerConfig, *, vocab_size: int) -> None:
        """Compiles every program (with `config.warmup`), then sizes and allocates the pool.

        Args:
            model: as of `jaxpaged.models`; its arrays are used where they are, without a copy.
            vocab_size: tokens that may be drawn; the model's own vocabulary may be padded.

        Raises:
            ConfigError: the pool would not hold one request of `scheduler.max_model_len`.
        """
        self.guard = CompileGuard()
        self._model_config = model.config
        self._graphdef, state = nnx.split(model)
        self._leaves: list[jax.Array]
        self._treedef: Any
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._config = config
        self._max_blocks = -(-scheduler.max_model_len // config.block_size)
        self._vocab_size = vocab_size
        self._device = next(iter(self._leaves[0].devices()))
        self._programs: dict[Program, jax.stages.Compiled] = {}
        self.buckets = Buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

        shape = PoolShape.of(model.config, 1, config.block_size, self.dtype)
        self.num_blocks = pool_blocks(
            config,
            self._device,
            bytes_per_block=shape.bytes_per_block,
            max_model_len=scheduler.max_model_len,
            weights_bytes=self.weights_bytes,
            temporaries_bytes=self._measure_temporaries(),
        )
        self._layouts = {p: self._layout(p, self.num_blocks) for p in self.buckets.programs}
        self.num_host_blocks = config.swap_space // shape.bytes_per_block
        if config.swap_space and not self.num_host_blocks:
            raise ConfigError(
                f"swap_space ({format_size(config.swap_space)}) is smaller than one block "
                f"({format_size(shape.bytes_per_block)}); raise it"
            )
        if config.warmup:
            self._compile_all()
        self.cache = KVCache(
            self._pool_shape(self.num_blocks),
            self._device,
            num_host_blocks=self.num_host_blocks,
            max_copies=scheduler.max_num_seqs,
        )
        if config.warmup:
            self._run_all()
        self.guard.reset()

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations and pool: the dtype that most of the weights' bytes have."""
        sizes: dict[jnp.dtype, int] = {}
        for leaf in self._leaves:
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.nbytes
        return jnp.dtype(max(sizes, key=lambda dtype: sizes[dtype]))

    @property
    def weights_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._leaves)

    def run(self, plan: StepPlan) -> StepResult:
        """Executes `plan`: swaps, copies, then the step. Blocks until the tokens are on the host.

        Raises:
            IndexError: a block id outside the pool.
        """
        program = self.buckets.pick(plan)
        blob = pack(plan, self._layouts[program])
        self.cache.swap_out(plan.swap_out)
        self.cache.swap_in(plan.swap_in)
        self.cache.copy(plan.copies)
        return self._result(self._call(program, blob), plan)

    def update_weights(self, state: Any) -> None:
        """Replaces the weights by `state` (an nnx state or module) of the same structure, shapes and dtypes.

        Raises:
            ConfigError: the structure, a shape or a dtype differs; nothing has changed then.
        """
        if isinstance(state, nnx.Module):
            state = nnx.state(state)
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self._treedef:
            raise ConfigError("the new weights have another structure than the model that is being served")
        for (path, new), old in zip(jax.tree.leaves_with_path(state), self._leaves, strict=True):
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ConfigError(
                    f"new weight {jax.tree_util.keystr(path)} is {new.dtype}{list(new.shape)}, but the model that is "
                    f"being served has {old.dtype}{list(old.shape)}; convert it first"
                )
        self._leaves = [jax.device_put(new, old.sharding) for new, old in zip(leaves, self._leaves, strict=True)]

    def temporaries(self) -> dict[str, int]:
        """Bytes of temporaries of every program compiled so far."""
        return {str(p): _temporary_bytes(compiled) for p, compiled in self._programs.items()}

    def _call(self, program: Program, blob: np.ndarray) -> StepOutputs:
        if program not in self._programs:
            self._programs[program] = self._lower(self._layouts[program]).compile()
        device_blob = jax.device_put(blob, self._device)
        self.cache.pools, outputs = self._programs[program](self._leaves, self.cache.pools, device_blob)
        return outputs

    def _result(self, outputs: StepOutputs, plan: StepPlan) -> StepResult:
        if self._config.debug_checks and (bad := int(outputs.num_bad_ids)):
            raise IndexError(f"{bad} block ids outside the pool reached the device")
        N = len(plan.sampled)
        if plan.sample.num_logprobs < 0:
            return StepResult(np.asarray(outputs.token_ids)[:N])
        tokens, logprobs, ranks, top_ids, top_logprobs, _ = jax.device_get(outputs)
        return StepResult(tokens[:N], logprobs[:N], ranks[:N], top_ids[:N], top_logprobs[:N])

    def _layout(self, program: Program, num_blocks: int) -> Layout:
        return Layout(program, self._max_blocks, self._config.block_size, num_blocks)

    def _pool_shape(self, num_blocks: int) -> PoolShape:
        return PoolShape.of(self._model_config, num_blocks, self._config.block_size, self.dtype)

    def _lower(self, layout: Layout) -> jax.stages.Lowered:
        step = StepFunction(
            self._graphdef,
            self._treedef,
            layout,
            self._vocab_size,
            self._config.max_logprobs,
            self._config.attention,
            self._config.debug_checks,
        )
        blob = jax.ShapeDtypeStruct((layout.size,), np.int32)
        return jax.jit(step, donate_argnums=1).lower(self._leaves, self._pool_shape(layout.num_blocks).abstract(), blob)

    def _measure_temporaries(self) -> int:
        """Bytes that the largest step takes beside weights and pool. The pool's size does not change it, so a small
        pool stands in for the one that this number is needed to size. On a CPU the pool's size does not depend on it.
        """
        if self._device.platform == "cpu":
            return 0
        layout = self._layout(self.buckets.mixed[-1], self._max_blocks + 1)
        return _temporary_bytes(self._lower(layout).compile())

    def _compile_all(self) -> None:
        """Traces in sequence (the GIL), compiles in threads (XLA's work), largest first."""
        start = time.perf_counter()
        programs = sorted(self.buckets.programs, key=lambda p: p.num_tokens, reverse=True)
        logger.info("compiling %d programs; a later start takes them from the cache", len(programs))
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILE_THREADS)) as threads:
            futures = {threads.submit(self._lower(self._layouts[p]).compile): p for p in programs}
            for future in as_they_finish(futures, "Compiling"):
                self._programs[futures[future]] = future.result()
        release_free_memory()
        logger.info("compiled %d programs in %.1f s", len(programs), time.perf_counter() - start)

    def _run_all(self) -> None:
        """Runs every program on an empty batch: the first call of a program is slower than the next."""
        for program in self.buckets.programs:
            outputs = self._call(program, self._layouts[program].empty())
        jax.block_until_ready(outputs)
        self.cache.warm_up()


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    analysis: Any = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)
