"""Convert a Hugging Face folder or a GGUF file into an orbax checkpoint that jaxpaged restores directly."""

from __future__ import annotations

import argparse
import sys

import jax

from jaxpaged.errors import JaxpagedError
from jaxpaged.weights import convert, list_catalog

_EPILOG = f"""\
SRC is one of
  a folder with config.json and model.safetensors (one file, or parts with their index)
  a folder with config.json and pytorch_model*.bin (needs torch, for its safe loader)
  a GGUF file, plain or quantized (written out dequantized)
  a hub name such as Qwen/Qwen3-0.6B, or one of the catalog: {", ".join(list_catalog())}

DST is a new folder: an orbax checkpoint in weights/, with config and tokenizer beside it. It appears under
its name only when it is complete. Memory holds one tensor at a time, whatever the size of the model.

examples
  python tools/convert_hf.py ./Llama-3.2-1B ./llama-1b
  python tools/convert_hf.py model.Q8_0.gguf ./model-f32 --dtype float32
  python tools/convert_hf.py smollm2-135m-instruct ./smollm2 && jaxpaged serve ./smollm2
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src", metavar="SRC", help="the model to convert")
    parser.add_argument("dst", metavar="DST", help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the written weights; auto keeps the stored one, and takes bfloat16 for quantized ones (default)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is an earlier conversion")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    # No accelerator is needed, and JAX would reserve most of its memory.
    jax.config.update("jax_platforms", "cpu")
    try:
        path = convert(args.src, args.dst, dtype=args.dtype, overwrite=args.overwrite, progress=not args.quiet)
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
