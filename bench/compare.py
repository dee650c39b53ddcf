"""The same workloads against jaxpaged and every other server or library that is installed, one after another.

    python bench/compare.py --model ~/smollm2-hf --workloads W1 W2 W3 --repeats 3 --json compare.json
    python bench/compare.py --model ~/smollm2-hf --workloads W4 --peers jaxpaged vllm --plot rates.png
    python bench/compare.py --list --model ~/smollm2-hf             who is installed, and how to install the others

Each contestant is started once (servers on a loopback port, libraries in a process that holds them) and gets the same
lists of token ids, greedy, with as many output tokens as each request says. One after the other: while one starts or is
measured, the processes of all others are paused, so they need memory, but no processor. A workload goes through all
contestants before the next begins, a repeat through all workloads, with other prompts of the same lengths and another
contestant first. Precisions come one after the other. All read the same weights: the Hugging Face folder MODEL, or what
bench/peers.md converts it to. Servers are compared with `jaxpaged serve`, libraries with jaxpaged in process.

`bench/compare_page.py` makes a page of what --json wrote.

Workloads:
{workloads}
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peers.contestants import BY_NAME, CONTESTANTS, DTYPES, Contestant, Setup
from peers.plot import plot_rates, why_not
from peers.records import machine, write_runs
from peers.rounds import run_rounds
from peers.tables import Comparison, Run, markdown
from peers.workloads import RATES, WORKLOADS, Settings

DEFAULT_PEERS = Path("~/jaxpaged-peers")


def setups(args: argparse.Namespace) -> Iterator[Setup]:
    for dtype in args.dtype:
        yield Setup(
            model=args.model.expanduser().resolve(),
            peers=args.peers_dir.expanduser().resolve(),
            dtype=dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            threads=args.threads,
        )


def environment(present: Sequence[tuple[Contestant, Setup]], args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on. No paths and no name of the machine: this is for others to read."""
    told = ("peers", "workloads", "repeats", "dtype", "max_model_len", "max_num_seqs", "threads", "rates",
            "rate_seconds", "latency_limit", "time_limit", "seed", "small")  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        **machine(),
        "python": platform.python_version(),
        "model": args.model.expanduser().resolve().name,
        "settings": {name: getattr(args, name) for name in told},
        "versions": {contestant.name: contestant.versions(setup) for contestant, setup in present},
    }


