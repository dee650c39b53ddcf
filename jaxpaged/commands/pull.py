"""`jaxpaged pull`: fetch a model once, ahead of its first use."""

from __future__ import annotations

import argparse
from typing import Any

from jaxpaged.commands.options import add_command


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "pull",
        run,
        summary="fetch a model of the catalog or the hub",
        description="Fetch a model into your cache folder and print where it is. Without a name: list the catalog.",
        example="  jaxpaged pull smollm2-135m-instruct",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name of the catalog, or owner/name on the hub")


def run(args: argparse.Namespace) -> int:
    from jaxpaged.weights import list_catalog, resolve

    if args.name is None:
        for name, description in list_catalog().items():
            print(f"{name}  {description}")
    else:
        print(resolve(args.name).path)
    return 0
