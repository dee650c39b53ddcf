"""The most that a server can do: its throughput with a queue that is never empty."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.errors import ConfigError
from jaxpaged.sim.cost import CostModel
from jaxpaged.sim.lengths import Dataset
from jaxpaged.sim.simulator import Draw, Setup, Simulation, draw_zeros
from jaxpaged.sim.traffic import saturating

_REQUESTS = 6000


@dataclass(frozen=True)
class Saturation:
    """Of a server with a full queue.

    Attributes:
        requests_per_s: that finish.
        output_tokens_per_s: drawn, by all outputs.
        batch: requests running.
    """

    requests_per_s: float
    output_tokens_per_s: float
    batch: float


def saturate(
    setup: Setup,
    dataset: Dataset,
    cost: CostModel,
    *,
    seed: int = 0,
    rounds: float = 3.0,
    at_least: int = 20,
    draw: Draw = draw_zeros,
) -> Saturation:
    """Measured once the batch has been replaced about twice, until it has been `rounds` times more.

    Args:
        at_least: requests to measure, of small batches too; their lengths scatter.

    Raises:
        ConfigError: the server holds so many requests that the queue runs dry.
    """
    traffic = saturating(dataset, _REQUESTS, seed=seed, max_model_len=setup.max_model_len)
    simulation = Simulation(traffic, setup, cost, draw=draw)
    tokens = 0
    start: tuple[float, int, int] | None = None
    while (plan := simulation.step()) is not None:
        tokens += len(plan.sampled)
        done, batch = simulation.num_finished, simulation.averages.peak_batch
        if start is None:
            if done >= 2 * batch:
                start = simulation.now, tokens, done
        elif done - start[2] >= max(rounds * batch, at_least):
            break
    if start is None or plan is None:
        raise ConfigError(
            f"{simulation.averages.peak_batch} requests run at once, too many for a queue of {_REQUESTS:,}; lower "
            "max_num_seqs"
        )
    per_s = (tokens - start[1]) / (simulation.now - start[0])
    mean = float(traffic.outputs.mean()) * setup.params.n
    return Saturation(per_s / mean, per_s, simulation.averages.batch)
