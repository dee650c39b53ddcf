"""`jaxpaged trace`: run some prompts and record what each step does to the KV memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.commands.options import (
    MODEL_HELP,
    add_command,
    add_engine_options,
    add_sampling_options,
    count,
    engine_options,
    sampling_options,
    size,
)
from jaxpaged.config import MIB
from jaxpaged.errors import ConfigError, JaxpagedError

if TYPE_CHECKING:
    from jaxpaged.trace import TraceFile

_SYSTEM = (
    "You are a patient teacher of computer architecture. You answer in short sentences, you give one example for "
    "each idea, and you say so when you do not know. The student asks: "
)
_QUESTIONS = (
    "What is virtual memory?",
    "Why does an operating system cut memory into pages of one size?",
    "What is internal fragmentation, and what is external fragmentation?",
    "How does copy-on-write make fork cheap?",
    "When is it better to swap a page out than to compute its content again?",
    "What does a page table hold?",
    "Why are caches small?",
    "What does least recently used mean?",
)


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "trace",
        run,
        summary="record what steps do to the KV memory",
        description=(
            "Complete prompts together, and record the scheduler's steps: block tables, sharing, queue, preemptions.\n"
            "Without prompts it takes eight questions behind one common text. `jaxpaged view` shows the result."
        ),
        example=(
            "  jaxpaged trace smollm2-135m-instruct -o steps.jsonl\n"
            "  jaxpaged trace smollm2-135m-instruct --prompts questions.txt --n 2 --num-gpu-blocks-override 60\n"
            "  jaxpaged view steps.jsonl"
        ),
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: eight questions)")
    parser.add_argument("-o", "--out", default="trace.jsonl", metavar="FILE", help="(default: trace.jsonl)")
    parser.add_argument("--n", type=count, default=1, metavar="N", help="outputs of each prompt (default: 1)")
    _add_limit(parser)
    add_sampling_options(parser, max_tokens=48)
    add_engine_options(parser, warmup=False)
    parser.set_defaults(warmup=False)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """--trace and its limit, for commands that run an engine; `trace_file` takes them up."""
    parser.add_argument(
        "--trace", metavar="FILE", help="record every step's use of KV memory there; see `jaxpaged view`"
    )
    _add_limit(parser)


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace-limit",
        type=size,
        default=64 * MIB,
        metavar="SIZE",
        help="the trace ends when it has this size (default: 64MiB)",
    )


@contextmanager
def trace_file(path: str | None, limit: int) -> Iterator[TraceFile | None]:
    """The file that --trace asks for, opened before anything slow begins; None where it asks for none.

    Raises:
        TraceError: it cannot be written.
    """
    if path is None:
        yield None
        return
    from jaxpaged.trace import TraceFile

    with TraceFile(path, max_bytes=limit) as file:
        yield file


def run(args: argparse.Namespace) -> int:
    batches = _own_questions() if args.prompts is None else [_read(args.prompts)]
    with trace_file(args.out, args.trace_limit) as file:
        from jaxpaged.llm import LLM

        with LLM(args.model, **engine_options(args)) as llm, llm.recording(file):
            params = replace(llm.get_default_sampling_params(), n=args.n, **sampling_options(args))
            outputs = [output for prompts in batches for output in llm.generate(prompts, params)]
    error = next((output.error for output in outputs if output.error is not None), None)
    if error is not None:
        raise JaxpagedError(error)
    print(f"{args.out}: show it with `jaxpaged view {args.out}`")
    return 0


def _own_questions() -> list[list[str]]:
    """One goes first, alone: what all have in common is in the prefix cache when the others come."""
    prompts = [f"{_SYSTEM}{question}\nAnswer:" for question in _QUESTIONS]
    return [prompts[:1], prompts[1:]]


def _read(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts {path}: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts; write one a line")
    return prompts
