"""Loading: every parameter holds exactly what was stored under its name, and what does not fit is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from weights.tiny_files import (
    LLAMA_CONFIG,
    LLAMA_METADATA,
    byte_level_tokenizer,
    llama_gguf_tensors,
    llama_shapes,
    random_tensors,
    write_folder,
    write_gguf,
)

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights import (
    GenerationConfig,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    resolve,
)

TENSORS = random_tensors(llama_shapes())


def at(model: Any, name: str) -> jax.Array:
    """The parameter of a Hugging Face name, found by walking attributes and indices."""
    node = model
    for part in name.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node[...]


def assert_holds(model: Any, tensors: dict[str, np.ndarray], dtype: Any) -> None:
    assert len(jax.tree.leaves(nnx.state(model))) == len(tensors)
    for name, array in tensors.items():
        found = at(model, name)
        assert isinstance(found, jax.Array)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), array.astype(dtype), err_msg=name)


def shard(folder: Path, tensors: dict[str, np.ndarray], parts: int = 3) -> dict[str, str]:
    """Write `tensors` over several files with an index; returns its weight map."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = list(tensors)
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, folder / file)
        weight_map |= dict.fromkeys(names[i::parts], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_stored_dtype_is_kept(tmp_path: Path, stored: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, stored, stored))
    tensors = random_tensors(llama_shapes(), dtype)
    folder = write_folder(tmp_path / "m", tensors, LLAMA_CONFIG | {"torch_dtype": "float32"})
    assert load_config(folder).dtype == stored
    assert_holds(load_model(folder), tensors, dtype)


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_wanted_dtype(hf_folder: Path, wanted: str) -> None:
    assert_holds(load_model(hf_folder, dtype=wanted), TENSORS, np.dtype(getattr(ml_dtypes, wanted, wanted)))


def test_logits_are_those_of_the_stored_weights(hf_folder: Path) -> None:
    ids = np.arange(6, dtype=np.int32)[None]
    embedded = np.asarray(load_model(hf_folder).model.embed_tokens(ids.reshape(-1)))
    np.testing.assert_array_equal(embedded, TENSORS["model.embed_tokens.weight"][:6])


def test_sharded_folder(hf_folder: Path) -> None:
    shard(hf_folder, TENSORS)
    assert_holds(load_model(hf_folder), TENSORS, np.float32)


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, llama_gguf_tensors(TENSORS))
    assert_holds(load_model(path), TENSORS, np.float32)
    assert_holds(load_model(tmp_path), TENSORS, np.float32)


def test_quantized_gguf_file(tmp_path: Path) -> None:
    q8 = gguf.GGMLQuantizationType.Q8_0
    tensors = {
        name: array if array.ndim == 1 else (gguf.quants.quantize(array, q8), q8)
        for name, array in llama_gguf_tensors(TENSORS).items()
    }
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA, tensors)
    auto, exact = load_model(path), load_model(path, dtype="float32")
    for name, array in TENSORS.items():
        assert at(auto, name).dtype == ml_dtypes.bfloat16
        # Half a step of the coarsest block, and its scale rounded to float16.
        tolerance = np.abs(array).max() / 127 * 0.5 + np.abs(array).max() * 2**-11 if array.ndim > 1 else 0
        np.testing.assert_allclose(at(exact, name), array, atol=tolerance)


def test_tied_embeddings(tmp_path: Path) -> None:
    config = LLAMA_CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(llama_shapes(config))
    folder = write_folder(tmp_path / "m", tensors, config)
    assert_holds(load_model(folder), tensors, np.float32)
    # A copy of the embedding under the head's name and buffers of old versions are passed over.
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors | extra, folder / "model.safetensors")
    assert_holds(load_model(folder), tensors, np.float32)


