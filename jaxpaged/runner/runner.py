"""Holds the weights, the pool and the compiled programs, and runs plans."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.config import EngineConfig, SchedulerConfig, format_size
from jaxpaged.core.plan import PositionLogprobs, StepPlan, StepResult
from jaxpaged.errors import ConfigError
from jaxpaged.runner.buckets import Buckets, Program
from jaxpaged.runner.compile_cache import start_folder
from jaxpaged.runner.compile_guard import CompileGuard
from jaxpaged.runner.kv_cache import KVCache
from jaxpaged.runner.lowering import StepLowering, temporary_bytes
from jaxpaged.runner.memory import eager_blocks, pool_blocks
from jaxpaged.runner.optional import OptionalInputs
from jaxpaged.runner.pack import Packed, Packer
from jaxpaged.runner.pooling import sum_spans
from jaxpaged.runner.program_store import ProgramStore, is_known
from jaxpaged.runner.programs import make_programs
from jaxpaged.runner.step import StepOutputs
from jaxpaged_kernels import native


@dataclass(frozen=True)
class Launched:
    """A step that the device computes, or has computed.

    Attributes:
        wanted: what `Runner.fetch` brings to the host; the copies are under way.
    """

    plan: StepPlan
    program: Program
    packed: Packed
    wanted: dict[str, Any]


class Runner:
    """Executes plans. Steps run in the order of their launches; the host need not wait for one to launch the next.

    Attributes:
        cache: device and host pools.
        num_blocks: blocks of the device pool, the null block included.
        num_eager_blocks: as in `CacheConfig`.
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
        self._leaves: list[jax.Array]
        self._lowering, self._leaves = StepLowering.of(model, config, scheduler, vocab_size=vocab_size)
        self._config = config
        self._device = next(iter(self._leaves[0].devices()))
        self._programs: dict[Program, jax.stages.Compiled] = {}
        self._optional = OptionalInputs(self.buckets.programs, model.config.vocab_size, self._device)

        shape = self._lowering.pool_shape(1)
        self.num_blocks = pool_blocks(
            config,
            self._device,
            bytes_per_block=shape.bytes_per_block,
            max_blocks=shape.max_blocks,
            max_model_len=scheduler.max_model_len,
            weights_bytes=self.weights_bytes,
            temporaries_bytes=self._measure_temporaries(),
        )
        self.num_eager_blocks = eager_blocks(config, self._device, max_num_seqs=scheduler.max_num_seqs)
        self._packers = {p: Packer(self._lowering.layout(p, self.num_blocks)) for p in self.buckets.programs}
        self.num_host_blocks = config.swap_space // shape.bytes_per_block
        if config.swap_space and not self.num_host_blocks:
            raise ConfigError(
                f"swap_space ({format_size(config.swap_space)}) is smaller than one block "
                f"({format_size(shape.bytes_per_block)}); raise it"
            )
        with ThreadPoolExecutor(1) as thread:
            if self._lowering.linear == "native":
                # Not those that come later: weights that change with each training step are not worth the move.
                thread.submit(native.prefer_huge_pages, self._leaves)
            if config.warmup:
                self._make_all(model)
            self.cache = KVCache(
                self._lowering.pool_shape(self.num_blocks),
                self._device,
                num_host_blocks=self.num_host_blocks,
                num_rows=scheduler.max_num_seqs,
            )
        if config.warmup:
            self._run_all()
        self.guard.reset()

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations and pool: the dtype that most of the weights' bytes have."""
        return self._lowering.dtype

    @property
    def buckets(self) -> Buckets:
        return self._lowering.buckets

    @property
    def weights_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._leaves)

    def launch(self, plan: StepPlan) -> Launched:
        """Has the device execute `plan`, behind all that was launched before: swaps, copies, then the step. Returns
        before it is computed, except that blocks which are swapped out are waited for.

        Raises:
            IndexError: a block id outside the pool.
        """
        program = self.buckets.pick(plan)
        packed = self._packers[program].pack(plan)
        self.cache.swap_out(plan.swap_out)
        self.cache.swap_in(plan.swap_in)
        self.cache.copy(plan.copies)
        wanted = self._wanted(self._call(program, packed.blob, plan), plan)
        for array in jax.tree.leaves(wanted):
            array.copy_to_host_async()
        return Launched(plan, program, packed, wanted)

    def fetch(self, launched: Launched) -> StepResult:
        """What came of a step. Blocks until it is computed.

        Raises:
            IndexError: block ids outside the pool reached the device (debug mode).
        """
        plan, got = launched.plan, jax.device_get(launched.wanted)
        self._packers[launched.program].give_back(launched.packed)
        if bad := int(got.get("num_bad_ids", 0)):
            raise IndexError(f"{bad} block ids outside the pool reached the device")
        N, M = len(plan.sampled), sum(len(span.target_ids) for span in plan.prompt_spans)
        result = StepResult(
            got["token_ids"][:N],
            prompt=PositionLogprobs(*(x[:M] for x in got["prompt"])) if M else None,
            pooled=got["pooled"][: len(plan.pool_spans)] if plan.pool_spans else None,
        )
        if "logprobs" in got:
            names = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
            result = replace(result, **{name: x[:N] for name, x in zip(names, got["logprobs"], strict=True)})
        if "ids" in got:
            id_logprobs, id_ranks = got["ids"]
            result = replace(result, id_logprobs=id_logprobs[:N], id_ranks=id_ranks[:N])
        return result

    def restore_pools(self) -> bool:
        """After a step that failed or was interrupted: fresh pools, if it took them with it; whether it did."""
        if not self.cache.is_lost:
            return False
        self.cache.allocate()
        return True

    def update_weights(self, state: Any) -> None:
        """Replaces the weights by `state` (an nnx state or module) of the same structure, shapes and dtypes.

        Raises:
            ConfigError: the structure, a shape or a dtype differs; nothing has changed then.
        """
        if isinstance(state, nnx.Module):
            state = nnx.state(state)
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self._lowering.treedef:
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
        return {str(p): temporary_bytes(compiled) for p, compiled in self._programs.items()}

    def _call(self, program: Program, blob: np.ndarray, plan: StepPlan | None) -> StepOutputs:
        if program not in self._programs:
            self._programs[program] = self._lower(program).compile()
        optional = self._optional.of(program, plan)
        self.cache.pools, self.cache.tokens, outputs = self._programs[program](
            self._leaves, self.cache.pools, self.cache.tokens, blob, optional
        )
        return outputs

    def _wanted(self, outputs: StepOutputs, plan: StepPlan) -> dict[str, Any]:
        """Those of the step's outputs that `plan` asks for."""
        drawn = outputs.drawn
        wanted: dict[str, Any] = {"token_ids": drawn.token_ids}
        if self._config.debug_checks:
            wanted["num_bad_ids"] = outputs.num_bad_ids
        if plan.sample.num_logprobs >= 0:
            wanted["logprobs"] = drawn.logprobs
            if plan.adjustments is not None and plan.adjustments.logprob_token_ids:
                wanted["ids"] = (drawn.id_logprobs, drawn.id_ranks)
        if plan.prompt_spans:
            wanted["prompt"] = outputs.prompt
        if plan.pool_spans:
            assert outputs.hidden is not None, "a program of decodes has no hidden states"
            wanted["pooled"] = sum_spans(outputs.hidden, plan.pool_spans, self.buckets.mixed[-1].num_rows)
        return wanted

    def _lower(self, program: Program) -> jax.stages.Lowered:
        return self._lowering.lower(self._packers[program].layout, self._leaves)

    def _measure_temporaries(self) -> int:
        """Bytes that the largest step takes beside weights and pool. The pool's size does not change it, so a small
        pool stands in for the one that this number is needed to size. On a CPU the pool's size does not depend on it.
        """
        if self._device.platform == "cpu":
            return 0
        layout = self._lowering.layout(self.buckets.mixed[-1], self._lowering.max_blocks + 1)
        return temporary_bytes(self._lowering.lower(layout, self._leaves).compile())

    def _make_all(self, model: nnx.Module) -> None:
        layouts = {program: packer.layout for program, packer in self._packers.items()}
        self._programs = make_programs(self._lowering, layouts, self._leaves, self._store(model))

    def _store(self, model: nnx.Module) -> ProgramStore | None:
        """On a GPU there is none: a stored program does not register the kernels that it calls, lowering does."""
        folder = start_folder()
        if folder is None or self._device.platform != "cpu" or not is_known(model):
            return None
        return ProgramStore(folder / "programs", self._device)

    def _run_all(self) -> None:
        """Runs every program on an empty batch: the first call of a program is slower than the next."""
        for program in self.buckets.programs:
            outputs = self._call(program, self._packers[program].layout.empty(), None)
            if outputs.hidden is not None:
                sum_spans(outputs.hidden, (), program.num_rows)
        jax.block_until_ready(outputs)
        self.cache.warm_up()
