"""Figures of memory: 2 (where it goes), 13 (how many requests run) and 15 (what sharing saves)."""

from __future__ import annotations

import sharing
from jaxpaged.sim import DATASETS, Constants, Simulation, poisson, simulate
from jaxpaged.sim.metrics import Averages
from jaxpaged.sim.traffic import saturating
from paper_setups import (
    BATCH_RATES,
    BATCHES,
    MEMORY,
    NAMES,
    SERVERS,
    SYSTEMS,
    TRACES,
    Figure,
    cost_of,
    setup_of,
)

# Seconds simulated.
_DURATIONS = {"sharegpt": 240.0, "alpaca": 120.0}
PARTS = ("token_states", "reservation", "internal", "external")


def figure_2(constants: Constants, scale: float, seed: int) -> Figure:
    """Use of the KV memory while requests queue for it."""
    figure = Figure("2", "Where the KV memory goes (OPT-13B, ShareGPT)", "counted", axes=("", "% of the KV memory"))
    figure.about = [
        f"Lengths: {DATASETS['sharegpt']}. A queue that is never empty; shares averaged over the steps (each takes one "
        "unit of time, so no step time is assumed).",
        "External includes what the buddy allocator rounds up. The paper gives only the token states of vLLM.",
    ]
    traffic = saturating(DATASETS["sharegpt"], round(700 * max(scale, 1.0)), seed=seed, max_model_len=2048)
    figure.ours["sharegpt"], figure.paper["sharegpt"] = {}, {}
    for system in SYSTEMS:
        m = simulate(traffic, setup_of(SERVERS[0], system)).memory
        values = [100 * share for share in (m.tokens, m.reserved, m.internal, m.external)]
        figure.ours["sharegpt"][system] = dict(zip(PARTS, values, strict=True))
        figure.paper["sharegpt"][system] = dict(zip(PARTS, MEMORY[system], strict=True))
        for part, value, paper in zip(PARTS, values, MEMORY[system], strict=True):
            figure.row(f"{NAMES[system]}, {part.replace('_', ' ')} %", value, paper, 1)
            figure.curves.setdefault("", {}).setdefault(part.replace("_", " "), []).append((len(figure.rows), value))
    return figure


def figure_13(constants: Constants, scale: float, seed: int) -> Figure:
    """Requests that run at once at the paper's rates."""
    figure = Figure("13", "Requests in the batch (OPT-13B)", "simulated", axes=("", "requests running"))
    cost = cost_of(SERVERS[0], constants)
    figure.about = [
        *(f"{trace}, {BATCH_RATES[trace]:g} requests/s: {DATASETS[trace]}." for trace in TRACES),
        "Averaged over the last two thirds of the time in which requests arrive. Where memory is the limit (all but "
        "Alpaca paged) the batch follows from lengths and allocation alone. Alpaca paged is at its knee, where its "
        "batch is rate times latency: it follows from the step times, which were fitted to this point among others, "
        "and small changes move it between 110 and the 180 that fit in memory (with 180 s of traffic instead of 120 it "
        "is 174).",
        f"Step times: {constants}.",
    ]
    for trace in TRACES:
        rate, duration = BATCH_RATES[trace], _DURATIONS[trace] * max(scale, 1.0)
        traffic = poisson(DATASETS[trace], rate, duration, seed=seed, max_model_len=2048)
        figure.ours[trace], figure.paper[trace] = {}, BATCHES[trace]
        for system in SYSTEMS:
            batch = _mean_batch(Simulation(traffic, setup_of(SERVERS[0], system), cost), duration)
            figure.ours[trace][system] = batch
            figure.row(f"{trace}, {NAMES[system]}", batch, f"{BATCHES[trace][system]:.2f}")
            figure.curves.setdefault(trace, {})[NAMES[system]] = [(0, batch), (1, BATCHES[trace][system])]
    return figure


def _mean_batch(simulation: Simulation, duration: float) -> float:
    """Requests running, from a third of `duration` to its end."""
    while simulation.now < duration / 3 and simulation.step() is not None:
        pass
    simulation.averages = Averages()
    while simulation.now < duration and simulation.step() is not None:
        pass
    return simulation.averages.batch_overall


def figure_15(constants: Constants, scale: float, seed: int) -> Figure:
    """Blocks that sharing saves, counted with fork and copy-on-write."""
    figure = Figure("15", "Blocks saved by sharing (OPT-13B, B = 16)", "counted", axes=("", "% of the blocks saved"))
    figure.about = [
        "As bench/sharing.py: lognormal lengths (sigma 0.8); how beams diverge follows the log-probabilities of "
        "SmolLM2-135M.",
        "Parallel sampling shares the prompt alone, so it saves what the prompt's full blocks are of all: on Alpaca, "
        "with 19 tokens on average, that hangs on how many prompts reach 16 tokens, which a mean does not tell.",
    ]
    for result in sharing.measure(max(round(40 * scale), 4), 16, 0.8, seed):
        case = f"{result.method} {result.width}"
        figure.ours.setdefault(result.dataset, {}).setdefault("paged", {})[case] = result.saved_percent
        figure.paper.setdefault(result.dataset, {}).setdefault("paged", {})[case] = result.paper
        figure.row(f"{result.dataset}, {case} outputs, %", result.saved_percent, result.paper)
        line = figure.curves.setdefault(result.dataset, {}).setdefault(result.method, [])
        line.append((result.width, result.saved_percent))
    figure.axes = ("outputs a request", "% of the blocks saved")
    return figure
