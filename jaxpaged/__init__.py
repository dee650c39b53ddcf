"""jaxpaged: LLM serving for JAX with paged KV memory.

The names below are imported when first used, so that `import jaxpaged` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.beam_search import BeamSearchParams
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.async_engine import AsyncEngine
    from jaxpaged.llm import LLM
    from jaxpaged.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
    from jaxpaged.pooling import PoolingParams
    from jaxpaged.request import SamplingParams
    from jaxpaged.structured_outputs import StructuredOutputs
    from jaxpaged.weights import load_model

    __version__: str

_HOMES = {
    "LLM": "jaxpaged.llm",
    "AsyncEngine": "jaxpaged.engine.async_engine",
    "BeamSearchParams": "jaxpaged.beam_search",
    "CompletionOutput": "jaxpaged.outputs",
    "EmbeddingRequestOutput": "jaxpaged.outputs",
    "EngineConfig": "jaxpaged.config",
    "PoolingParams": "jaxpaged.pooling",
    "RequestOutput": "jaxpaged.outputs",
    "SamplingParams": "jaxpaged.request",
    "StructuredOutputs": "jaxpaged.structured_outputs",
    "load_model": "jaxpaged.weights",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("jaxpaged")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
