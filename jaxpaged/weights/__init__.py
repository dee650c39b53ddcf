"""Models on disk: finding, reading, converting and loading them."""

from jaxpaged.weights.catalog import list_catalog, pull
from jaxpaged.weights.convert import convert
from jaxpaged.weights.dummy import dummy_model
from jaxpaged.weights.files import ModelFiles, resolve
from jaxpaged.weights.generation import GenerationConfig
from jaxpaged.weights.loader import load_config, load_generation_config, load_model, load_tokenizer
from jaxpaged.weights.quantization import quantize_model
from jaxpaged.weights.tokenizer import has_tokenizer

__all__ = [
    "GenerationConfig",
    "ModelFiles",
    "convert",
    "dummy_model",
    "has_tokenizer",
    "list_catalog",
    "load_config",
    "load_generation_config",
    "load_model",
    "load_tokenizer",
    "pull",
    "quantize_model",
    "resolve",
]
