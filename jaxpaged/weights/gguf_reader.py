"""GGUF tensors under their Hugging Face names, as they are or dequantized a group of rows at a time."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.gguf_file import GGUFFile, GGUFTensor
from jaxpaged.weights.reader import DTYPES, cast
from jaxpaged_kernels import pack_blocks, quantize_weight
from jaxpaged_kernels.quantized import BLOCK_INPUTS, WeightFormat

# Values dequantized at once: bounds the float32 temporaries whatever the size of the tensor.
_CHUNK_VALUES = 4 << 20
_PLAIN = {
    gguf.GGMLQuantizationType.F32: DTYPES["float32"],
    gguf.GGMLQuantizationType.F16: DTYPES["float16"],
    gguf.GGMLQuantizationType.BF16: DTYPES["bfloat16"],
}
# Q8_0 and Q4_0 begin each block with its scale.
_SCALE_BYTES = 2
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
# Holds the rope scaling of Llama 3, which `gguf_config` turns into the config's own form.
ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; a name that is not known stays as it is."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        return name
    prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{prefix}{_NAMES[match['part']]}.{match['kind']}"


class GGUFReader:
    """Tensors of a GGUF file as a `TensorReader`."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile.open(path)
        self._gguf_names = {hf_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}
        self._interleaved = self._file.metadata.get("general.architecture") == "llama"

    def names(self) -> list[str]:
        return list(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        return _PLAIN.get(self._tensor(name).type, DTYPES["bfloat16"])

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        return self._halves_together(name, read_tensor(self._file, self._gguf_names[name], dtype or self.dtype(name)))

    def quantized_as(self, name: str) -> str | None:
        kind = self._tensor(name).type
        return None if kind in _PLAIN else kind.name.lower()

    def read_packed(self, name: str, format: WeightFormat) -> np.ndarray:
        if self.quantized_as(name) != format:
            return quantize_weight(
                self.read(name, None if self.quantized_as(name) is None else DTYPES["float32"]), format
            )
        num_outputs, size = self.shape(name)
        raw = read_bytes(self._file, self._gguf_names[name]).reshape(num_outputs, size // BLOCK_INPUTS, -1)
        blocks = self._halves_together(name, raw)
        scales = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view(np.float16)[..., 0]
        return pack_blocks(scales, blocks[..., _SCALE_BYTES:], format)

    def _halves_together(self, name: str, array: np.ndarray) -> np.ndarray:
        """Undo the reordering of rows of q and k that llama.cpp's rotary embedding wants for the architecture "llama".

        A head's rows lie there as (0, D/2, 1, D/2 + 1, ...); Hugging Face has (0, 1, ..., D - 1).
        """
        match = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if match is None or not self._interleaved:
            return array
        key = "llama.attention.head_count" + ("" if match[1] == "q" else "_kv")
        metadata = self._file.metadata
        heads = metadata.get(key, metadata.get("llama.attention.head_count"))
        if not isinstance(heads, int) or heads < 1 or array.shape[0] % (2 * heads):
            raise ModelLoadError(f"{self._file.path}: {heads!r} heads do not fit {name!r} of shape {array.shape}")
        rest = array.shape[1:]
        paired = array.reshape(heads, array.shape[0] // heads // 2, 2, *rest)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(array.shape)

    def _tensor(self, name: str) -> GGUFTensor:
        return self._file.tensors[self._gguf_names[name]]


def read_tensor(file: GGUFFile, gguf_name: str, dtype: np.dtype) -> np.ndarray:
    """One tensor in `dtype`.

    Raises:
        ModelLoadError: a quantization that the gguf package cannot undo, or a file that got shorter.
    """
    tensor = file.tensors[gguf_name]
    out = np.empty(tensor.shape, dtype)
    rows = out.reshape(-1, tensor.shape[-1])
    row_bytes = tensor.num_bytes // max(len(rows), 1)
    step = max(1, _CHUNK_VALUES // max(tensor.shape[-1], 1))
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            raw = np.fromfile(stream, np.uint8, count=len(part) * row_bytes)
            if raw.size < len(part) * row_bytes:
                raise ModelLoadError(f"{file.path} ends within tensor {gguf_name!r}; download it again")
            part[...] = cast(_decode(file, gguf_name, raw.reshape(len(part), row_bytes)), dtype)
    return out


def read_bytes(file: GGUFFile, gguf_name: str) -> np.ndarray:
    """The bytes of one tensor as they are stored.

    Raises:
        ModelLoadError: a file that got shorter.
    """
    tensor = file.tensors[gguf_name]
    raw = np.fromfile(file.path, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    if raw.size < tensor.num_bytes:
        raise ModelLoadError(f"{file.path} ends within tensor {gguf_name!r}; download it again")
    return raw


def _decode(file: GGUFFile, gguf_name: str, raw: np.ndarray) -> np.ndarray:
    """Values of `raw` [rows, bytes a row] in float32, or in the stored dtype where that is plain."""
    kind = file.tensors[gguf_name].type
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    try:
        with np.errstate(all="ignore"):  # scales of a damaged file may be anything
            return gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        raise ModelLoadError(
            f"{file.path}: tensor {gguf_name!r} is of type {kind.name}, which the gguf package cannot dequantize; "
            "use a file of another type (F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, K-quants, IQ4)"
        ) from None
