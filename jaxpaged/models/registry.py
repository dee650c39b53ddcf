"""Which model class serves which architecture."""

from __future__ import annotations

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.decoder import DecoderForCausalLM
from jaxpaged.models.llama import LlamaForCausalLM
from jaxpaged.models.mistral import MistralForCausalLM
from jaxpaged.models.qwen2 import Qwen2ForCausalLM
from jaxpaged.models.qwen3 import Qwen3ForCausalLM

_CLASSES: dict[str, type[DecoderForCausalLM]] = {
    cls.__name__: cls for cls in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}

SUPPORTED: tuple[str, ...] = tuple(_CLASSES)
"""Names of the supported architectures, as config.json spells them."""


def get_model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class of an `architectures` entry of config.json.

    Raises:
        ModelLoadError: not supported; the message lists what is.
    """
    if architecture not in _CLASSES:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED)}")
    return _CLASSES[architecture]
