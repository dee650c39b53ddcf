"""The part of `jaxpaged plan` that knows a device: its memory, and with traffic its speed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from jaxpaged.commands.options import count, size
from jaxpaged.commands.simulate import explain_result
from jaxpaged.commands.traffic_options import add_traffic_options, find_speed, make_traffic
from jaxpaged.config import format_size
from jaxpaged.errors import ConfigError
from jaxpaged.sim import CostModel, Dataset, Fixed, ModelShape, Setup, SimulationResult, Traffic, find_device
from jaxpaged.sim.planner import DeploymentPlan, Load, plan_deployment
from jaxpaged.sim.saturation import Saturation, saturate
from jaxpaged.sim.simulator import simulate


def add_deployment_options(parser: argparse.ArgumentParser) -> None:
    """Flags of a plan for a device."""
    group = parser.add_argument_group("a device: weights, pool and requests of MODEL on it")
    add = group.add_argument
    add("--memory", type=size, metavar="SIZE", help="of the device, e.g. 80GiB (or name it: --device)")
    add("--prompt", type=count, default=512, metavar="N", help="tokens of a prompt, the prefix included (default: 512)")
    add("--output", type=count, default=256, metavar="N", help="tokens of an output (default: 256)")
    add("--jax-memory-fraction", type=float, default=0.75, metavar="X", help="XLA_PYTHON_CLIENT_MEM_FRACTION (0.75)")
    add("--gpu-memory-utilization", type=float, default=0.92, metavar="X", help="as of serve (default: 0.92)")
    add(
        "--quantization",
        choices=("none", "q8_0", "q4_0"),
        default="none",
        help="of the weights; step times are of weights multiplied as they are, as CPUs do (default: none)",
    )
    add("--max-num-seqs", type=count, default=256, metavar="N", help="as of serve (default: 256)")
    add("--max-num-batched-tokens", type=count, default=2048, metavar="N", help="as of serve (default: 2048)")
    add_traffic_options(parser)


@dataclass(frozen=True)
class _Speed:
    traffic: Traffic
    cost: CostModel
    result: SimulationResult
    saturation: Saturation


def run_deployment(args: argparse.Namespace) -> int:
    """Prints the plan of a device."""
    if args.model is None:
        raise ConfigError("--device, --calibration, --memory, --rate and --trace need MODEL, to know its weights")
    if args.rate is not None and args.trace is not None:
        raise ConfigError("give --rate or --trace, not both")
    has_traffic = args.rate is not None or args.trace is not None
    # Whose constants are of no use without traffic, but whose memory is.
    speed_of = find_speed(args) if has_traffic or args.calibration is not None else None
    from jaxpaged.weights import load_config, resolve

    config = load_config(resolve(args.model, weights=False))
    quantized = args.kv_cache_dtype != "auto"
    shape = ModelShape.of(
        config,
        name=args.model,
        dtype=args.dtype or "auto",
        quantization=args.quantization,
        kv_dtype_bytes=1 if quantized else 0,
        kv_scale_bytes=4 if quantized else 0,
    )
    memory = args.memory or (find_device(args.device) if speed_of is None else speed_of[0]).total_memory
    plan = plan_deployment(
        config,
        shape,
        Load(args.prompt, args.output, args.shared_prefix),
        device_memory=memory,
        jax_memory_fraction=args.jax_memory_fraction,
        gpu_memory_utilization=args.gpu_memory_utilization,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        pool_bytes=args.pool,
    )
    speed = None
    if has_traffic and speed_of is not None:
        speed = _simulate(args, plan, CostModel(shape, *speed_of), config.max_position_embeddings)
    if args.json:
        print(json.dumps(_as_json(plan, speed), indent=1))
    else:
        print("\n".join(_explain(plan, shape, speed)))
        print(f"\nStart with:\n  {_start_command(args, plan)}")
    return 0


def _simulate(args: argparse.Namespace, plan: DeploymentPlan, cost: CostModel, longest: int) -> _Speed:
    """Traffic of the plan's requests: those of --lengths-of where it is given, else all alike."""
    load = plan.load
    alike = Dataset(Fixed(load.prompt), Fixed(load.output))
    dataset = alike if args.lengths_of is None else None
    traffic = make_traffic(args, longest, dataset)
    setup = Setup(
        slots=plan.shared.usable_blocks * args.block_size,
        block_size=args.block_size,
        max_model_len=longest,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.max_num_batched_tokens, args.max_num_seqs),
        shared_prefix=load.shared_prefix,
        prefix_caching=load.shared_prefix > 0,
        overlap=True,
    )
    return _Speed(traffic, cost, simulate(traffic, setup, cost), saturate(setup, dataset or alike, cost, rounds=1))


