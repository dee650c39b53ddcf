"""Hugging Face tensor names and the parameters of a module. The module tree carries the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxpaged.errors import ModelLoadError

# Buffers that older versions of transformers stored beside the parameters; they follow from the config.
_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias|attention\.rope\.freqs)|rope\.freqs")
_SHOWN = 4


def parameters(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Parameters of `module` by Hugging Face name, e.g. "model.layers.0.self_attn.q_proj.weight"."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable for path, variable in flat}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.0.b": x} -> {"a": {"0": {"b": x}}}: the tree of a checkpoint."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flattened(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], *, source: object
) -> None:
    """Check that what is stored (name -> shape) is what the model expects, and no more.

    An lm_head.weight beside tied embeddings is a copy that transformers ignores too.

    Raises:
        ModelLoadError: says how many tensors are missing, unexpected or of another shape, and names the first.
    """
    missing = [name for name in expected if name not in stored]
    unexpected = [
        name
        for name in sorted(stored)
        if name not in expected and name != "lm_head.weight" and not _BUFFERS.fullmatch(name)
    ]
    misshapen = [
        f"{name} {list(stored[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    problems = [
        f"{len(found)} {what} ({', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''})"
        for what, found in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if found
    ]
    if problems:
        raise ModelLoadError(
            f"the tensors of {source} do not fit its config: {'; '.join(problems)}. "
            "Check that config and weights belong to the same model"
        )
