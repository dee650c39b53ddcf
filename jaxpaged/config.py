"""Every option of the engine, validated in one place.

Frozen dataclasses only; nothing here reads the environment. `EngineConfig` is what users
set (`LLM(model, **options)` and the flags of `jaxpaged serve`); `CacheConfig` and `SchedulerConfig` are the parts
of it that the scheduler needs, so that it can run with no model and no JAX.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from jaxpaged.errors import ConfigError

Policy = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "none", "q8_0", "q4_0"]
KVCacheDType = Literal["auto", "fp8", "int8"]

# What a value of an option's annotation may be; options with choices are checked against those.
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "str | None": (str, type(None)),
}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*(|[KMGT]i?B?|B)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": KIB,
    "MI": MIB,
    "GI": GIB,
    "TI": 1 << 40,
}


def parse_size(text: str | int) -> int:
    """Bytes of "60GiB", "512MiB", "2GB", "4096" or an int.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{text!r} is not a size in bytes: write for example 4GiB, 512MiB, 2GB or 1048576")
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.upper().removesuffix("B")])


def format_size(num_bytes: float) -> str:
    """`num_bytes` with a binary unit, for messages and logs: "1.50 GiB"."""
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high:
        limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ConfigError(f"{name} is {value}, but must be {limit}")


def _check_type(name: str, value: object, annotation: str) -> None:
    kinds = _TYPES.get(annotation)
    if kinds is None:
        return
    is_bool = isinstance(value, bool) and bool not in kinds
    if is_bool or not isinstance(value, kinds):
        raise ConfigError(f"{name} is {value!r}, but must be {annotation.replace(' | ', ' or ')}")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(get_args(choices))}")


