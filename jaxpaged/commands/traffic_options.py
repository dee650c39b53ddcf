"""Options of traffic and step times that `simulate` and `plan` share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from jaxpaged.commands.options import count
from jaxpaged.errors import ConfigError
from jaxpaged.sim import (
    DATASETS,
    Constants,
    Dataset,
    Device,
    LogNormal,
    Traffic,
    bursts,
    find_device,
    poisson,
    read_calibration,
    read_trace,
)
from jaxpaged.sim.lengths import Fixed, Lengths, read_dataset

_MEANS = re.compile(r"(lognormal|fixed):(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)")
_SIGMA = 0.8


def add_traffic_options(parser: argparse.ArgumentParser) -> None:
    """--rate or --trace, and what goes with them."""
    group = parser.add_argument_group("traffic and step times")
    add = group.add_argument
    add("--rate", type=float, metavar="X", help="requests a second, arriving at random (Poisson)")
    add("--trace", type=Path, metavar="FILE", help='JSON lines: {"arrival": s, "prompt_tokens": n, "output_tokens": n}')
    add("--duration", type=float, default=600.0, metavar="S", help="seconds of traffic (default: 600)")
    add("--burst", type=count, default=1, metavar="N", help="with --rate: arrivals come N at a time (default: 1)")
    add(
        "--lengths-of",
        metavar="WHICH",
        help=(
            f"of prompts and outputs, with --rate: {', '.join(DATASETS)}, lognormal:MEAN,MEAN (sigma {_SIGMA}), "
            "fixed:N,N or a JSON file of histograms (default: sharegpt, lognormal; of plan: --prompt and --output)"
        ),
    )
    add("--device", metavar="NAME", help="of the catalog, such as h200 or 4xa100-40gb")
    add("--calibration", type=Path, metavar="FILE", help="measured steps of a device, instead of --device")
    add("--seed", type=int, default=0, metavar="N", help="of the traffic (default: 0)")


def find_dataset(text: str) -> Dataset:
    """What --lengths-of names.

    Raises:
        ConfigError: neither a known name nor a file.
    """
    if text in DATASETS:
        return DATASETS[text]
    match = _MEANS.fullmatch(text)
    if match is not None:
        kind, prompt, output = match[1], float(match[2]), float(match[3])
        parts: tuple[Lengths, Lengths]
        if kind == "fixed":
            parts = Fixed(int(prompt)), Fixed(int(output))
        else:
            parts = LogNormal(prompt, _SIGMA), LogNormal(output, _SIGMA)
        return Dataset(*parts)
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"--lengths-of is {text!r}, which is no file and none of {', '.join(DATASETS)}, lognormal:MEAN,MEAN and "
            "fixed:N,N"
        )
    return read_dataset(path)


def make_traffic(args: argparse.Namespace, max_model_len: int, dataset: Dataset | None = None) -> Traffic:
    """The traffic that the options describe; `dataset` goes before --lengths-of."""
    if args.trace is not None:
        return read_trace(args.trace)
    dataset = dataset or find_dataset(args.lengths_of or "sharegpt")
    if args.burst > 1:
        return bursts(dataset, args.rate, args.duration, size=args.burst, seed=args.seed, max_model_len=max_model_len)
    return poisson(dataset, args.rate, args.duration, seed=args.seed, max_model_len=max_model_len)


def find_speed(args: argparse.Namespace) -> tuple[Device, Constants]:
    """The device of --device, with assumed constants; or that of --calibration, with constants fitted to its steps.

    Raises:
        ConfigError: neither is given, or they are of two devices.
    """
    if args.calibration is None:
        if args.device is None:
            raise ConfigError("--rate and --trace need --device (or --calibration), for the time that steps take")
        return find_device(args.device), Constants()
    calibration = read_calibration(args.calibration)
    if args.device is not None and find_device(args.device) != calibration.device:
        raise ConfigError(
            f"{args.calibration} was measured on {calibration.device}, but --device is {args.device}; leave out one"
        )
    return calibration.device, calibration.constants()
