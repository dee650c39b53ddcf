"""config.json of both transformers generations, its defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import CONFIGS

from jaxpaged.config import ModelConfig, RopeConfig
from jaxpaged.errors import ModelLoadError
from jaxpaged.models.config import model_config_from_hf
from jaxpaged.models.decoder import DecoderForCausalLM
from jaxpaged.models.registry import SUPPORTED, get_model_class

# As published with the models, without the fields that say nothing about their shape.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def convert(base: dict[str, Any] | str, *remove: str, **fields: Any) -> ModelConfig:
    config = (CONFIGS[base] if isinstance(base, str) else base) | fields
    return model_config_from_hf({k: v for k, v in config.items() if k not in remove})


def test_llama_3_1_8b() -> None:
    assert model_config_from_hf(LLAMA_3_1_8B) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        dtype="bfloat16",
    )


def test_qwen3_0_6b() -> None:
    config = model_config_from_hf(QWEN3_0_6B)
    assert (config.head_dim, config.qk_norm, config.windows, config.tie_word_embeddings) == (128, True, (), True)
    assert config.rope == RopeConfig(theta=1e6)


def test_transformers_5_spelling_means_the_same() -> None:
    modern = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    modern["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    assert model_config_from_hf({**modern, "dtype": "bfloat16"}) == model_config_from_hf(LLAMA_3_1_8B)


def test_rope_split_by_layer_type_is_accepted_where_it_agrees() -> None:
    same = {"rope_type": "default", "rope_theta": 5e4}
    both = {"full_attention": same, "sliding_attention": dict(same)}
    assert convert("qwen3", "rope_theta", rope_parameters=both).rope == RopeConfig(theta=5e4)
    both["sliding_attention"]["rope_theta"] = 1e4
    with pytest.raises(ModelLoadError, match="differs between layer types"):
        convert("qwen3", "rope_theta", rope_parameters=both)


def test_defaults() -> None:
    config = convert("llama", "num_key_value_heads", "rope_theta", "torch_dtype", "rms_norm_eps", "hidden_act")
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert (config.rope, config.dtype, config.tie_word_embeddings) == (RopeConfig(), "float32", False)
    assert convert("qwen3", "head_dim").head_dim == 128


def test_biases_of_each_family() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.attention_bias, config.attention_output_bias, config.mlp_bias

    assert biases(convert("llama")) == (False, False, False)
    assert biases(convert("llama", attention_bias=True)) == (True, True, False)
    assert biases(convert("llama", mlp_bias=True)) == (False, False, True)
    assert biases(convert("mistral_full")) == (False, False, False)
    assert biases(convert("qwen2")) == (True, False, False)
    assert biases(convert("qwen3", attention_bias=True)) == (True, True, False)


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("mistral_window", {}, (7, 7)),
        ("mistral_full", {}, ()),
        ("qwen2", {}, ()),
        ("qwen2_window", {}, (None, 5, 5)),
        ("qwen2_window", {"max_window_layers": 0}, (5, 5, 5)),
        ("qwen2_window", {"max_window_layers": 28}, ()),
        ("qwen3_layer_types", {}, (6, None, 6)),
        ("qwen3_layer_types", {"layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_sliding_windows(name: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert convert(name, **fields).windows == windows


def test_yarn() -> None:
    config = convert("llama_yarn_tuned")
    assert config.rope == RopeConfig(
        theta=100.0,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=24,
        beta_fast=4.0,
        beta_slow=0.5,
        attention_factor=1.25,
    )
    yarn = {"type": "yarn", "factor": 4.0}
    assert convert("llama", rope_scaling=yarn).rope.original_max_position_embeddings == 128
    scaled = convert("llama", rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}).rope
    assert scaled.attention_factor == pytest.approx((0.1 * 1.3862943611 + 1) / (0.05 * 1.3862943611 + 1))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_missing_field_is_named(key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"lacks '{key}'"):
        convert("llama", key)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM, M",
        ),
        ({"architectures": None}, "architectures is None, but must be a list with one of LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be one of silu"),
        ({"hidden_act": ["silu"]}, "hidden_act is "),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64', but must be one of float32"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, but must be a multiple of num_key_value_heads .3."),
        ({"hidden_size": 34}, "hidden_size is 34, but must be a multiple of num_attention_heads .4."),
        ({"head_dim": 7}, "head_dim is 7, but must be even"),
        ({"vocab_size": 0}, "vocab_size is 0, but must be an integer of at least 1"),
        ({"vocab_size": "64"}, "vocab_size is '64', but must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, but must be an integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, but must be a finite number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', but must be true or false"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported; supported are default, lin",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor is 4, but must be below high_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = false is not supported"),
        ({"rope_theta": 1}, "rope_theta is 1, but must be above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
    ],
)
def test_bad_llama_config_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        convert("llama", **fields)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen2_window", {"sliding_window": None}, "lacks 'sliding_window'"),
        ("qwen3_layer_types", {"num_hidden_layers": 4}, "layer_types has 3 entries for 4 layers"),
        ("qwen3_layer_types", {"use_sliding_window": False}, "use_sliding_window is not set"),
        ("qwen3_layer_types", {"layer_types": ["chunked_attention"] * 3}, "must be a list of full_attention and slid"),
        ("mistral_window", {"layer_types": ["sliding_attention", "full_attention"]}, "Ministral"),
        ("mistral_window", {"num_key_value_heads": None}, "lacks 'num_key_value_heads'"),
    ],
)
def test_bad_windows_and_heads_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        convert(name, **fields)


@pytest.mark.parametrize("name", ["llama3_tied", "llama_yarn", "mistral_window", "qwen2_window", "qwen3_layer_types"])
def test_junk_in_any_field_is_refused_or_means_a_model(name: str) -> None:
    """No value of any field may end in another error than ours, or in a field of the wrong type."""
    junk = [None, True, -1, 0, 1.5, float("inf"), "x", "", [], [None], [[]], {}, {"full_attention": {}}]
    rope_key = next((k for k in ("rope_parameters", "rope_scaling") if k in CONFIGS[name]), None)
    rope = CONFIGS[name].get(rope_key, {})
    spoiled = [{key: value} for key in CONFIGS[name] for value in junk]
    spoiled += [{rope_key: rope | {key: value}} for key in rope for value in junk]
    for fields in spoiled:
        try:
            config = convert(name, **fields)
        except ModelLoadError as error:
            assert str(error).startswith(("config.json", "architecture")), fields
        else:
            assert type(config.head_dim) is type(config.num_kv_heads) is type(config.vocab_size) is int
            assert type(config.rope.theta) is type(config.rope.factor) is type(config.rms_norm_eps) is float
            assert all(window is None or type(window) is int for window in config.windows)


def test_error_names_the_given_source() -> None:
    with pytest.raises(ModelLoadError, match=r"^/models/x/config\.json lacks 'vocab_size'"):
        model_config_from_hf(CONFIGS["llama"] | {"vocab_size": None}, "/models/x/config.json")


def test_registry_lists_every_family() -> None:
    assert SUPPORTED == ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    for name in SUPPORTED:
        assert get_model_class(name).__name__ == name
        assert issubclass(get_model_class(name), DecoderForCausalLM)
