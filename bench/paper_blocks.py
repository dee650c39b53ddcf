"""Figures of the block size: 18b (latency) and 19 (swapping against recomputing)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jaxpaged.sim import DATASETS, Constants, StepLoad, poisson, simulate
from paper_setups import SERVERS, TRACES, Figure, cost_of, setup_of

_RATES = {"sharegpt": 1.7, "alpaca": 24.0}
_TOKENS = 512


def _kernel_costs() -> tuple[str, dict[int, float]]:
    """The machine that bench/paper_kernel.py ran on, and by block size the time of attention over that at 16."""
    found = json.loads((Path(__file__).parent / "paper" / "attention-cpu.json").read_text(encoding="utf-8"))
    seconds = {int(size): value for size, value in found["seconds"].items()}
    return found["machine"], {size: value / seconds[16] for size, value in seconds.items()}


def figure_18b(constants: Constants, scale: float, seed: int) -> Figure:
    """Normalized latency by block size, near the knee."""
    machine, costs = _kernel_costs()
    table = ", ".join(f"B = {size} {cost:.2f}" for size, cost in costs.items())
    figure = Figure("18b", "Block size (OPT-13B)", "simulated", axes=("tokens a block", "s a token"))
    figure.about = [
        "Two things are in the model. Memory: the larger a block, the more of the last one of each sequence is empty. "
        "And the kernel: reading the KV takes longer by what attention took longer on a CPU than in blocks of 16 "
        f"(bench/paper_kernel.py, measured on {machine}: {table}).",
        "What is not in the model: a GPU's kernel suffers far more from blocks of a few tokens, which use little of "
        "its parallelism; this is why the paper's latency rises below 16, and ours hardly does.",
        f"At {', '.join(f'{_RATES[t]:g} requests/s ({t})' for t in TRACES)}. Step times: {constants}.",
    ]
    words = {"sharegpt": "16 to 128 good", "alpaca": "16 and 32 good, larger worse"}
    for trace in TRACES:
        duration = (240 if trace == "sharegpt" else 60) * scale
        traffic = poisson(DATASETS[trace], _RATES[trace], duration, seed=seed, max_model_len=2048)
        figure.ours[trace], figure.paper[trace] = {"paged": {}, "paged, with kernel": {}}, words[trace]
        for size, slower in costs.items():
            setup = setup_of(SERVERS[0], "paged", block_size=size)
            for system, share in (("paged", 1.0), ("paged, with kernel", slower)):
                cost = cost_of(SERVERS[0], replace(constants, kv_share=constants.kv_share / share))
                latency = simulate(traffic, setup, cost).normalized_latency
                figure.ours[trace][system][str(size)] = latency
                name = system.replace("paged", "memory", 1)
                figure.curves.setdefault(trace, {}).setdefault(name, []).append((size, latency))
            whole = figure.ours[trace]["paged, with kernel"][str(size)]
            figure.row(f"{trace}, B = {size}: s a token", whole, words[trace] if size == 1 else None, 3)
    return figure


def figure_19(constants: Constants, scale: float, seed: int) -> Figure:
    """What giving way costs: swapping against recomputing."""
    figure = Figure("19", "Swapping against recomputing (OPT-13B)", "simulated", axes=("tokens a block", "s"))
    figure.about = [
        f"A sequence of {_TOKENS} tokens gives way once. Swapped, each layer's K and V of each block are a copy of "
        f"their own, which takes {constants.per_move * 1e6:g} µs beside its bytes (assumed), as in the paper's system. "
        "This project's engine gathers 32 blocks a transfer instead.",
        f"Step times: {constants}.",
    ]
    cost = cost_of(SERVERS[0], constants)
    recompute = cost.seconds(StepLoad(_TOKENS, 1, _TOKENS, _TOKENS * (_TOKENS + 1) // 2))
    recompute -= cost.seconds(StepLoad(0, 0, 0, 0))  # the step of the others is taken anyway
    figure.ours = {"swap": {}, "recompute": {}}
    figure.paper = {
        "swap": "very slow at small blocks; as recomputing at 16 to 64",
        "recompute": "the same at every size",
    }
    lines: dict[str, list[tuple[float, float]]] = {"swap out and in": [], "recompute": []}
    for size in (1, 4, 8, 16, 32, 64, 128, 256):
        swap = 2 * cost.move_seconds(-(-_TOKENS // size), size)
        figure.ours["swap"][str(size)], figure.ours["recompute"][str(size)] = swap, recompute
        figure.row(f"B = {size}: swap, ms (recompute {recompute * 1e3:.0f} ms)", swap * 1e3, None, 0)
        lines["swap out and in"].append((size, swap))
        lines["recompute"].append((size, recompute))
    figure.curves[""] = lines
    return figure