def test_sharding_for_all_and_by_name(hf_folder: Path) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    assert at(load_model(hf_folder, sharding=whole), "model.norm.weight").sharding == whole
    model = load_model(hf_folder, sharding=lambda name: rows if name.endswith("q_proj.weight") else whole)
    assert at(model, "model.layers.1.self_attn.q_proj.weight").sharding == rows
    assert at(model, "model.layers.1.self_attn.k_proj.weight").sharding == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"1 missing \(model\.norm\.weight\)"),
        ({"model.layers.0.mlp.experts.weight": np.zeros(3, np.float32)}, r"1 unexpected \(model\.layers\.0\.mlp\.exp"),
        ({"model.norm.weight": np.zeros(3, np.float32)}, r"1 misshapen \(model\.norm\.weight \[3\] instead of \[64\]"),
        (
            {f"model.layers.0.self_attn.{p}_proj.weight": None for p in "qkvo"}
            | {"model.norm.weight": None, "a.weight": np.zeros(3, np.float32)},
            r"5 missing \(model\.layers\.0\.self_attn\.k_proj\.weight, .*, \.\.\.\); 1 unexpected \(a\.weight\)",
        ),
    ],
)
def test_tensors_that_do_not_fit(hf_folder: Path, change: dict[str, Any], message: str) -> None:
    tensors = {name: array for name, array in (TENSORS | change).items() if array is not None}
    save_file(tensors, hf_folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_model(hf_folder)


def test_truncated_and_corrupt_safetensors(hf_folder: Path) -> None:
    path = hf_folder / "model.safetensors"
    whole = path.read_bytes()
    huge = (1 << 62).to_bytes(8, "little") + whole[8:]
    forged = whole.replace(b"[320,64]", b"[9999999999999,64]"[: len(b"[320,64]")])
    for content in (b"", whole[:5], whole[:200], whole[:-1], whole[: len(whole) // 2], huge, forged, b"x" * 4096):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a whole safetensors file"):
            load_model(hf_folder)


def test_shards_that_are_missing_or_elsewhere(hf_folder: Path) -> None:
    weight_map = shard(hf_folder, TENSORS)
    index = hf_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../../etc/passwd"}}))
    with pytest.raises(ModelLoadError, match="points out of its folder"):
        load_model(hf_folder)
    index.write_text("{")
    with pytest.raises(ModelLoadError, match="is not a safetensors index"):
        load_model(hf_folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (hf_folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="lacks 1 of 3 weight files, first model-00002-of-00003"):
        load_model(hf_folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", r"cannot read .*config\.json as JSON"),
        ("[" * 100_000, r"cannot read .*config\.json as JSON"),
        ("[]", "holds no JSON object but a list"),
        (json.dumps(LLAMA_CONFIG | {"architectures": ["BertModel"]}), r"BertModel.*LlamaForCausalLM"),
        (json.dumps(LLAMA_CONFIG | {"num_attention_heads": "4"}), "num_attention_heads"),
        (json.dumps(LLAMA_CONFIG | {"hidden_size": 1 << 40}), "misshapen"),
        (json.dumps(LLAMA_CONFIG | {"num_hidden_layers": 10**12}), "num_hidden_layers is 1000000000000, but at most"),
        (json.dumps(LLAMA_CONFIG | {"quantization_config": {"quant_method": "gptq"}}), "quantization_config"),
    ],
)
def test_bad_config(hf_folder: Path, content: str, message: str) -> None:
    (hf_folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_model(hf_folder)


def test_bad_dtype(hf_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype 'int4' is not supported; use auto, float32, bfloat16, float16"):
        load_model(hf_folder, dtype="int4")


def test_pickles_are_not_read_without_torch(hf_folder: Path) -> None:
    (hf_folder / "model.safetensors").unlink()
    (hf_folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    assert resolve(hf_folder).kind == "hf"
    with pytest.raises(ModelLoadError, match=r"pytorch_model\*\.bin.*install torch|safe loader refuses"):
        load_model(hf_folder)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickles_of_tensors_with_torch(hf_folder: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    (hf_folder / "model.safetensors").unlink()
    tensors = random_tensors(llama_shapes(), ml_dtypes.bfloat16)
    names = list(tensors)
    for i, part in enumerate((names[:9], names[9:])):
        stored = {name: torch.from_numpy(tensors[name].view(np.int16)).view(torch.bfloat16) for name in part}
        torch.save(stored, hf_folder / f"pytorch_model-{i}.bin", _use_new_zipfile_serialization=zipped)
    assert_holds(load_model(hf_folder), tensors, ml_dtypes.bfloat16)


def test_generation_config(hf_folder: Path) -> None:
    assert load_generation_config(hf_folder) == GenerationConfig((1, 2), 0, temperature=0.6)
    (hf_folder / "generation_config.json").unlink()
    assert load_generation_config(hf_folder) == GenerationConfig((1,), 0)
    for content, message in (('{"eos_token_id": "x"}', "eos_token_id is 'x'"), ('{"top_p": []}', "top_p is")):
        (hf_folder / "generation_config.json").write_text(content)
        with pytest.raises(ModelLoadError, match=message):
            load_generation_config(hf_folder)


def test_tokenizer(hf_folder: Path) -> None:
    tokenizer = load_tokenizer(hf_folder)
    text = "the quick brown fox, héllo 🎉"
    assert tokenizer(text).input_ids == byte_level_tokenizer().encode(text).ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi</s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_tokenizer_that_does_not_fit(hf_folder: Path) -> None:
    largest = max(byte_level_tokenizer().get_vocab().values())
    (hf_folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"vocab_size": largest}))
    with pytest.raises(ModelLoadError, match=f"gives ids up to {largest}, but the model has a vocabulary of {largest}"):
        load_tokenizer(hf_folder)


@pytest.mark.parametrize("content", ["{", '{"model": 5}', None])
def test_damaged_or_missing_tokenizer(hf_folder: Path, content: str | None) -> None:
    (hf_folder / "tokenizer.json").unlink()
    if content is None:
        (hf_folder / "tokenizer_config.json").unlink()
    else:
        (hf_folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(hf_folder)


def test_import_is_light() -> None:
    code = "import sys, jaxpaged.weights; print({'transformers', 'torch', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
