"""`jaxpaged generate`: complete one text, streaming."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from jaxpaged.commands.options import (
    MODEL_HELP,
    add_command,
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from jaxpaged.commands.trace import add_trace_options, trace_file
from jaxpaged.errors import ConfigError, JaxpagedError


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "generate",
        run,
        summary="complete a text",
        description="Complete a text and print what comes, as it comes. No chat template is applied.",
        example=(
            '  jaxpaged generate smollm2-135m-instruct "The capital of France is" --temperature 0\n'
            "  cat story.txt | jaxpaged generate smollm2-135m-instruct --max-tokens 200"
        ),
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to complete (default: standard input)")
    add_sampling_options(parser, max_tokens=128)
    add_trace_options(parser)
    add_engine_options(parser, max_num_seqs="1", warmup=False)
    parser.set_defaults(max_num_seqs=1, warmup=False)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if not prompt:
        raise ConfigError("the prompt is empty; give PROMPT, or text on standard input")

    from jaxpaged.llm import LLM

    with (
        trace_file(args.trace, args.trace_limit) as file,
        LLM(args.model, **engine_options(args)) as llm,
        llm.recording(file),
    ):
        params = replace(llm.get_default_sampling_params(), **sampling_options(args))
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
            if output.error is not None:
                raise JaxpagedError(output.error)
    print()
    return 0