@dataclass(frozen=True)
class CacheConfig:
    """How KV memory is cut into blocks.

    Attributes:
        num_blocks: blocks of the device pool, the null block (id 0) included.
        block_size: tokens a block.
        num_host_blocks: blocks of the host pool that swapped sequences go to.
        enable_prefix_caching: keep the blocks of finished requests findable by what they hold.
        cache_dtype: of the keys and values in the pools, for reports.
        num_eager_blocks: blocks of the device pool that are in use before a cached one is evicted; None = all. More
            are in use only when running requests need them.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    cache_dtype: str = "auto"
    num_eager_blocks: int | None = None

    def __post_init__(self) -> None:
        _check_range("num_blocks", self.num_blocks, 2)
        _check_range("block_size", self.block_size, 1, 1024)
        _check_range("num_host_blocks", self.num_host_blocks, 0)
        if self.num_eager_blocks is not None:
            _check_range("num_eager_blocks", self.num_eager_blocks, 0)


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold and who goes first.

    Attributes:
        max_model_len: most tokens of one sequence, prompt and output together.
        max_num_seqs: most sequences running at once (a request with n > 1 counts n).
        max_num_batched_tokens: most tokens computed in a step.
        policy: "fcfs", or "priority" (lower number first, then arrival).
        preemption_mode: what a preempted group does with its KV. "swap" falls back to "recompute" for a group that
            does not fit in what is left of the host pool.
        enable_chunked_prefill: split prompts over steps; without it a prompt is computed whole in one step.
        long_prefill_token_threshold: most tokens of one prompt in a step, 0 = no limit of its own.
        watermark: share of the pool kept free when a request is admitted, 0 to 1.
        reserve_full_prompt: admit a request only when its whole prompt fits in free blocks, not just its first chunk.
        max_num_queued_requests: most requests waiting; None = no limit.
        debug_checks: check every invariant of the block manager after each step (slow).
    """

    max_model_len: int
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    policy: Policy = "fcfs"
    preemption_mode: PreemptionMode = "recompute"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    max_num_queued_requests: int | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        _check_range("max_model_len", self.max_model_len, 2)
        _check_range("max_num_seqs", self.max_num_seqs, 1)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_choice("scheduling_policy", self.policy, Policy)
        _check_choice("preemption_mode", self.preemption_mode, PreemptionMode)
        _check_range("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _check_range("watermark", self.watermark, 0.0, 0.99)
        if self.max_num_queued_requests is not None:
            _check_range("max_num_queued_requests", self.max_num_queued_requests, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "every running sequence decodes one token a step; raise the first or lower the second"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_model_len "
                f"({self.max_model_len}), so a long prompt would never run without chunked prefill; "
                "enable chunked prefill or raise max_num_batched_tokens"
            )


@dataclass(frozen=True)
class EngineConfig:
    """What a user sets. None means: derived from the model and the device when the engine starts.

    Attributes:
        dtype: of the weights and the activations. "auto" is the model's own.
        load_format: "auto" reads the model's weights; "dummy" draws random ones from `seed`, for which a config.json is
            enough (without tokenizer files prompts are token ids).
        quantization: of the matrices, in blocks of 32 values with one scale. "q8_0" keeps them in 8 bits; "q4_0" those
            of the layers in 4, the embedding and the head in 8. Native CPU kernels multiply them as they are, by
            activations that they round to 8 bits in blocks of 32; elsewhere they are made dense for each product.
            "auto" does so with GGUF files of these formats, where native kernels run; "none" converts all to `dtype`.
        seed: of requests that bring none.
        max_model_len: None = as long as the model was trained for.
        kv_cache_dtype: "auto" keeps keys and values as they are computed; "int8" and "fp8" quantize each vector to one
            byte a value and one float32 scale. fp8 needs an NVIDIA GPU of compute capability 8.9 or later, or a CPU.
        kv_cache_memory: bytes of the KV pool. None: what is left on a GPU; 1 GiB on a CPU, where cached prefixes
            take memory that no request has used yet only up to 384 tokens a row: the rest is left to other programs.
        num_blocks: blocks of the pool, over kv_cache_memory.
        gpu_memory_utilization: share of the memory that JAX manages on a GPU (by default 75 % of the GPU's, see
            XLA_PYTHON_CLIENT_MEM_FRACTION) that weights, temporaries and pool may take together.
        swap_space: bytes of the host pool for preemption by swapping.
        async_scheduling: plan and launch each step before the results of the last one are known, so that the host works
            while the device computes. Results are the same without it. A step after one with a beam search, a grammar
            or bad words of several tokens waits all the same: what these may draw depends on those results.
        max_logprobs: most log-probabilities a request may ask for, for each token; -1 = the whole vocabulary, which
            every step that reports any then sorts.
        attention: force an implementation of attention ("native", "triton", "xla", "reference"); None picks by device.
        linear: force an implementation of the products with weights ("native", "xla"); None picks by device.
        compilation_cache: folder of JAX's persistent compilation cache; "" is none, None the user's cache folder.
        warmup: compile every program before the first request. Off: on first use (for tests and short scripts).
        trust_remote_code: let transformers run the tokenizer code that a model folder brings.
    """

    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_memory: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.92
    swap_space: int = 0
    enable_prefix_caching: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: Policy = "fcfs"
    preemption_mode: PreemptionMode | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    max_num_queued_requests: int | None = None
    async_scheduling: bool = True
    max_logprobs: int = 20
    attention: str | None = None
    linear: str | None = None
    compilation_cache: str | None = None
    warmup: bool = True
    trust_remote_code: bool = False
    debug_checks: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            _check_type(option.name, getattr(self, option.name), str(option.type))
        _check_choice("dtype", self.dtype, DType)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KVCacheDType)
        _check_choice("load_format", self.load_format, LoadFormat)
        _check_choice("quantization", self.quantization, Quantization)
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _check_range("swap_space", self.swap_space, 0)
        _check_range("max_logprobs", self.max_logprobs, -1, 1024)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory",
            "num_blocks",
        ):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 1)
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError(
                'preemption_mode is "swap" but swap_space is 0: give the host pool a size, e.g. swap_space=4GiB'
            )
        # The parts check the rest; here with stand-ins for what is derived at start-up.
        self.scheduler_config(self.max_model_len or 2, device="cpu")
        CacheConfig(num_blocks=2, block_size=self.block_size)

    def scheduler_config(self, max_model_len: int, *, device: str) -> SchedulerConfig:
        """The scheduler's part, with defaults for `device` ("cpu" or "gpu") where the user left None."""
        max_num_seqs = self.max_num_seqs or (32 if device == "cpu" else 256)
        # On a CPU larger steps are no faster a token, and those who decode wait for them.
        default_tokens = max(256 if device == "cpu" else 2048, max_num_seqs)
        if not self.enable_chunked_prefill:
            default_tokens = max(default_tokens, max_model_len)
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or default_tokens,
            policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode or ("swap" if self.swap_space else "recompute"),
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark=self.watermark,
            max_num_queued_requests=self.max_num_queued_requests,
            debug_checks=self.debug_checks,
        )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Config from keyword options; sizes may be strings such as "4GiB".

        Raises:
            ConfigError: an option that does not exist, or a bad value.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(names)}")
        sizes = {k: parse_size(options[k]) for k in ("kv_cache_memory", "swap_space") if options.get(k) is not None}
        return cls(**{**options, **sizes})


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, as the `rope_parameters` (or `rope_theta` and `rope_scaling`) of a config.json.

    Attributes:
        kind: "default", "linear", "llama3" or "yarn".
        factor: how much longer than trained the context is stretched.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Hashable, so that compiled programs can be keyed by it.

    Attributes:
        architecture: name in the model registry, e.g. "LlamaForCausalLM".
        dtype: of the stored weights, e.g. "bfloat16".
        windows: sliding window of each layer in tokens, None = full attention.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: str = "float32"

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None."""
        return self.windows[layer] if self.windows else None
