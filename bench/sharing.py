"""Memory saved by sharing KV blocks among the outputs of a request: parallel sampling and beam search.

    python bench/sharing.py [--requests 100] [--block-size 16] [--json FILE]

The figure is that of the PagedAttention paper (Kwon et al., 2023, figure 15): blocks saved by sharing / blocks without
sharing. The engine's own scheduler and block manager do the counting: with every step, the blocks in use, and those
that the same sequences would use if each had its own. Nothing is shared between requests.

What has to be assumed:

- Lengths are lognormal with the paper's means (Alpaca 19.31 in, 58.45 out; ShareGPT 161.31 in, 337.99 out); the paper
  gives no more than these. All outputs of a request have its length.
- How beams diverge: at each step each beam's most probable next tokens have the log-probabilities that SmolLM2-135M had
  at some position of its golden outputs (tests/goldens/smollm2_135m.json), drawn at random and independently; those
  behind the five that are known there fall on by the last gap. Peaked distributions, as these are, let one beam win
  over its siblings slowly; flat ones mix them fast.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.beam import BeamSettings
from jaxpaged.core.plan import FloatArray, StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SamplingParams

GOLDENS = Path(__file__).parents[1] / "tests" / "goldens" / "smollm2_135m.json"
MAX_MODEL_LEN = 2048
# Mean tokens of prompts and outputs.
DATASETS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}
WIDTHS = (2, 4, 6)
# Percent, of the paper. Of ShareGPT it gives the range from 2 to 6.
PAPER = {
    ("alpaca", "parallel", 2): "6.09",
    ("alpaca", "parallel", 4): "8.53",
    ("alpaca", "parallel", 6): "9.79",
    ("alpaca", "beam", 2): "37.56",
    ("alpaca", "beam", 4): "53.13",
    ("alpaca", "beam", 6): "55.16",
    ("sharegpt", "parallel", 2): "16.2 to 30.5",
    ("sharegpt", "parallel", 4): "16.2 to 30.5",
    ("sharegpt", "parallel", 6): "16.2 to 30.5",
    ("sharegpt", "beam", 2): "44.3 to 66.3",
    ("sharegpt", "beam", 4): "44.3 to 66.3",
    ("sharegpt", "beam", 6): "44.3 to 66.3",
}


@dataclass(frozen=True)
class Sharing:
    """Blocks of a workload, summed over its steps.

    Attributes:
        used: blocks in use.
        unshared: blocks that the same sequences would use, each with its own.
        copies: blocks copied on write, over the whole run.
        paper: percent saved, as the paper has it.
    """

    dataset: str
    method: str
    width: int
    used: int
    unshared: int
    copies: int
    paper: str = ""

    @property
    def saved_percent(self) -> float:
        return 100 * (1 - self.used / self.unshared)


def draw_lengths(mean: float, count: int, sigma: float, rng: np.random.Generator) -> list[int]:
    """`count` lognormal lengths of at least 1 with this mean; at most half of MAX_MODEL_LEN each."""
    drawn = rng.lognormal(0, sigma, count)
    for _ in range(20):  # what is cut off goes to the others
        drawn = np.clip(drawn * mean / drawn.mean(), 1, MAX_MODEL_LEN // 2)
    return [int(length) for length in np.maximum(np.floor(drawn + rng.random(count)), 1)]


def candidate_rows(num_top: int) -> FloatArray:
    """[rows, num_top] float32 log-probabilities, best first, of real positions."""
    cases = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
    known = np.array([[logprob for _, logprob in top] for case in cases for top in case["top_logprobs"]], np.float32)
    gap = (known[:, -1] - known[:, -2])[:, None]
    missing = np.arange(1, max(num_top - known.shape[1], 0) + 1, dtype=np.float32)
    return np.concatenate([known, known[:, -1:] + gap * missing], axis=1)[:, :num_top]


def count_blocks(
    dataset: str, method: str, width: int, lengths: list[tuple[int, int]], *, block_size: int, rng: np.random.Generator
) -> Sharing:
    """Serves requests with (prompt, output) `lengths`, all at once, and counts blocks."""
    num_seqs = width * min(len(lengths), 32)
    num_blocks = 1 + num_seqs * -(-MAX_MODEL_LEN // block_size)
    cache = CacheConfig(num_blocks, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(MAX_MODEL_LEN, num_seqs, 2 * MAX_MODEL_LEN), cache)
    beams = BeamSettings() if method == "beam" else None
    requests = []
    for i, (prompt_len, output_len) in enumerate(lengths):
        params = SamplingParams(n=width, max_tokens=output_len, ignore_eos=True, beam_search=beams)
        requests.append(Request(str(i), [0] * prompt_len, params, output_len, seed=0))
        scheduler.add(requests[-1])
    rows = candidate_rows(width)
    used = unshared = 0
    while (plan := scheduler.schedule()) is not None:
        stats = scheduler.stats()
        used += stats.num_total_blocks - stats.num_free_blocks
        unshared += sum(_unshared(request) for request in requests if not request.is_finished)
        scheduler.update(plan, _draw(plan, rows, rng))
    return Sharing(
        dataset, method, width, used, unshared, scheduler.stats().copied_blocks_total, PAPER[dataset, method, width]
    )


def _unshared(request: Request) -> int:
    leader = request.sequences[0]
    return sum(len(s.block_table) or len(leader.block_table) for s in request.sequences)


def _draw(plan: StepPlan, rows: FloatArray, rng: np.random.Generator) -> StepResult:
    count = len(plan.sampled)
    tokens = np.zeros(count, np.int32)
    if plan.sample.num_logprobs < 0:
        return StepResult(tokens)
    top_ids = np.tile(np.arange(rows.shape[1], dtype=np.int32), (count, 1))
    return StepResult(tokens, top_token_ids=top_ids, top_logprobs=rows[rng.integers(0, len(rows), count)])


def measure(num_requests: int, block_size: int, sigma: float, seed: int) -> Iterator[Sharing]:
    for dataset, (prompt_mean, output_mean) in DATASETS.items():
        rng = np.random.default_rng(seed)
        prompts, outputs = (draw_lengths(mean, num_requests, sigma, rng) for mean in (prompt_mean, output_mean))
        lengths = list(zip(prompts, outputs, strict=True))
        for method in ("parallel", "beam"):
            for width in WIDTHS:
                yield count_blocks(dataset, method, width, lengths, block_size=block_size, rng=rng)


def print_table(results: list[Sharing], title: str) -> None:
    table = Table(title=title)
    for name in ("lengths", "method", "outputs", "saved %", "paper %", "copies"):
        table.add_column(name, justify="left" if name in ("lengths", "method") else "right")
    for r in results:
        table.add_row(r.dataset, r.method, str(r.width), f"{r.saved_percent:.2f}", r.paper, str(r.copies))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="requests of each workload")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block; the paper's is 16")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the lognormal lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    results = list(measure(args.requests, args.block_size, args.sigma, args.seed))
    print_table(results, f"KV blocks saved by sharing, blocks of {args.block_size} tokens")
    if args.json is not None:
        rows = [asdict(r) | {"saved_percent": r.saved_percent} for r in results]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
