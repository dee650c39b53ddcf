"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, get_args

from jaxpaged.config import (
    DType,
    EngineConfig,
    KVCacheDType,
    LoadFormat,
    Policy,
    PreemptionMode,
    Quantization,
    parse_size,
)
from jaxpaged.errors import ConfigError

_COUNT = re.compile(r"(\d{1,18}(?:\.\d+)?)([kKmM]?)")
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}

MODEL_HELP = (
    "a folder (converted or Hugging Face), a GGUF file, a name of the catalog (see `jaxpaged pull`) or of the hub"
)

KV_CACHE_DTYPE_HELP = (
    "how keys and values are kept (default: auto, as they are computed). int8 and fp8 take one byte a value and four "
    "for the scale of a head, about half of bfloat16, so that nearly twice the tokens fit; answers change slightly, "
    "less with int8. On NVIDIA GPUs fp8 needs compute capability 8.9 or later (L4, H100); int8 runs everywhere"
)

QUANTIZATION_HELP = (
    "q8_0: weights in 8 bits; q4_0: in 4, the embedding and the head in 8. CPUs multiply them as they are: faster, and "
    "answers change slightly, with q4_0 more. none: all in dtype. Default: auto, what a GGUF file has in these formats "
    "is kept on CPUs with native kernels"
)


def count(text: str) -> int:
    """A whole number such as 2048, 2k (2,000) or 2K (2,048)."""
    match = _COUNT.fullmatch(text)
    value = float(match[1]) * _COUNT_UNITS[match[2]] if match else -1.0
    if value < 0 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 2048, 2k (2,000) or 2K (2,048)")
    return int(value)


def size(text: str) -> int:
    """Bytes, such as 4GiB, 512MiB or 1048576."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size_in_gib(text: str) -> int:
    """Bytes; a number without a unit counts GiB."""
    return size(f"{text}GiB" if text[-1:].isdigit() else text)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """A subcommand's parser, with an example below its help."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"Example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_engine_options(
    parser: argparse.ArgumentParser, *, max_num_seqs: str = "32 on a CPU, 256 on a GPU", warmup: bool = True
) -> None:
    """Flags of `EngineConfig`, spelled as vLLM spells them; one that is not given leaves the config's default.

    Args:
        max_num_seqs, warmup: defaults as the help names them.
    """
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    on_off = argparse.BooleanOptionalAction

    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--dtype", choices=get_args(DType), help="of weights, activations and KV (default: the model's own)", **unset)
    add(
        "--load-format",
        choices=get_args(LoadFormat),
        help="dummy: random weights, for measuring; MODEL may then be a config.json (default: auto)",
        **unset,
    )
    add("--quantization", "-q", choices=get_args(Quantization), help=QUANTIZATION_HELP, **unset)
    add(
        "--max-model-len",
        type=count,
        metavar="N",
        help="most tokens of a sequence, e.g. 4K (default: the model's)",
        **unset,
    )
    add("--seed", type=int, metavar="N", help="of requests that bring none (default: 0)", **unset)
    add("--trust-remote-code", action="store_true", help="run the tokenizer code that a model folder brings", **unset)

    memory = parser.add_argument_group("KV memory")
    add = memory.add_argument
    add("--block-size", type=int, metavar="N", help="tokens a block (default: 16)", **unset)
    add("--kv-cache-dtype", choices=get_args(KVCacheDType), help=KV_CACHE_DTYPE_HELP, **unset)
    add(
        "--kv-cache-memory-bytes",
        dest="kv_cache_memory",
        type=size,
        metavar="SIZE",
        help="of the KV pool, e.g. 4GiB (default: what is left on a GPU, 1GiB on a CPU)",
        **unset,
    )
    add("--num-gpu-blocks-override", dest="num_blocks", type=int, metavar="N", help="blocks of the KV pool", **unset)
    add("--gpu-memory-utilization", type=float, metavar="X", help="share of the GPU's memory (default: 0.92)", **unset)
    add("--swap-space", type=size_in_gib, metavar="GIB", help="host memory for preempted KV (default: 0)", **unset)
    add("--enable-prefix-caching", action=on_off, help="reuse the KV of equal prefixes (default: on)", **unset)

    schedule = parser.add_argument_group("scheduling")
    add = schedule.add_argument
    add("--max-num-seqs", type=int, metavar="N", help=f"most sequences at once (default: {max_num_seqs})", **unset)
    add(
        "--max-num-batched-tokens",
        type=count,
        metavar="N",
        help="most tokens a step (default: 256 on a CPU, 2048 on a GPU)",
        **unset,
    )
    add("--enable-chunked-prefill", action=on_off, help="split prompts over steps (default: on)", **unset)
    add(
        "--long-prefill-token-threshold",
        type=count,
        metavar="N",
        help="most tokens of one prompt a step (0: no limit)",
        **unset,
    )
    add("--scheduling-policy", choices=get_args(Policy), help="who goes first (default: fcfs)", **unset)
    add(
        "--preemption-mode",
        choices=get_args(PreemptionMode),
        help="what a preempted request does with its KV (default: swap where there is swap space, else recompute)",
        **unset,
    )
    add("--watermark", type=float, metavar="X", help="share of the pool kept free on admission (default: 0)", **unset)
    add(
        "--max-num-queued-reqs",
        dest="max_num_queued_requests",
        type=int,
        metavar="N",
        help="most requests waiting; more are refused (default: no limit)",
        **unset,
    )
    add(
        "--async-scheduling",
        action=on_off,
        help="launch each step before the results of the last one are known (default: on)",
        **unset,
    )
    add("--max-logprobs", type=int, metavar="N", help="most log-probabilities a token; -1: all (default: 20)", **unset)

    programs = parser.add_argument_group("compilation")
    add = programs.add_argument
    add(
        "--attention",
        choices=("native", "triton", "xla", "reference"),
        help="implementation of attention (default: by device)",
        **unset,
    )
    add(
        "--linear",
        choices=("native", "xla"),
        help="implementation of the products with weights (default: by device)",
        **unset,
    )
    add(
        "--compilation-cache-dir",
        dest="compilation_cache",
        metavar="DIR",
        help='where compiled programs are kept between starts; "" keeps none (default: your cache folder)',
        **unset,
    )
    add(
        "--warmup",
        action=on_off,
        help=f"compile at the start instead of on first use (default: {'on' if warmup else 'off'})",
        **unset,
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by their names in `EngineConfig`."""
    names = EngineConfig.__dataclass_fields__
    return {name: value for name, value in vars(args).items() if name in names}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags of `SamplingParams`; one that is not given leaves the model's own default."""
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=count, default=max_tokens, metavar="N", help=f"most new tokens (default: {max_tokens})")
    add(
        "--temperature",
        type=float,
        metavar="X",
        help="0 always takes the most probable token (default: the model's)",
        **unset,
    )
    add(
        "--top-p",
        type=float,
        metavar="X",
        help="smallest set of tokens with this probability (default: the model's)",
        **unset,
    )
    add("--top-k", type=int, metavar="N", help="only the N most probable tokens (default: the model's)", **unset)
    add("--min-p", type=float, metavar="X", help="drop tokens below this share of the best one's probability", **unset)
    add("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times", **unset)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, by their names in `SamplingParams`."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    return {name: value for name, value in vars(args).items() if name in names}
