"""`jaxpaged plan`: how many requests fit a given KV memory, with the arithmetic."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

from jaxpaged.capacity import Capacity, MemoryUse, kv_bytes_per_token, paged_use, plan_capacity, reserved_use
from jaxpaged.commands.options import KV_CACHE_DTYPE_HELP, MODEL_HELP, add_command, count, size
from jaxpaged.commands.plan_deployment import add_deployment_options, run_deployment
from jaxpaged.config import GIB, KVCacheDType, format_size
from jaxpaged.errors import ConfigError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCALE_BYTES = 4


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        run,
        summary="how many requests fit a given memory",
        description=(
            "Print how many requests of a given length fit a given KV memory at once, paged and, for comparison,\n"
            "with memory reserved for the longest possible request. Give a model, or its shape.\n"
            "With --device, --calibration or --memory: what is left for KV beside the weights of MODEL, how many\n"
            "requests run at once, and (with --rate or --trace) a simulation of serving them."
        ),
        example=(
            "  jaxpaged plan smollm2-135m-instruct --pool 1GiB --tokens 500\n"
            "  jaxpaged plan --layers 32 --kv-heads 8 --head-dim 128 --dtype float16 --pool 60GiB --tokens 2000 \\\n"
            "    --shared-prefix 1500\n"
            "  jaxpaged plan MODEL --device h200 --prompt 1500 --output 500 --shared-prefix 1024 --rate 5"
        ),
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    shape = parser.add_argument_group("shape, instead of MODEL")
    shape.add_argument("--layers", type=int, metavar="N", help="decoder layers")
    shape.add_argument("--kv-heads", type=int, metavar="N", help="key and value heads")
    shape.add_argument("--head-dim", type=int, metavar="N", help="size of a head")
    parser.add_argument("--dtype", choices=tuple(_DTYPE_BYTES), help="of the KV (default: the model's, else bfloat16)")
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDType), default="auto", help=KV_CACHE_DTYPE_HELP)
    parser.add_argument(
        "--pool", type=size, metavar="SIZE", help="memory for KV (default: 1GiB; of a device what is left)"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (default: 16)")
    parser.add_argument("--tokens", type=count, default=1024, metavar="N", help="of a request (default: 1024)")
    parser.add_argument("--shared-prefix", type=count, default=0, metavar="N", help="leading tokens that all share")
    parser.add_argument(
        "--reserve", type=count, metavar="N", help="tokens reserved without paging (default: the model's, else 2048)"
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=[],
        metavar="N,N,...",
        help="also: what requests of these tokens take together",
    )
    add_deployment_options(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    if any(getattr(args, name) is not None for name in ("device", "calibration", "memory", "rate", "trace")):
        return run_deployment(args)
    shape = _shape(args)
    reserve = args.reserve or max(shape.max_len, args.tokens, *args.lengths)
    if args.lengths and max(args.lengths) > reserve:
        raise ConfigError(f"--lengths has {max(args.lengths)}, more than the {reserve} tokens of --reserve; raise that")
    capacity = plan_capacity(
        bytes_per_token=shape.bytes_per_token,
        pool_bytes=args.pool or GIB,
        block_size=args.block_size,
        tokens=args.tokens,
        shared_prefix=args.shared_prefix,
        reserve=reserve,
    )
    uses: dict[str, MemoryUse] = {}
    if args.lengths:
        uses = {
            "reserved": reserved_use(args.lengths, bytes_per_token=shape.bytes_per_token, reserve=reserve),
            "paged": paged_use(args.lengths, bytes_per_token=shape.bytes_per_token, block_size=args.block_size),
        }
    if args.json:
        print(json.dumps(asdict(capacity) | {name: asdict(use) for name, use in uses.items()}, indent=2))
        return 0
    print(_explain(shape, capacity))
    for name, use in uses.items():
        print(f"{f'{len(args.lengths)} {name}':<16}{format_size(use.num_bytes)}, {use.waste:.1%} of it holds no token")
    return 0


def _lengths(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


@dataclass(frozen=True)
class _Shape:
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_cache_dtype: KVCacheDType
    max_len: int

    @property
    def is_quantized(self) -> bool:
        return self.kv_cache_dtype != "auto"

    @property
    def bytes_per_token(self) -> int:
        return kv_bytes_per_token(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=1 if self.is_quantized else _DTYPE_BYTES[self.dtype],
            scale_bytes=_SCALE_BYTES if self.is_quantized else 0,
        )

    @property
    def arithmetic(self) -> str:
        """How `bytes_per_token` comes about."""
        head = f"{self.head_dim} x {_DTYPE_BYTES[self.dtype]} bytes ({self.dtype})"
        if self.is_quantized:
            head = f"({self.head_dim} x 1 byte ({self.kv_cache_dtype}) + {_SCALE_BYTES} bytes of scale)"
        return f"2 (K, V) x {self.layers} layers x {self.kv_heads} heads x {head}"


def _shape(args: argparse.Namespace) -> _Shape:
    given = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    missing = [flag for flag, value in given.items() if value is None]
    if args.model is None:
        if missing:
            raise ConfigError(f"give a model, or its shape: {', '.join(missing)} missing")
        return _Shape(args.layers, args.kv_heads, args.head_dim, args.dtype or "bfloat16", args.kv_cache_dtype, 2048)
    if len(missing) < len(given):
        raise ConfigError(f"give a model or its shape ({', '.join(given)}), not both")

    from jaxpaged.weights import load_config, resolve

    config = load_config(resolve(args.model))
    return _Shape(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        args.dtype or config.dtype,
        args.kv_cache_dtype,
        config.max_position_embeddings,
    )


def _explain(shape: _Shape, capacity: Capacity) -> str:
    token, block, pool = (
        format_size(n) for n in (capacity.bytes_per_token, capacity.bytes_per_block, capacity.pool_bytes)
    )
    own = capacity.blocks_per_request - capacity.shared_blocks
    usable, shared = capacity.usable_blocks, capacity.shared_blocks
    lines = [
        ("KV of a token", f"{shape.arithmetic} = {token}"),
        ("a block", f"{capacity.block_size} tokens x {token} = {block}"),
        ("the pool", f"{pool} / {block} = {capacity.blocks:,} blocks; one is the null block, {usable:,} hold tokens"),
        ("a request", f"{capacity.tokens:,} tokens / {capacity.block_size} = {capacity.blocks_per_request} blocks"),
    ]  # fmt: skip
    if shared:
        lines += [
            (
                "shared prefix",
                f"{capacity.shared_prefix:,} tokens: {shared} full blocks, stored once; {own} of its own",
            ),
            ("requests", f"({usable:,} - {shared}) / {own} = {capacity.requests:,}"),
            (
                "  not sharing",
                f"{usable:,} / {capacity.blocks_per_request} = {usable // capacity.blocks_per_request:,}",
            ),
        ]
    else:
        lines.append(("requests", f"{usable:,} / {own} = {capacity.requests:,}"))
    reserved = f"{pool} / ({capacity.reserve:,} tokens x {token}) = {capacity.requests_reserved:,}"
    lines += [
        ("  reserved", f"{reserved} with {capacity.reserve:,} tokens set aside for each"),
        ("unused", f"{capacity.waste:.1%} of the blocks in use, {capacity.waste_reserved:.1%} of what is reserved"),
    ]
    return "\n".join(f"{name:<16}{text}" for name, text in lines)
