"""The real model of the catalog against what transformers computed from the same file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.weights import convert, load_generation_config, load_model, load_tokenizer, resolve

pytestmark = pytest.mark.real_model
GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_135m.json").read_text())
CASES = {case["name"]: case for case in GOLDENS["cases"]}


@pytest.fixture(scope="module")
def files():
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def model(files):
    return load_model(files, dtype="float32")


def test_file_is_the_one_the_goldens_came_from(files) -> None:
    assert hashlib.sha256(files.path.read_bytes()).hexdigest() == GOLDENS["gguf_sha256"]


def test_tokenizer_gives_the_original_ids(files) -> None:
    tokenizer = load_tokenizer(files)
    assert tokenizer.is_fast
    assert tokenizer.eos_token_id == GOLDENS["eos_token_id"]
    assert load_generation_config(files).eos_token_ids == (GOLDENS["eos_token_id"],)
    for name, case in CASES.items():
        text = case["prompt"]
        if text is None:
            text = tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
        assert tokenizer(text).input_ids == case["prompt_token_ids"], name
        assert tokenizer.decode(case["prompt_token_ids"]) == text, name


def test_numbers_are_split_into_digits_before_anything_else(files) -> None:
    tokenizer = load_tokenizer(files)
    assert tokenizer("2024").input_ids == tokenizer.convert_tokens_to_ids(list("2024"))
    # The newlines belong together once the digit is cut off (ids of the original tokenizer.json).
    assert tokenizer("x\n\n1.").input_ids[-3:] == [1116, 33, 30]


def test_chat_template(files) -> None:
    text = load_tokenizer(files).apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


def test_log_probabilities_equal_those_of_transformers(model) -> None:
    case = CASES["short"]
    prompt, answer = case["prompt_token_ids"], case["token_ids"]
    logits = model(jnp.asarray([prompt + answer[:-1]], jnp.int32))[0, len(prompt) - 1 :]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    assert log_probs.argmax(-1).tolist() == answer
    for row, top in zip(log_probs, case["top_logprobs"], strict=True):
        ids, expected = zip(*top, strict=True)
        np.testing.assert_allclose(row[list(ids)], expected, atol=1e-3)


def test_converted_folder_holds_the_same_model(files, model, tmp_path) -> None:
    folder = convert(files, tmp_path / "smollm2", dtype="float32", progress=False)
    found, expected = (jax.tree.leaves_with_path(nnx.state(m)) for m in (load_model(folder), model))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    case = CASES["short"]
    tokenizer = load_tokenizer(folder)
    assert tokenizer(case["prompt"]).input_ids == case["prompt_token_ids"]
    assert tokenizer.chat_template == load_tokenizer(files).chat_template
    assert load_generation_config(folder) == load_generation_config(files)
