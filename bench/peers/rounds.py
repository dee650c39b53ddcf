"""Contestants side by side: each is started once, and only the one that is measured runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.contestants import Contestant, Setup, pinned
from peers.processes import OtherLoad, StartError
from peers.sessions import DriverSession, HTTPSession, driver_session, http_session
from peers.tables import Run
from peers.workloads import WORKLOADS, Settings

AnySession = HTTPSession | DriverSession


@dataclass
class Entrant:
    """A contestant that runs, paused while others are measured."""

    contestant: Contestant
    setup: Setup
    session: AnySession
    first_token_s: float

    @contextmanager
    def awake(self) -> Iterator[AnySession]:
        self.session.process.resume()
        try:
            yield self.session
        finally:
            self.session.process.pause()


def session_of(
    contestant: Contestant, setup: Setup, log: Path, time_limit_s: float
) -> AbstractContextManager[tuple[AnySession, float]]:
    command = pinned(contestant.command(setup), setup.processors)
    if contestant.is_server:
        return http_session(command, log)
    return driver_session(command, log, time_limit_s)


def run_rounds(
    contestants: Sequence[Contestant],
    setup: Setup,
    workloads: Sequence[str],
    repeats: int,
    settings: Settings,
    *,
    time_limit_s: float,
    logs: Path,
    runs: list[Run],
    save: Callable[[], None],
) -> None:
    """Starts all, one after the other, then measures repeat by repeat, workload by workload, contestant by contestant.

    Each repeat begins with another contestant. What a contestant can't do is in the `error` of its run, and it is left
    out from then on.

    Args:
        logs: a folder for what they print.
        runs: gets one for each contestant and repeat, as soon as it begins.
        save: called whenever `runs` holds a new figure.
    """
    with ExitStack() as stack:
        entrants = []
        for contestant in contestants:
            say(f"{contestant.name} {setup.dtype} starts")
            run = Run(contestant.name, setup.dtype, 0)
            runs.append(run)
            try:
                log = logs / f"{contestant.name}-{setup.dtype}.log"
                session, seconds = stack.enter_context(session_of(contestant, setup, log, time_limit_s))
                if not session.process.has_mapped(contestant.library):
                    session.process.stop()
                    raise session.process.failure(f"runs without {contestant.library}")
                session.process.pause()
                run.first_token_s = seconds
                entrants.append(Entrant(contestant, setup, session, seconds))
            except StartError as error:
                _note(run, error)
            save()
        for repeat in range(repeats):
            first = repeat % len(entrants) if entrants else 0
            order = [*entrants[first:], *entrants[:first]]
            for workload in workloads:
                for entrant in order:
                    run = _run_of(runs, entrant, repeat)
                    if not run.error:
                        say(f"{workload}, repeat {repeat + 1} of {repeats}: {run.contestant} {run.dtype}")
                        measure(entrant, run, workload, replace(settings, repeat=repeat))
                        save()
            entrants = [entrant for entrant in entrants if not _run_of(runs, entrant, repeat).error]


def _run_of(runs: list[Run], entrant: Entrant, repeat: int) -> Run:
    for run in runs:
        if (run.contestant, run.dtype, run.repeat) == (entrant.contestant.name, entrant.setup.dtype, repeat):
            return run
    runs.append(Run(entrant.contestant.name, entrant.setup.dtype, repeat))
    return runs[-1]


def measure(entrant: Entrant, run: Run, workload: str, settings: Settings) -> None:
    """Adds the figures of one workload to `run`, or its `error`."""
    try:
        with entrant.awake() as session:
            load = OtherLoad(session.process.session)
            figures = WORKLOADS[workload].measure(session.run, settings)
            run.results[workload] = figures | load.read()
            run.peak_rss = session.process.peak_rss
        say(f"    {_headline(workload, figures)}")
    except StartError as error:
        _note(run, error)


def _note(run: Run, error: StartError) -> None:
    run.error = str(error)
    say(f"    failed: {error}")


def _headline(workload: str, figures: dict[str, Any]) -> str:
    kind = WORKLOADS[workload]
    failed = f", {figures['failed']} requests failed: {figures['errors'][0]}" if figures["failed"] else ""
    return f"{figures[kind.figure]:.2f} {kind.heading}{failed}"


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
