"""`jaxpaged simulate`: the scheduler at work, without a model: event by event, or an hour of traffic on a device."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from jaxpaged.commands.options import MODEL_HELP, add_command, count
from jaxpaged.commands.traffic_options import add_traffic_options, find_speed, make_traffic
from jaxpaged.config import PreemptionMode
from jaxpaged.core.rules import Victim
from jaxpaged.errors import ConfigError
from jaxpaged.sim import SYSTEMS, Event, Setup, Simulation, SimulationResult, Traffic
from jaxpaged.sim.cost import CostModel
from jaxpaged.sim.planner import Load, plan_deployment
from jaxpaged.sim.shapes import ModelShape

_REQUEST = re.compile(r"([^:,\s]+):(\d{1,9}):(\d{1,9})")


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "simulate",
        run,
        summary="what the scheduler does with requests, without a model",
        description=(
            "Run the real scheduler and block manager without a model. With --requests, every step takes one unit of\n"
            "time and each admission, preemption and end is printed. With --rate or --trace, a cost model of MODEL on\n"
            "--device tells how long each step takes, and throughput, latencies and preemptions are printed."
        ),
        example=(
            "  jaxpaged simulate --blocks 12 --watermark 0 --victim newest --requests A:40:40,B:30:24,C:60:30,D:20:16\n"
            "  jaxpaged simulate smollm2-135m-instruct --device l4 --rate 30 --duration 600"
        ),
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; for --rate and --trace")
    parser.add_argument(
        "--requests", metavar="LIST", help="NAME:PROMPT:OUTPUT,... in tokens: all there at the start, in this order"
    )
    add_traffic_options(parser)
    memory = parser.add_argument_group("memory and scheduling").add_argument
    memory(
        "--blocks",
        type=count,
        metavar="N",
        help="blocks that hold tokens; the null block is extra (default: what --device has left beside MODEL)",
    )
    memory("--block-size", type=int, default=16, metavar="N", help="tokens a block (default: 16)")
    memory("--watermark", type=float, default=0.0, metavar="X", help="share kept free on admission (default: 0)")
    memory("--victim", choices=get_args(Victim), default="newest", help="who gives way (default: newest)")
    memory("--system", choices=SYSTEMS, default="paged", help="how memory is handed out (default: paged)")
    memory("--preemption-mode", choices=get_args(PreemptionMode), default="recompute", help="(default: recompute)")
    memory("--host-blocks", type=count, default=0, metavar="N", help="blocks to swap to (default: 0)")
    memory("--shared-prefix", type=count, default=0, metavar="N", help="leading tokens that all prompts share")
    memory("--max-model-len", type=count, metavar="N", help="most tokens of a sequence (default: 2048, or what fits)")
    memory("--max-num-seqs", type=int, default=256, metavar="N", help="most sequences at once (default: 256)")
    memory("--max-num-batched-tokens", type=count, default=2048, metavar="N", help="a step (default: 2048)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    given = [flag for flag in ("requests", "rate", "trace") if getattr(args, flag) is not None]
    if len(given) != 1:
        raise ConfigError("give one of --requests, --rate and --trace: what is to be served")
    if args.requests is not None:
        return _run_requests(args)
    return _run_traffic(args)


def _run_requests(args: argparse.Namespace) -> int:
    """Unit-time steps, every event printed."""
    if args.blocks is None:
        raise ConfigError("--requests needs --blocks, such as --blocks 12")
    names, traffic = parse_requests(args.requests)
    simulation = Simulation(
        traffic, _setup(args, traffic, args.blocks, args.max_model_len), names=names, keep_events=True
    )
    result = simulation.run()
    if simulation.refused:
        name = simulation.refused[0]
        number = names.index(name)
        raise ConfigError(
            f"request {name} ({traffic.prompts[number]} prompt and {traffic.outputs[number]} output tokens) never fits "
            f"{args.blocks} blocks of {args.block_size} tokens; raise --blocks or --max-model-len"
        )
    if args.json:
        print(json.dumps({"events": [asdict(e) for e in simulation.events], "steps": result.steps}, indent=1))
        return 0
    print("step  event    request   tokens  free")
    for event in simulation.events:
        print(_line(event))
    return 0


def _line(event: Event) -> str:
    return f"{event.step:>4}  {event.kind:<8} {event.request:<8} {event.tokens:>7}  {event.free_blocks:>4}"


def parse_requests(text: str) -> tuple[list[str], Traffic]:
    """Names and traffic of "A:40:40,B:30:24": name, prompt tokens, output tokens.

    Raises:
        ConfigError: not of this form, a length of 0, or a name twice.
    """
    rows: list[tuple[str, int, int]] = []
    for part in text.split(","):
        match = _REQUEST.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--requests has {part!r}, but each must be NAME:PROMPT:OUTPUT, such as A:40:40")
        name, prompt, output = match[1], int(match[2]), int(match[3])
        for field, value in (("PROMPT", prompt), ("OUTPUT", output)):
            if value < 1:
                raise ConfigError(f"--requests has {part!r}, but {field} must be at least 1")
        if name in (row[0] for row in rows):
            raise ConfigError(f"--requests has {name!r} twice; give each its own name")
        rows.append((name, prompt, output))
    names, prompts, outputs = zip(*rows, strict=True)
    lengths = np.array(prompts, np.int32), np.array(outputs, np.int32)
    return list(names), Traffic(np.zeros(len(rows)), *lengths, "requests by hand")


def _run_traffic(args: argparse.Namespace) -> int:
    if args.model is None:
        raise ConfigError("--rate and --trace need MODEL, for the time that steps take")
    device, constants = find_speed(args)
    from jaxpaged.weights import load_config, resolve

    config = load_config(resolve(args.model, weights=False))
    shape = ModelShape.of(config, name=args.model)
    cost = CostModel(shape, device, constants)
    max_model_len = args.max_model_len or min(config.max_position_embeddings, 2048)
    blocks = args.blocks
    if blocks is None:
        longest, memory = Load(max_model_len - 1, 1), device.total_memory
        plan = plan_deployment(config, shape, longest, device_memory=memory, block_size=args.block_size)
        blocks = plan.unshared.usable_blocks
    traffic = make_traffic(args, max_model_len)
    simulation = Simulation(traffic, _setup(args, traffic, blocks, max_model_len), cost)
    result = simulation.run()
    if args.json:
        print(json.dumps(asdict(result) | {"traffic": traffic.about, "cost_model": str(cost.constants)}, indent=1))
        return 0
    print("\n".join(explain_result(result)))
    print(f"Traffic: {traffic.about}.\nStep times: {cost.constants}.")
    return 0


def explain_result(result: SimulationResult) -> list[str]:
    """A few lines for people."""
    rows = [
        (
            "requests",
            f"{result.finished:,} of {result.requests:,} in {result.seconds:,.1f} s, {result.refused} refused",
        ),
        ("throughput", f"{result.requests_per_s:.2f} requests/s, {result.output_tokens_per_s:,.0f} output tokens/s"),
        ("TTFT", _percentiles(result.ttft)),
        ("between tokens", _percentiles(result.inter_token)),
        ("latency", _percentiles(result.latency)),
        ("a token", f"{result.normalized_latency * 1e3:.1f} ms of latency for each token of the output, on average"),
        ("batch", f"{result.mean_batch:.1f} requests on average, {result.peak_batch} at most"),
        ("preemptions", f"{result.preemptions:,}"),
    ]
    return [f"{name:<16}{text}" for name, text in rows]


def _percentiles(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} s" for name, value in values.items())


def _setup(args: argparse.Namespace, traffic: Traffic, blocks: int, max_model_len: int | None) -> Setup:
    slots = blocks * args.block_size
    if max_model_len is None:
        max_model_len = max(int((traffic.prompts + traffic.outputs).max()), 2)
    return Setup(
        slots=slots,
        system=args.system,
        block_size=args.block_size,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.max_num_batched_tokens, args.max_num_seqs),
        watermark=args.watermark,
        victim=args.victim,
        preemption_mode=args.preemption_mode,
        host_blocks=args.host_blocks,
        shared_prefix=args.shared_prefix,
        prefix_caching=args.shared_prefix > 0,
    )
