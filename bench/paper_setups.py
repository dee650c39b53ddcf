"""What the PagedAttention paper (Kwon et al., SOSP 2023) ran on, what it found, and how long its steps took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpaged.request import SamplingParams
from jaxpaged.sim import Constants, CostModel, ModelShape, Setup, StepLoad, System, find_device
from jaxpaged.sim.calibration import MeasuredStep, fit_constants
from jaxpaged.sim.devices import Device
from jaxpaged.sim.shapes import opt_shape

SYSTEMS: tuple[System, ...] = ("max", "pow2", "oracle", "paged")
NAMES = {
    "static": "FasterTransformer",
    "max": "Orca (Max)",
    "pow2": "Orca (Pow2)",
    "oracle": "Orca (Oracle)",
    "paged": "vLLM (paged)",
}
TRACES = ("sharegpt", "alpaca")


@dataclass(frozen=True)
class Server:
    """A model on its GPUs: the paper's table 1.

    Attributes:
        slots: tokens of its KV memory.
    """

    name: str
    shape: ModelShape
    device: Device
    slots: int


SERVERS = (
    Server("OPT-13B", opt_shape("OPT-13B", 40, 5120), find_device("a100-40gb"), 15_728),
    Server("OPT-66B", opt_shape("OPT-66B", 64, 9216), find_device("4xa100-40gb"), 9_728),
    Server("OPT-175B", opt_shape("OPT-175B", 96, 12288), find_device("8xa100-80gb"), 60_096),
)
# Of the shape of OPT-13B in all that matters here but for the MLP: 26 GB of weights and 819,200 bytes of KV a token.
LLAMA_13B = Server("LLaMA-13B", opt_shape("LLaMA-13B", 40, 5120), find_device("a100-40gb"), 15_728)

# Requests a second at which the curves of figure 12 turn upward, read off the plots.
KNEES: dict[tuple[str, str], dict[str, float]] = {
    ("OPT-13B", "sharegpt"): {"static": 0.3, "max": 0.5, "pow2": 0.75, "oracle": 1.1, "paged": 1.9},
    ("OPT-66B", "sharegpt"): {"static": 0.1, "max": 0.2, "pow2": 0.4, "oracle": 0.65, "paged": 0.95},
    ("OPT-175B", "sharegpt"): {"static": 0.5, "max": 1.0, "pow2": 1.5, "oracle": 1.8, "paged": 2.4},
    ("OPT-13B", "alpaca"): {"static": 5, "max": 7, "pow2": 13, "oracle": 20, "paged": 28},
    ("OPT-66B", "alpaca"): {"static": 3, "max": 5, "pow2": 9, "oracle": 13, "paged": 18},
    ("OPT-175B", "alpaca"): {"static": 4, "max": 6, "pow2": 13, "oracle": 16, "paged": 20},
}
# Figure 2, percent: token states, reservation, internal, external.
MEMORY = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
# Figure 13: requests a second, and requests running.
BATCH_RATES = {"sharegpt": 2.0, "alpaca": 30.0}
BATCHES = {
    "sharegpt": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}
# Mean tokens of an output, and of a running sequence's context: prompt + E[x^2] / (2 E[x]) of the assumed outputs.
_OUTPUT = {"sharegpt": 337.99, "alpaca": 58.45}
_CONTEXT = {"sharegpt": 477, "alpaca": 81}


# Of the vendor's figures: what large matrix products and copies reach on an A100.
_ASSUMED = {"weights_share": 0.8, "compute_share": 0.7, "kv_share": 0.7}


def paper_constants() -> Constants:
    """Constants with which the cost model comes closest to the paper's own systems on one A100.

    By Little's law a system that sustains R requests/s of L output tokens with a batch of B takes B / (R L) seconds a
    step. Figures 12 and 13 give R and B for four systems and two traces. The shares of the device's figures are
    assumed; what is fitted is the fixed time of a step and that of each sequence. One point is left out.
    """
    server = SERVERS[0]
    steps = []
    for trace, batches in BATCHES.items():
        for system, batch in batches.items():
            # The paged system's batches are those at the rates of figure 13; the others' rates are past their knees.
            rate = BATCH_RATES[trace] if system == "paged" else KNEES[server.name, trace][system]
            seconds = batch / (rate * _OUTPUT[trace])
            if (trace, system) == ("alpaca", "max"):  # 17 ms: less than it takes to read the weights
                continue
            context = round(batch * _CONTEXT[trace])
            steps.append(MeasuredStep(StepLoad(round(batch), round(batch), context, context), seconds))
    return fit_constants(
        steps,
        server.shape,
        server.device,
        about="fixed and per-sequence time fitted to the paper's figures 12 and 13 by Little's law, the rest assumed",
        fixed=_ASSUMED,
    )


def cost_of(server: Server, constants: Constants) -> CostModel:
    return CostModel(server.shape, server.device, constants)


def setup_of(server: Server, system: System, **changes: Any) -> Setup:
    """As the paper ran it: B = 16, recomputation, and for static batches as many requests as surely fit."""
    options: dict[str, Any] = {"max_num_seqs": server.slots // 2048} if system == "static" else {}
    return Setup(server.slots, system, **{**options, **changes})


def outputs(width: int, **changes: Any) -> SamplingParams:
    """Parameters of requests for `width` outputs."""
    return SamplingParams(n=width, max_tokens=None, ignore_eos=True, **changes)


@dataclass
class Figure:
    """One figure of the paper, reproduced.

    Attributes:
        number: as the paper's.
        kind: "measured", "counted" or "simulated".
        ours, paper: trace (or case) -> system -> number, or part -> number.
        about: what was assumed, and what differs.
        rows: of the table on the page: name, ours, paper.
        curves: of the plot: panel -> line -> points (x, y).
        axes: labels of x and y; a plot without x is of bars.
    """

    number: str
    title: str
    kind: str
    ours: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")

    def row(self, name: str, ours: float, paper: object, digits: int = 2) -> None:
        self.rows.append((name, f"{ours:.{digits}f}", "" if paper is None else str(paper)))
