"""The same workloads against jaxpaged and every other server or library that is installed, one after another.

    python bench/compare.py --model ~/smollm2-hf --workloads W1 W2 W3 --repeats 3 --json compare.json
    python bench/compare.py --model ~/smollm2-hf --workloads W4 --peers jaxpaged vllm --plot rates.png
    python bench/compare.py --list --model ~/smollm2-hf             who is installed, and how to install the others

Each contestant is started by itself (servers on a loopback port, libraries in a process that holds them), gets the same
lists of token ids, greedy, with as many output tokens as each request says, and is stopped; then the next. A repeat
goes through all of them before the next repeat begins. All read the same weights: the Hugging Face folder MODEL, or
what bench/peers.md converts it to. Servers are compared with `jaxpaged serve`, libraries with jaxpaged in process.

Workloads:
{workloads}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from peers.contestants import BY_NAME, CONTESTANTS, DTYPES, Contestant, Setup
from peers.plot import plot_rates
from peers.processes import OtherLoad, StartError
from peers.sessions import DriverSession, HTTPSession, driver_session, http_session
from peers.tables import Comparison, Run, markdown
from peers.workloads import WORKLOADS, Settings

DEFAULT_PEERS = Path("~/jaxpaged-peers")


def session_of(
    contestant: Contestant, setup: Setup, log: Path, time_limit_s: float
) -> AbstractContextManager[tuple[HTTPSession | DriverSession, float]]:
    command = contestant.command(setup)
    if contestant.is_server:
        return http_session(command, log)
    return driver_session(command, log, time_limit_s)


def measure(
    contestant: Contestant, setup: Setup, repeat: int, workloads: Sequence[str], settings: Settings, time_limit_s: float
) -> Run:
    """Starts it, measures, stops it. What goes wrong is in the run's `error`; what was measured before is kept."""
    run = Run(contestant.name, setup.dtype, repeat)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with session_of(contestant, setup, Path(folder) / "log.txt", time_limit_s) as (session, seconds):
                if not session.process.has_mapped(contestant.library):
                    raise session.process.failure(f"runs without {contestant.library}")
                run.first_token_s = seconds
                try:
                    for workload in workloads:
                        load = OtherLoad(session.process.session)
                        figures = WORKLOADS[workload].measure(session.run, settings)
                        run.results[workload] = figures | load.read()
                        say(f"    {workload} {_headline(workload, figures)}")
                finally:
                    run.peak_rss = session.process.peak_rss
        except StartError as error:
            run.error = str(error)
            say(f"    failed: {error}")
    return run


def _headline(workload: str, figures: dict[str, Any]) -> str:
    kind = WORKLOADS[workload]
    failed = f", {figures['failed']} requests failed" if figures["failed"] else ""
    return f"{figures[kind.figure]:.1f} {kind.heading}{failed}"


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


def versions(contestant: Contestant, setup: Setup) -> dict[str, str]:
    """Of its packages, as its own environment tells them."""
    if contestant.python is None or not contestant.packages:
        return {}
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    command = [str(contestant.python(setup)), "-c", script, *contestant.packages]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return dict(zip(contestant.packages, told, strict=False))


def environment(present: Sequence[tuple[Contestant, Setup]], args: argparse.Namespace) -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": names[0] if names else platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "versions": {contestant.name: versions(contestant, setup) for contestant, setup in present},
    }


def compare(args: argparse.Namespace) -> int:
    """Runs what `args` asks for and prints the tables. Returns the exit status: 1 for a failure."""
    contestants = [BY_NAME[name] for name in args.peers]
    present, skipped = [], []
    for setup in setups(args):
        for contestant in contestants:
            if reason := contestant.why_skipped(setup):
                skipped.append(f"{contestant.name} {setup.dtype}: {reason}")
            else:
                present.append((contestant, setup))
    if args.list:
        for contestant, setup in present:
            print(f"{contestant.name} {setup.dtype}: installed {versions(contestant, setup) or ''}".rstrip())
    for line in skipped:
        print(f"skipped {line}", file=sys.stdout if args.list else sys.stderr)
    if args.list:
        return 0
    if not present:
        return 1
    settings = Settings(args.seed, args.max_model_len, args.rate_seconds, args.small)
    facts = environment(present, args) | {"skipped": skipped}
    runs: list[Run] = []
    for repeat in range(args.repeats):
        for contestant, setup in present:
            say(f"{contestant.name} {setup.dtype}, repeat {repeat + 1} of {args.repeats}")
            runs.append(measure(contestant, setup, repeat, args.workloads, settings, args.time_limit))
            if args.json:  # each time: a run of hours that is cut short leaves what it has
                args.json.write_text(json.dumps(facts | {"runs": [r.as_json() for r in runs]}, indent=1))
    comparison = Comparison(runs, args.repeats)
    print(markdown(comparison, args.workloads))
    if disturbances := comparison.disturbances():
        print(f"\nOther programs took processors from {', '.join(disturbances)}: measure again on an idle machine.")
    for line in (*comparison.errors(), *(f"skipped {line}" for line in skipped)):
        print(f"\n{line}")
    if args.plot:
        plot_rates(runs, args.plot)
    return 1 if comparison.errors() else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    add("--rate-seconds", type=float, default=60.0, metavar="S", help="of arrivals at each rate of W4 (default: 60)")
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
    if args.repeats < 1 or args.rate_seconds <= 0 or args.time_limit <= 0:
        parser.error("--repeats, --rate-seconds and --time-limit must be above 0")
    if args.max_model_len < 2048:
        parser.error(f"--max-model-len is {args.max_model_len}, but the workloads need 2048")
    if args.plot and "W4" not in args.workloads:
        parser.error("--plot shows W4: add it to --workloads")
    if not (args.model.expanduser() / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; name a Hugging Face folder (see bench/peers.md, Model)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # So that what it has started is stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
