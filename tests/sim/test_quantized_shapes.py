"""Bytes of quantized weights against those of models that are quantized."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx
from support import random_model, tiny_config

from jaxpaged.sim import ModelShape
from jaxpaged.weights import quantize_model


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "qk_norm": True}, {"intermediate_size": 48}])
def test_bytes_of_weights(format: Any, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model = quantize_model(random_model(config), format)
    shape = ModelShape.of(config, dtype="float32", quantization=format)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert shape.weights_bytes == stored
    embedding = 0 if config.tie_word_embeddings else model.model.embed_tokens.weight[...].nbytes
    norms = (4 * 32 + 32 + (4 * 8 if config.qk_norm else 0)) * 4
    assert shape.step_weights_bytes == stored - embedding - norms
