"""What quantized weights cost in accuracy: distance of a model's predictions to those of its own float32 weights.

    python bench/quantization.py smollm2-135m-instruct [--formats q8_0 q4_0] [--text FILE] [--tokens 384] [--json FILE]

Each predicts every token of a text. Distances are mean Kullback-Leibler divergences a token, in nats:

    weights      float32 activations, and weights that were rounded and are multiplied in float32: what the format costs
    activations  as they are served, against the row above: what rounding the activations costs
    both         as they are served, against the float32 weights that came in
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxpaged import load_model
from jaxpaged.models.attention import DenseAttention
from jaxpaged.models.products import Products
from jaxpaged.weights import load_tokenizer
from jaxpaged_kernels import native
from jaxpaged_kernels.quantized import WEIGHT_FORMATS, WeightFormat

DEFAULT_TEXT = Path(__file__).parents[1] / "README.md"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """Nats a token; `same_best` is the share of positions where the likeliest token is that of the float32 weights."""

    format: str
    weights: float
    activations: float
    both: float
    same_best: float
    perplexity: float


def log_probabilities(model: nnx.Module, token_ids: npt.NDArray[np.int32], implementation: str) -> FloatArray:
    """Of the token after each of `token_ids` [T], as [T, V]."""
    how = Products(None, implementation)
    graphdef, state = nnx.split(model)
    length = len(token_ids)

    @jax.jit
    def predict(state: nnx.State, token_ids: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        positions = jnp.arange(length, dtype=jnp.int32)
        hidden = model.hidden_states(token_ids, positions, DenseAttention(1, length), how)
        return jax.nn.log_softmax(model.logits(hidden, how))

    return np.asarray(predict(state, token_ids), np.float64)


def divergence(reference: FloatArray, other: FloatArray) -> float:
    """Mean over positions of KL(reference || other), in nats."""
    return float((np.exp(reference) * (reference - other)).sum(-1).mean())


def measure(model: str, token_ids: npt.NDArray[np.int32], formats: list[WeightFormat]) -> list[Distance]:
    """Of the float32 weights themselves, then of each format, on `token_ids` [T]."""
    reference = log_probabilities(load_model(model, dtype="float32"), token_ids, "xla")
    following = np.arange(len(token_ids) - 1), token_ids[1:]
    distances = []
    for name in formats:
        quantized = load_model(model, dtype="float32", quantization=name)
        rounded = log_probabilities(quantized, token_ids, "xla")
        served = log_probabilities(quantized, token_ids, "native")
        distances.append(
            Distance(
                name,
                divergence(reference, rounded),
                divergence(rounded, served),
                divergence(reference, served),
                float((reference.argmax(-1) == served.argmax(-1)).mean()),
                float(np.exp(-served[following].mean())),
            )
        )
    dense = float(np.exp(-reference[following].mean()))
    return [Distance("float32", 0.0, 0.0, 0.0, 1.0, dense), *distances]


def print_table(distances: list[Distance]) -> None:
    table = Table("format", "weights", "activations", "both", "same best token", "perplexity")
    for d in distances:
        divergences = (f"{value:.4f}" for value in (d.weights, d.activations, d.both))
        table.add_row(d.format, *divergences, f"{d.same_best:.1%}", f"{d.perplexity:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="dense weights, as for `jaxpaged serve`")
    parser.add_argument("--formats", nargs="+", choices=WEIGHT_FORMATS, default=list(WEIGHT_FORMATS))
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE", help="default: the README")
    parser.add_argument("--tokens", type=int, default=384, help="of the text, from its start")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if (reason := native.why_unavailable()) is not None:
        parser.error(reason)
    token_ids = np.array(load_tokenizer(args.model)(args.text.read_text(encoding="utf-8"))["input_ids"], np.int32)
    if not 2 <= args.tokens <= len(token_ids):
        parser.error(f"--tokens is {args.tokens}; {args.text} has {len(token_ids)}, and 2 is the least")
    distances = measure(args.model, token_ids[: args.tokens], args.formats)
    print_table(distances)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(d) for d in distances], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
