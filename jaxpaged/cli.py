"""The `jaxpaged` command. Each subcommand is one module of `jaxpaged.commands`; none imports JAX before it must."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxpaged.commands import chat, convert, generate, plan, pull, serve, simulate, trace, version, view
from jaxpaged.errors import ConfigError, InvalidRequestError, JaxpagedError

_COMMANDS = (serve, generate, chat, pull, convert, plan, simulate, trace, view, version)

_EPILOG = """\
Start here:
  jaxpaged chat smollm2-135m-instruct      talk to a small model (94 MiB, fetched once)
  jaxpaged serve smollm2-135m-instruct     answer OpenAI clients at http://127.0.0.1:8000/v1

`jaxpaged COMMAND --help` explains each command with an example."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage of `serve` alone fills a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxpaged",
        description="LLM serving for JAX with paged KV memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=version.VersionAction)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit status: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does; nothing can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except JaxpagedError as error:
        print(f"jaxpaged: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InvalidRequestError)) else 1


if __name__ == "__main__":
    sys.exit(main())