def _as_json(plan: DeploymentPlan, speed: _Speed | None) -> dict[str, Any]:
    found: dict[str, Any] = asdict(plan)
    if speed is not None:
        found["simulated"] = asdict(speed.result) | {
            "saturation": asdict(speed.saturation),
            "traffic": speed.traffic.about,
            "cost_model": str(speed.cost.constants),
        }
    return found


def _explain(plan: DeploymentPlan, shape: ModelShape, speed: _Speed | None) -> list[str]:
    memory, load, shared, unshared = plan.memory, plan.load, plan.shared, plan.unshared
    is_dense = memory.weights == shape.params * shape.dtype_bytes
    bytes_of_each = f"{shape.dtype_bytes} bytes" if is_dense else f"{memory.weights / shape.params:.2f} bytes"
    rows = [
        ("device", f"{format_size(memory.device)}, of which the engine may use {format_size(memory.usable)}"),
        ("weights", f"{shape.params:,} parameters x {bytes_of_each} = {format_size(memory.weights)}"),
        ("temporaries", f"about {format_size(memory.temporaries)}"),
        ("pool", f"{format_size(memory.pool)} = {shared.blocks:,} blocks of {shared.block_size} tokens"),
        ("a request", f"{load.prompt:,} + {load.output:,} tokens = {unshared.blocks_per_request} blocks"),
        ("requests", f"{unshared.requests:,} of full length at once, {unshared.waste:.1%} of their blocks unused"),
    ]
    if load.shared_prefix:
        rows.append(
            (
                "  sharing",
                f"{shared.requests:,} with {load.shared_prefix:,} tokens stored once, {shared.waste:.1%} unused",
            )
        )
    rows += [
        ("  on average", f"{plan.average_requests:,}, as a running request is half through its output"),
        ("  reserved", f"{shared.requests_reserved:,} with {shared.reserve:,} tokens set aside for each"),
    ]
    lines = [f"{name:<16}{text}" for name, text in rows]
    if speed is not None:
        full = speed.saturation
        lines += ["", *explain_result(speed.result)]
        lines.append(
            f"{'saturates at':<16}{full.requests_per_s:.2f} requests/s, {full.output_tokens_per_s:,.0f} output tokens/s"
        )
        lines += [f"Traffic: {speed.traffic.about}.", f"Step times: {speed.cost.constants}."]
    return lines


def _start_command(args: argparse.Namespace, plan: DeploymentPlan) -> str:
    """Starts what was planned, with the options that the plan assumed."""
    settings = plan.recommended
    options = {
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": max(settings.max_num_batched_tokens, settings.max_num_seqs),
        "--gpu-memory-utilization": f"{settings.gpu_memory_utilization:g}",
        "--block-size": args.block_size,
        "--dtype": args.dtype,
        "--quantization": None if args.quantization == "none" else args.quantization,
        "--kv-cache-dtype": None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        "--kv-cache-memory-bytes": args.pool,
    }
    given = " ".join(f"{flag} {value}" for flag, value in options.items() if value is not None)
    return f"XLA_PYTHON_CLIENT_MEM_FRACTION={settings.jax_memory_fraction:g} jaxpaged serve {args.model} {given}"