def compare(args: argparse.Namespace) -> int:
    """Runs what `args` asks for and prints the tables. Returns the exit status: 1 for a failure."""
    present, skipped = [], []
    for setup in setups(args):
        for contestant in (BY_NAME[name] for name in args.peers):
            if reason := contestant.why_skipped(setup):
                skipped.append(f"{contestant.name} {setup.dtype}: {reason}")
            else:
                present.append((contestant, setup))
    if args.list:
        for contestant, setup in present:
            print(f"{contestant.name} {setup.dtype}: installed {contestant.versions(setup) or ''}".rstrip())
    for line in skipped:
        print(f"skipped {line}", file=sys.stdout if args.list else sys.stderr)
    if args.list:
        return 0
    if not present:
        return 1
    runs: list[Run] = []
    facts = environment(present, args) | {"skipped": [line.partition(":")[0] for line in skipped]}

    def save() -> None:
        # Each time: a run of hours that is cut short leaves what it has.
        if args.json:
            write_runs(args.json, facts, runs)

    for setup, together in itertools.groupby(present, key=lambda pair: pair[1]):
        with tempfile.TemporaryDirectory() as logs:
            run_rounds(
                [contestant for contestant, _ in together], setup, args.workloads, args.repeats, settings_of(args),
                time_limit_s=args.time_limit, logs=Path(logs), runs=runs, save=save,
            )  # fmt: skip
    comparison = Comparison(runs, args.repeats)
    print(markdown(comparison, args.workloads))
    if disturbances := comparison.disturbances():
        print(f"\nOther programs took processors from {', '.join(disturbances)}: measure again on an idle machine.")
    for line in (*comparison.errors(), *(f"skipped {line}" for line in skipped)):
        print(f"\n{line}")
    if args.plot:
        plot_rates(runs, args.plot)
    return 1 if comparison.errors() else 0


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        seed=args.seed,
        max_model_len=args.max_model_len,
        rates=args.rates,
        rate_seconds=args.rate_seconds,
        latency_limit_s=args.latency_limit,
        small=args.small,
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; None = that of the process. Leaves with status 2 and a line for what is wrong."""
    titles = "\n".join(f"  {name:8}{workload.title}" for name, workload in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(workloads=titles), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [contestant.name for contestant in CONTESTANTS]
    add("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face folder (config, tokenizer, weights)")
    add(
        "--peers", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)} (default: all)"
    )
    add("--workloads", nargs="+", choices=WORKLOADS, default=["W1", "W2", "W3"], help="default: W1 W2 W3")
    add("--repeats", type=int, default=3, metavar="N", help="of everything, interleaved (default: %(default)s)")
    add(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=["bf16"],
        help="of weights; int8 and int4 stand for each peer's own format of that width, such as Q8_0 (default: bf16)",
    )
    add(
        "--peers-dir", type=Path, default=DEFAULT_PEERS, metavar="DIR", help="what peers.md made (default: %(default)s)"
    )
    add("--max-model-len", type=int, default=2048, metavar="N", help="most tokens of a sequence (default: %(default)s)")
    add("--max-num-seqs", type=int, default=16, metavar="N", help="most sequences at once (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each peer (default: %(default)s)")
    add(
        "--rates",
        nargs="+",
        type=float,
        default=RATES,
        metavar="R",
        help="of W4, requests/s, rising (default: from 0.5 on, each 1.41 times the one before)",
    )
    add("--rate-seconds", type=float, default=60.0, metavar="S", help="of arrivals at each rate of W4 (default: 60)")
    add(
        "--latency-limit",
        type=float,
        default=0.5,
        metavar="S",
        help="W4 ends at the first rate with a mean normalized latency above this, seconds a token (default: 0.5)",
    )
    add(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="S",
        help="of a load on a library: no request begins later (default: 120; for those that would take an hour)",
    )
    add("--seed", type=int, default=0)
    add("--small", action="store_true", help="an eighth of the requests: to try the set-up, not to measure")
    add("--list", action="store_true", help="only tell who is installed")
    add("--json", type=Path, metavar="FILE", help="write every figure of every run")
    add("--plot", type=Path, metavar="FILE", help="a PNG of W4 (needs matplotlib: the extra `bench`)")
    args = parser.parse_args(argv)
    check_args(parser, args)
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Leaves with status 2 and a line for options that do not fit."""
    if args.repeats < 1 or args.rate_seconds <= 0 or args.time_limit <= 0:
        parser.error("--repeats, --rate-seconds and --time-limit must be above 0")
    if list(args.rates) != sorted(args.rates) or args.rates[0] <= 0:
        parser.error(f"--rates must rise from above 0, but are {' '.join(map(str, args.rates))}")
    if args.latency_limit < 0.2:
        parser.error(
            f"--latency-limit is {args.latency_limit}, but W4 is compared at 0.2 s/token: make it that or more"
        )
    if args.max_model_len < 2048:
        parser.error(f"--max-model-len is {args.max_model_len}, but the workloads need 2048")
    if args.plot and "W4" not in args.workloads:
        parser.error("--plot shows W4: add it to --workloads")
    if args.plot and (reason := why_not()):
        parser.error(f"--plot: {reason}")
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{flag}: the folder {path.parent} is not there; make it first")
    if not (args.model.expanduser() / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; name a Hugging Face folder (see bench/peers.md, Model)")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # So that what it has started ends too: what is paused would stay for ever.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
