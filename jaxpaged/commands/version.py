"""`jaxpaged version`: what is installed, for a report."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

from jaxpaged.commands.options import add_command


class VersionAction(argparse.Action):
    """`--version`, which looks the version up only when asked."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"jaxpaged {metadata.version('jaxpaged')}")
        parser.exit()


def add_parser(commands: Any) -> None:
    add_command(
        commands,
        "version",
        run,
        summary="print versions",
        description="Print the versions of jaxpaged and of what it stands on.",
        example="  jaxpaged version",
    )


def run(args: argparse.Namespace) -> int:
    for package in ("jaxpaged", "jax", "flax", "transformers"):
        print(f"{package} {metadata.version(package)}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    return 0
