"""From a model's files to a module in memory, and to what else an engine needs of them.

What reads GGUF is imported where a GGUF file is read: all else works without the `gguf` package. So is orbax, which
takes long to import, where a converted checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpaged.config import ModelConfig, Quantization
from jaxpaged.errors import ModelLoadError
from jaxpaged.models.config import model_config_from_hf
from jaxpaged.models.registry import get_model_class
from jaxpaged.weights.files import WEIGHTS, ModelFiles, read_json, resolve
from jaxpaged.weights.generation import GenerationConfig, generation_config
from jaxpaged.weights.marker import Marker
from jaxpaged.weights.names import check_tensors, parameters
from jaxpaged.weights.pytorch_reader import PytorchReader
from jaxpaged.weights.quantization import formats_to_load, log_formats, matrices, quantize_model, set_packed
from jaxpaged.weights.reader import TensorReader, dtype_of, stored_dtype, stored_shapes
from jaxpaged.weights.safetensors_reader import SafetensorsReader
from jaxpaged.weights.tokenizer import check_vocabulary, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# One for every parameter, or by Hugging Face name; None is the default device.
Shardings = jax.sharding.Sharding | Callable[[str], jax.sharding.Sharding] | None

# Far above any model: layers are built one by one, so a forged count must be refused before.
_MAX_LAYERS = 1000


def load_model(
    model: str | Path | ModelFiles,
    *,
    dtype: str = "auto",
    quantization: Quantization = "none",
    sharding: Shardings = None,
) -> nnx.Module:
    """A model as a Flax nnx module, ready to call.

    Tensors go one by one into their dtype, format and place, so that host memory holds one of them at a time. (The
    dense ones of a converted folder are there all at once, before they are quantized.)

    Args:
        model: a converted folder, a Hugging Face folder, a GGUF file, a hub name or a catalog name.
        dtype: "float32", "bfloat16" or "float16"; "auto" is the stored one, for quantized weights bfloat16.
        quantization: "q8_0" or "q4_0" (see `quantize_model`), rounded from what is stored, in float32; "auto" and what
            becomes of quantized files: see `EngineConfig`. A GGUF file's own q8_0 and q4_0 blocks are kept exactly,
            unless "q4_0" asks for fewer bits. What it has in other types is off by up to 0.4 % of the largest value of
            each block when it becomes q8_0. Such weights have no gradients.
        sharding: where parameters go: one sharding for all, or a function of the parameter's name.

    Raises:
        ModelLoadError: files that are missing, damaged, not supported or that do not fit their config.
    """
    files = resolve(model)
    config = load_config(files)
    name = config.dtype if dtype == "auto" else dtype_of(dtype).name
    module = abstract_model(config, name)
    variables = parameters(module)
    expected = {key: variable.shape for key, variable in variables.items()}
    place = placement(sharding)
    if files.kind == "converted":
        from jaxpaged.weights.checkpoint import restore

        check_tensors(expected, Marker.read(files.path).parameters, source=files.path)
        for key, array in restore(files.path / WEIGHTS, expected, dtype_of(name), place).items():
            variables[key].set_value(array)
        return module if quantization == "auto" or quantization == "none" else quantize_model(module, quantization)
    reader = open_reader(files)
    check_tensors(expected, stored_shapes(reader), source=files.path)
    formats, found = formats_to_load(module, reader, quantization), matrices(module)
    for key, variable in variables.items():
        if key in formats:
            set_packed(found[key], reader.read_packed(key, formats[key]), formats[key], place(key))
        else:
            variable.set_value(jax.device_put(reader.read(key, dtype_of(name)), place(key)))
    if formats:
        log_formats(found)
    return module


def load_config(model: str | Path | ModelFiles) -> ModelConfig:
    """Shape of a model; `dtype` is the one that most of its weights are stored in (quantized ones: bfloat16).

    Raises:
        ModelLoadError: see `load_model`.
    """
    files = resolve(model)
    hf = read_hf_config(files)
    depth = hf.get("num_hidden_layers")
    if isinstance(depth, int) and depth > _MAX_LAYERS:
        raise ModelLoadError(f"{files.path}: num_hidden_layers is {depth}, but at most {_MAX_LAYERS} can be loaded")
    config = model_config_from_hf(hf, str(files.path))
    if files.kind == "hf":
        return replace(config, dtype=stored_dtype(open_reader(files)))
    if files.kind == "converted":
        return replace(config, dtype=Marker.read(files.path).dtype)
    return config


def load_generation_config(model: str | Path | ModelFiles) -> GenerationConfig:
    """Sampling defaults and ending ids of a model.

    Raises:
        ModelLoadError: a file that is damaged or holds a value of the wrong type.
    """
    files = resolve(model)
    if files.kind == "gguf":
        from jaxpaged.weights.gguf_config import eos_token_ids, hf_config
        from jaxpaged.weights.gguf_file import GGUFFile

        file = GGUFFile.open(files.path)
        config = {"eos_token_id": list(eos_token_ids(file)), "bos_token_id": hf_config(file)["bos_token_id"]}
        return generation_config({}, config, files.path)
    path = files.folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    return generation_config(generation, read_hf_config(files), files.path)


def load_tokenizer(model: str | Path | ModelFiles, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """Tokenizer of a model, chat template attached.

    Args:
        trust_remote_code: run the tokenizer code that the model's folder brings, if it brings any.

    Raises:
        ModelLoadError: none there, a damaged one, or one with ids that the model has no embedding for.
    """
    files = resolve(model)
    tokenizer = read_tokenizer(files, trust_remote_code=trust_remote_code)
    check_vocabulary(tokenizer, load_config(files).vocab_size, files.path)
    return tokenizer


def abstract_model(config: ModelConfig, dtype: str) -> nnx.Module:
    """The module of `config` with `jax.ShapeDtypeStruct` in the place of its arrays."""
    return get_model_class(config.architecture)(config, dtype=dtype_of(dtype), rngs=None)


def placement(sharding: Shardings) -> Callable[[str], jax.sharding.Sharding]:
    """Where each parameter goes, by its name."""
    return sharding if callable(sharding) else lambda _: sharding or jax.device_put(0).sharding


def open_reader(files: ModelFiles) -> TensorReader:
    """The stored tensors of a Hugging Face folder or GGUF file."""
    if files.kind == "gguf":
        from jaxpaged.weights.gguf_reader import GGUFReader

        return GGUFReader(files.path)
    if any(files.path.glob("*.safetensors")):
        return SafetensorsReader(files.path)
    return PytorchReader(files.path)


def read_hf_config(files: ModelFiles) -> dict[str, Any]:
    """config.json of `files`; for GGUF the equivalent of its metadata."""
    if files.kind == "gguf":
        from jaxpaged.weights.gguf_config import hf_config
        from jaxpaged.weights.gguf_file import GGUFFile

        return hf_config(GGUFFile.open(files.path))
    return read_json(files.path if files.kind == "config" else files.path / "config.json")
