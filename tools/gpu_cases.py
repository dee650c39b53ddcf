"""What is compiled for GPUs: the kernels in every variant, and an engine's whole steps for a few models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gpu_targets import GpuTarget
from jaxpaged.config import EngineConfig, KVCacheDType, ModelConfig, RopeConfig
from jaxpaged.runner.lowering import StepLowering
from jaxpaged.weights.loader import abstract_model
from jaxpaged_kernels import (
    copy_blocks,
    gather_blocks,
    paged_attention,
    rotate_and_write_kv,
    scatter_blocks,
    write_kv,
    write_quantized_kv,
)

# Rows, tokens and slots of the kernels' cases. The pool is large, so that a copy of it cannot hide among temporaries.
ROWS, TOKENS, SLOTS = 32, 512, 1 << 18
MAX_MODEL_LEN = 8192
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Lowered:
    """A program ready to be compiled.

    Attributes:
        array_bytes: of one array of the KV pool.
        num_layers: 0 for a program that is no model.
    """

    program: jax.stages.Lowered
    array_bytes: int
    num_layers: int = 0

    @property
    def donated_bytes(self) -> int:
        """Of the pools, which the program must update in place; 0 for a program that only reads them."""
        arguments = jax.tree.leaves(self.program.args_info)
        return sum(_bytes(argument) for argument in arguments if argument.donated)


@dataclass(frozen=True)
class Case:
    """One variant.

    Attributes:
        name: e.g. "decode-bfloat16-d128-g4-b16"
        lower: for a target whose abstract mesh is in use; all arguments get the sharding.
        min_capability: below it the program must be refused with a ValueError.
    """

    name: str
    lower: Callable[[GpuTarget, jax.sharding.Sharding], Lowered]
    min_capability: tuple[int, int] = (8, 0)


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `paged_attention`; `kv_dtype` None = that of the queries."""

    kind: str = "decode"
    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    kv_heads: int = 8
    kv_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        parts = [self.kind, self.dtype, f"d{self.head_dim}", f"g{self.group}", f"b{self.block_size}"]
        parts += [_short(self.kv_dtype)] if self.kv_dtype else []
        options = {"window": self.window, "cap": self.soft_cap, "sinks": self.sinks}
        return "-".join([*parts, *(name for name, value in options.items() if value)])

    def lower(self, target: GpuTarget, sharding: jax.sharding.Sharding) -> Lowered:
        tokens = ROWS if self.kind == "decode" else TOKENS
        heads = self.kv_heads * self.group
        pool_shape = (SLOTS // self.block_size, self.block_size, self.kv_heads, self.head_dim)
        pool = _array(pool_shape, self.kv_dtype or self.dtype)
        integers = [(ROWS, MAX_MODEL_LEN // self.block_size), (ROWS,), (ROWS + 1,), ()]
        arguments: dict[str, Any] = {
            "q": _array((tokens, heads, self.head_dim), self.dtype),
            "k_pool": pool,
            "v_pool": pool,
        }
        names = ("block_tables", "kv_lens", "query_starts", "num_decodes")
        arguments |= {name: _array(shape, "int32") for name, shape in zip(names, integers, strict=True)}
        if self.kv_dtype is not None:
            arguments |= {name: _array(pool.shape[:3], "float32") for name in ("k_scales", "v_scales")}
        if self.sinks:
            arguments["sinks"] = _array((heads,), "float32")

        def attend(arguments: dict[str, jax.Array]) -> jax.Array:
            return paged_attention(
                **arguments,
                scale=self.head_dim**-0.5,
                window=self.window,
                soft_cap=self.soft_cap,
                decode_only=self.kind == "decode",
                implementation="triton",
            )

        program = jax.jit(attend).lower(_placed(arguments, sharding))
        return Lowered(program, _bytes(pool))

    def case(self) -> Case:
        return Case(self.name, self.lower, FP8_CAPABILITY if _short(self.kv_dtype) == "fp8" else (8, 0))


def attention_cases() -> Iterator[Case]:
    """Both kernels over head sizes and dtypes, then each other option at the commonest head sizes."""
    for kind in ("decode", "mixed"):
        base = AttentionCase(kind)
        variants = [replace(base, head_dim=d, dtype=t) for t in _DTYPES for d in _HEAD_DIMS]
        variants += [replace(base, head_dim=d, kv_dtype=t) for t in _KV_DTYPES for d in _HEAD_DIMS]
        others = [d for d in _DTYPES if d != base.dtype]
        variants += [replace(base, head_dim=d, dtype=t, kv_dtype="int8") for t in others for d in (64, 128, 256)]
        variants += [replace(base, head_dim=64, group=3, kv_heads=3)]
        variants += [replace(base, group=g) for g in (1, 2, 3, 7, 8, 16)]
        variants += [replace(base, block_size=b) for b in (8, 32, 64, 128)]
        options: list[dict[str, Any]] = [{"window": 1024}, {"soft_cap": 50.0}, {"sinks": True}]
        variants += [replace(base, head_dim=d, **option) for option in options for d in (64, 128)]
        yield from (variant.case() for variant in variants)


def write_case(kv_dtype: str | None) -> Case:
    """`write_kv`, or with a `kv_dtype` `write_quantized_kv`."""

    def lower(target: GpuTarget, sharding: jax.sharding.Sharding) -> Lowered:
        new = _array((TOKENS, 8, 128), "bfloat16")
        pool = _array((SLOTS // 16, 16, 8, 128), kv_dtype or "bfloat16")
        scales = [_array(pool.shape[:3], "float32")] * 2 if kv_dtype else []
        slots = _array((TOKENS,), "int32")
        pools = [pool, pool, *scales]
        write = write_quantized_kv if kv_dtype else write_kv
        arguments = _placed([new, new, *pools, slots], sharding)
        program = jax.jit(write, donate_argnums=range(2, 2 + len(pools))).lower(*arguments)
        return Lowered(program, _bytes(pool))

    return Case(f"write_kv-{_short(kv_dtype) or 'bfloat16'}", lower)


def rotate_case(head_dim: int, kv_dtype: str | None) -> Case:
    """`rotate_and_write_kv` of a decode."""

    def lower(target: GpuTarget, sharding: jax.sharding.Sharding) -> Lowered:
        q, new = (_array((ROWS, heads, head_dim), "bfloat16") for heads in (32, 8))
        angles = _array((ROWS, head_dim // 2), "float32")
        pool = _array((SLOTS // 16, 16, 8, head_dim), kv_dtype or "bfloat16")
        scales = (_array(pool.shape[:3], "float32"),) * 2 if kv_dtype else ()
        arguments = _placed((q, new, new, angles, angles, (pool, pool, *scales), _array((ROWS,), "int32")), sharding)
        program = jax.jit(partial(rotate_and_write_kv, implementation="triton"), donate_argnums=5).lower(*arguments)
        return Lowered(program, _bytes(pool))

    name = f"rotate_and_write_kv-{_short(kv_dtype) or 'bfloat16'}-d{head_dim}"
    return Case(name, lower, FP8_CAPABILITY if _short(kv_dtype) == "fp8" else (8, 0))


def block_cases() -> Iterator[Case]:
    """The moves of blocks, over the pools of two layers."""

    def lower(target: GpuTarget, sharding: jax.sharding.Sharding, *, move: Callable, donate: bool) -> Lowered:
        pools = [_array((SLOTS // 16, 16, 8, 128), "bfloat16")] * 4
        ids = _array((32,), "int32")
        blocks = [_array((32, *pools[0].shape[1:]), "bfloat16")] * 4
        moves: dict[Any, list[Any]] = {copy_blocks: [ids, ids], gather_blocks: [ids], scatter_blocks: [blocks, ids]}
        program = jax.jit(move, donate_argnums=(0,) if donate else ()).lower(*_placed([pools, *moves[move]], sharding))
        return Lowered(program, _bytes(pools[0]))

    for move, donate in ((copy_blocks, True), (gather_blocks, False), (scatter_blocks, True)):
        yield Case(move.__name__, partial(lower, move=move, donate=donate))


# The shapes of the models, as their config.json has them.
MODELS = {
    "smollm2-135m": ModelConfig(
        "LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True, dtype="bfloat16"
    ),
    "llama-3-8b": ModelConfig(
        "LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 8192, rope=RopeConfig(theta=500000.0), dtype="bfloat16"
    ),
    "qwen3-0.6b": ModelConfig(
        "Qwen3ForCausalLM",
        151936,
        1024,
        3072,
        28,
        16,
        8,
        128,
        40960,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qk_norm=True,
        dtype="bfloat16",
    ),
}


def step_case(model: str, kind: str, size: int, kv_dtype: KVCacheDType = "auto", attention: str | None = None) -> Case:
    """A whole step as an engine with default options compiles it, its contexts cut to `MAX_MODEL_LEN`.

    Args:
        kind: "decode" or "mixed".
        size: of the bucket.
        kv_dtype: `EngineConfig.kv_cache_dtype`.
        attention: `EngineConfig.attention`.
    """

    def lower(target: GpuTarget, sharding: jax.sharding.Sharding) -> Lowered:
        shape = MODELS[model]
        config = EngineConfig(max_model_len=MAX_MODEL_LEN, attention=attention, kv_cache_dtype=kv_dtype)
        scheduler = config.scheduler_config(MAX_MODEL_LEN, device="gpu")
        module = abstract_model(shape, shape.dtype)
        steps, leaves = StepLowering.of(module, config, scheduler, vocab_size=shape.vocab_size)
        [program] = [p for p in steps.buckets.programs if (p.kind, p.num_tokens) == (kind, size)]
        # Half of what the weights leave, so that weights, pool and temporaries fit into each target.
        free = target.memory - sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        num_blocks = min(free // 2 // steps.pool_shape(1).bytes_per_block, _most_blocks(steps))
        # Odd, so that no activation happens to have as many bytes as an array of the pool.
        num_blocks -= 1 - num_blocks % 2
        k_pool = steps.pool_shape(num_blocks).abstract()[0][0]
        lowered = steps.lower(steps.layout(program, num_blocks), leaves, sharding)
        return Lowered(lowered, _bytes(k_pool), shape.num_layers)

    suffix = "".join(f"-{part}" for part in (_short(kv_dtype if kv_dtype != "auto" else None), attention) if part)
    min_capability = FP8_CAPABILITY if kv_dtype == "fp8" else (8, 0)
    return Case(f"step-{model}-{kind}{size}{suffix}", lower, min_capability)


def step_cases() -> Iterator[Case]:
    for model in MODELS:
        yield step_case(model, "decode", 32)
        yield step_case(model, "mixed", 2048)
    yield step_case("smollm2-135m", "decode", 256)
    yield step_case("llama-3-8b", "decode", 256)
    yield step_case("smollm2-135m", "decode", 32, attention="xla")
    kv_dtypes: tuple[KVCacheDType, ...] = ("int8", "fp8")
    for kv_dtype in kv_dtypes:
        yield step_case("llama-3-8b", "decode", 32, kv_dtype)
        yield step_case("llama-3-8b", "mixed", 2048, kv_dtype)


def all_cases() -> list[Case]:
    writes = (write_case(kv_dtype) for kv_dtype in (None, *_KV_DTYPES))
    rotations = (rotate_case(head_dim, kv_dtype) for kv_dtype in (None, *_KV_DTYPES) for head_dim in _HEAD_DIMS)
    return [*attention_cases(), *writes, *rotations, *block_cases(), *step_cases()]


_DTYPES = ("bfloat16", "float16", "float32")
_KV_DTYPES = ("int8", "float8_e4m3fn")
_HEAD_DIMS = (64, 80, 96, 128, 256)


def _most_blocks(steps: StepLowering) -> int:
    """Blocks that keep each array of the pool within 32-bit offsets."""
    largest = max(_bytes(array) for array in steps.pool_shape(1).abstract()[0])
    return (2**31 - 1) // largest


def _short(kv_dtype: str | None) -> str:
    return "" if kv_dtype is None else kv_dtype.replace("float8_e4m3fn", "fp8")


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _placed(arguments: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
