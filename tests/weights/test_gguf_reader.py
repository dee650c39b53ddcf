"""GGUF tensors against formulas of the block formats written out here, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from weights.tiny_files import (
    LLAMA_METADATA,
    interleave,
    llama_gguf_tensors,
    llama_shapes,
    random_tensors,
    write_gguf,
)

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights import gguf_reader, load_config, load_generation_config, load_tokenizer
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.gguf_reader import GGUFReader, hf_name, read_tensor
from jaxpaged.weights.reader import DTYPES


def f16(raw: bytes, offset: int) -> float:
    return float(np.frombuffer(raw, np.float16, 1, offset)[0])


def low_high(raw: bytes) -> list[int]:
    """Nibbles: all the low ones, then all the high ones."""
    return [b & 15 for b in raw] + [b >> 4 for b in raw]


def q4_0(raw: bytes) -> list[float]:
    return [f16(raw, 0) * (q - 8) for q in low_high(raw[2:18])]


def q4_1(raw: bytes) -> list[float]:
    return [f16(raw, 0) * q + f16(raw, 2) for q in low_high(raw[4:20])]


def q5_0(raw: bytes) -> list[float]:
    (high,) = struct.unpack_from("<I", raw, 2)
    return [f16(raw, 0) * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(low_high(raw[6:22]))]


def q5_1(raw: bytes) -> list[float]:
    (high,) = struct.unpack_from("<I", raw, 4)
    return [f16(raw, 0) * (q | (high >> i & 1) << 4) + f16(raw, 2) for i, q in enumerate(low_high(raw[8:24]))]


def q8_0(raw: bytes) -> list[float]:
    return [f16(raw, 0) * q for q in struct.unpack_from("<32b", raw, 2)]


def q4_k_scales(raw: bytes) -> list[tuple[int, int]]:
    """Scale and minimum, 6 bits each, of the 8 sub-blocks."""
    pairs = []
    for j in range(8):
        if j < 4:
            pairs.append((raw[j] & 63, raw[j + 4] & 63))
        else:
            pairs.append((raw[j + 4] & 15 | raw[j - 4] >> 6 << 4, raw[j + 4] >> 4 | raw[j] >> 6 << 4))
    return pairs


def q4_k(raw: bytes) -> list[float]:
    d, dmin, scales = f16(raw, 0), f16(raw, 2), q4_k_scales(raw[4:16])
    values = []
    for pair in range(4):
        quants = raw[16 + 32 * pair : 48 + 32 * pair]
        for half, (scale, minimum) in enumerate(scales[2 * pair : 2 * pair + 2]):
            values += [d * scale * (b >> 4 if half else b & 15) - dmin * minimum for b in quants]
    return values


def q6_k(raw: bytes) -> list[float]:
    low, high, scales, d = raw[:128], raw[128:192], struct.unpack_from("<16b", raw, 192), f16(raw, 208)
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            a, b, h = low[64 * half + i], low[64 * half + 32 + i], high[32 * half + i]
            for quarter, q in enumerate((a & 15, b & 15, a >> 4, b >> 4)):
                at = 128 * half + 32 * quarter + i
                values[at] = d * scales[at // 16] * ((q | (h >> 2 * quarter & 3) << 4) - 32)
    return values


def iq4_nl(raw: bytes) -> list[float]:
    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return [f16(raw, 0) * table[q] for q in low_high(raw[2:18])]


FORMATS = {
    Type.Q4_0: q4_0,
    Type.Q4_1: q4_1,
    Type.Q5_0: q5_0,
    Type.Q5_1: q5_1,
    Type.Q8_0: q8_0,
    Type.Q4_K: q4_k,
    Type.Q6_K: q6_k,
    Type.IQ4_NL: iq4_nl,
}
HALF_FIELDS = {Type.Q4_1: (0, 2), Type.Q5_1: (0, 2), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}


def random_blocks(kind: Type, rows: int, blocks: int) -> np.ndarray:
    """Arbitrary bytes, with sane float16 numbers where the format keeps its scales."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for offset in HALF_FIELDS.get(kind, (0,)):
        raw[..., offset : offset + 2] = rng.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("chunk", [1, 4 << 20], ids=["row by row", "at once"])
def test_quantized_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Type, chunk: int) -> None:
    monkeypatch.setattr(gguf_reader, "_CHUNK_VALUES", chunk)
    rows, blocks = 5, 3
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random_blocks(kind, rows, blocks)
    path = write_gguf(tmp_path / "m.gguf", {}, {"first": np.zeros(7, np.float32), "x.weight": (raw, kind)})
    expected = [FORMATS[kind](raw[r, b * size : (b + 1) * size].tobytes()) for r in range(rows) for b in range(blocks)]
    expected = np.float64(expected).reshape(rows, blocks * values)

    reader = GGUFReader(path)
    assert reader.shape("x.weight") == expected.shape
    assert reader.dtype("x.weight") == ml_dtypes.bfloat16
    np.testing.assert_allclose(reader.read("x.weight", DTYPES["float32"]), expected, rtol=2e-6, atol=1e-6)
    rounded = expected.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(reader.read("x.weight").astype(np.float32), rounded, rtol=2**-7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_tensors(tmp_path: Path, dtype: str) -> None:
    array = np.random.default_rng(0).standard_normal((6, 10)).astype(DTYPES[dtype])
    stored = (array.view(np.uint8), Type.BF16) if dtype == "bfloat16" else array
    reader = GGUFReader(write_gguf(tmp_path / "m.gguf", {}, {"x.weight": stored}))
    assert reader.dtype("x.weight") == DTYPES[dtype]
    np.testing.assert_array_equal(reader.read("x.weight"), array)
    np.testing.assert_array_equal(reader.read("x.weight", DTYPES["float32"]), array.astype(np.float32))


def test_llama_tensors_get_their_hugging_face_names_and_rows(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes())
    stored = llama_gguf_tensors(tensors) | {"rope_freqs.weight": np.ones(8, np.float32)}
    reader = GGUFReader(write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, stored))
    assert set(reader.names()) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(reader.read(name), array, err_msg=name)


