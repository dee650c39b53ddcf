"""`jaxpaged convert`: Hugging Face or GGUF weights to an orbax checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from jaxpaged.commands.options import add_command


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "convert",
        run,
        summary="convert weights to a checkpoint that loads fast",
        description=(
            "Write a model's weights as an orbax checkpoint, with its config, tokenizer and chat template beside it.\n"
            "Tensors are converted one by one, and DST appears only when it is complete."
        ),
        example="  jaxpaged convert ./SmolLM2-135M-Instruct ./smollm2-bf16 --dtype bfloat16",
    )
    parser.add_argument(
        "src", metavar="SRC", help="a Hugging Face folder, a GGUF file, a name of the catalog or of the hub"
    )
    parser.add_argument("dst", metavar="DST", help="folder to write; must not exist, unless --overwrite")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: that of SRC, bfloat16 where it is quantized",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is an earlier conversion")


def run(args: argparse.Namespace) -> int:
    from jaxpaged.weights import convert

    convert(args.src, args.dst, dtype=args.dtype or "auto", overwrite=args.overwrite)
    return 0