def test_rows_of_qwen_are_left_in_place_and_biases_of_llama_are_not(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 8), dtype=np.float32)
    metadata = {"qwen2.attention.head_count": 4, "qwen2.attention.head_count_kv": 2}
    path = write_gguf(tmp_path / "q.gguf", metadata, {"blk.0.attn_q.weight": weight}, arch="qwen2")
    np.testing.assert_array_equal(GGUFReader(path).read("model.layers.0.self_attn.q_proj.weight"), weight)
    bias = np.arange(32, dtype=np.float32)
    path = write_gguf(tmp_path / "l.gguf", LLAMA_METADATA, {"blk.1.attn_k.bias": interleave(bias, 2)})
    np.testing.assert_array_equal(GGUFReader(path).read("model.layers.1.self_attn.k_proj.bias"), bias)


def test_names() -> None:
    assert hf_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    assert hf_name("output.weight") == "lm_head.weight"


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"x.weight": np.zeros((2, 4), np.int8)})
    with pytest.raises(ModelLoadError, match=r"'x.weight' is of type I8"):
        GGUFReader(path).read("x.weight")


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    metadata = {"a": 7, "b": 0.5, "c": True, "d": "text é", "e": ["x", "yz", ""], "f": [1, 2, 3], "g": [0.25, 0.5]}
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", metadata, {"x.weight": np.zeros(4, np.float32)}))
    assert {key: file.metadata[key] for key in metadata} == metadata


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a": ["x", "y"]}, {"x.weight": np.zeros((4, 4), np.float32)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            GGUFFile.open(path)
    path.write_bytes(whole)
    assert list(GGUFFile.open(path).tensors) == ["x.weight"]


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"x.weight": np.zeros((64, 64), np.float32)})
    file = GGUFFile.open(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="ends within tensor"):
        read_tensor(file, "x.weight", DTYPES["float32"])


HUGE = 1 << 60
HEADER = b"GGUF" + struct.pack("<I", 3)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    name = struct.pack("<Q", 1) + b"x"
    return name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    "content",
    {
        "not gguf": b"PK\x03\x04" + bytes(64),
        "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "key count": HEADER + struct.pack("<QQ", 0, HUGE),
        "tensor count": HEADER + struct.pack("<QQ", HUGE, 0),
        "string length": HEADER + struct.pack("<QQ", 0, 1) + key(b"a", 8, struct.pack("<Q", HUGE)),
        "array length": HEADER + struct.pack("<QQ", 0, 1) + key(b"a", 9, struct.pack("<IQ", 0, HUGE)),
        "string array length": HEADER + struct.pack("<QQ", 0, 1) + key(b"a", 9, struct.pack("<IQ", 8, HUGE)),
        "nested array": HEADER + struct.pack("<QQ", 0, 1) + key(b"a", 9, struct.pack("<IQ", 9, 1)),
        "value type": HEADER + struct.pack("<QQ", 0, 1) + key(b"a", 77, b""),
        "dimensions": HEADER + struct.pack("<QQ", 1, 0) + tensor((HUGE, HUGE)) + bytes(64),
        "dimension count": HEADER + struct.pack("<QQ", 1, 0) + tensor((1,) * 9) + bytes(64),
        "tensor type": HEADER + struct.pack("<QQ", 1, 0) + tensor((4,), kind=999) + bytes(64),
        "offset": HEADER + struct.pack("<QQ", 1, 0) + tensor((4,), offset=HUGE) + bytes(64),
        "twice": HEADER + struct.pack("<QQ", 2, 0) + 2 * tensor((4,)) + bytes(64),
        "row of half a block": HEADER + struct.pack("<QQ", 1, 0) + tensor((5,), kind=8) + bytes(64),
        "alignment": HEADER + struct.pack("<QQ", 0, 1) + key(b"general.alignment", 4, struct.pack("<I", 0)) + bytes(64),
        "split": HEADER + struct.pack("<QQ", 0, 1) + key(b"split.count", 2, struct.pack("<H", 3)),
    }.items(),
    ids=lambda item: item[0],
)
def test_hostile_headers(tmp_path: Path, content: tuple[str, bytes]) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content[1] + bytes(16))
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        GGUFFile.open(path)


def test_random_damage_is_a_clear_error_or_harmless(tmp_path: Path) -> None:
    """Bytes of a whole model file's header are changed at random: nothing but ModelLoadError may come out."""
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -0.5],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
    }
    stored = llama_gguf_tensors(random_tensors(llama_shapes()))
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | tokenizer, stored)
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in GGUFFile.open(path).tensors.values())
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load_config(path)
            load_generation_config(path)
            load_tokenizer(path)
            reader = GGUFReader(path)
            for name in reader.names():
                reader.read(name)
        except ModelLoadError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100
