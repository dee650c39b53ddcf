"""What a model costs: bytes of weights and KV, and operations a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxpaged.capacity import kv_bytes_per_token
from jaxpaged.config import ModelConfig
from jaxpaged.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of quantized weights: 32 values and their scale.
_BLOCK = 32
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as far as its cost depends on it.

    Attributes:
        params: all parameters.
        matmul_params: those that every token is multiplied with in the layers (two operations each).
        head_params: of the output layer, which only tokens that are drawn from pass through.
        attention_width: query heads times head size.
        dtype_bytes: of a weight that is not quantized.
        kv_token_bytes: K and V of a token over all layers.
        saved_layer_bytes: that the layers' matrices take less by quantization.
        saved_head_bytes: the same of the output layer.
        saved_embedding_bytes: the same of the embedding, where it is another one.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    params: int
    matmul_params: int
    head_params: int
    attention_width: int
    dtype_bytes: int
    kv_token_bytes: int
    max_position_embeddings: int = 2048
    saved_layer_bytes: int = 0
    saved_head_bytes: int = 0
    saved_embedding_bytes: int = 0

    @property
    def weights_bytes(self) -> int:
        saved = self.saved_layer_bytes + self.saved_head_bytes + self.saved_embedding_bytes
        return self.params * self.dtype_bytes - saved

    @property
    def step_weights_bytes(self) -> int:
        """Bytes of weights that a step reads: of the embedding table only a few rows, unless it is the output layer."""
        dense = (self.matmul_params + self.head_params) * self.dtype_bytes
        return dense - self.saved_layer_bytes - self.saved_head_bytes

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        name: str = "",
        dtype: str = "auto",
        quantization: str = "none",
        kv_dtype_bytes: int = 0,
        kv_scale_bytes: int = 0,
    ) -> ModelShape:
        """Of a model of the engine: RMS norms, gated MLP, rotary positions.

        Args:
            dtype: of weights and activations; "auto" is the model's own.
            quantization: "q8_0" or "q4_0" (see `EngineConfig`) of weights that are multiplied as they are, or "none".
            kv_dtype_bytes: of a value in the pool; 0 = as the activations.
            kv_scale_bytes: of the scale of each head's K and V in a quantized pool.

        Raises:
            ConfigError: a dtype that the engine does not compute in.
        """
        chosen = config.dtype if dtype == "auto" else dtype
        if chosen not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {chosen!r}, but must be one of {', '.join(DTYPE_BYTES)}")
        hidden, head = config.hidden_size, config.head_dim
        query, key = config.num_heads * head, config.num_kv_heads * head
        projections = hidden * (2 * query + 2 * key) + 3 * hidden * config.intermediate_size
        biases = (query + 2 * key) * config.attention_bias + hidden * config.attention_output_bias
        biases += (2 * config.intermediate_size + hidden) * config.mlp_bias
        norms = 2 * hidden + 2 * head * config.qk_norm
        table = config.vocab_size * hidden
        saved_by = partial(_saved_bytes, dtype_bytes=DTYPE_BYTES[chosen])
        matrices = [(query + 2 * key, hidden), (hidden, query), (2 * config.intermediate_size, hidden)]
        matrices.append((hidden, config.intermediate_size))
        saved_layer = sum(saved_by(outputs, inputs, quantization) for outputs, inputs in matrices)
        # The tables have 8 bits whatever the layers have.
        saved_table = saved_by(config.vocab_size, hidden, "none" if quantization == "none" else "q8_0")
        return cls(
            name=name or config.architecture,
            num_layers=config.num_layers,
            hidden_size=hidden,
            vocab_size=config.vocab_size,
            params=config.num_layers * (projections + biases + norms)
            + hidden
            + table * (1 if config.tie_word_embeddings else 2),
            matmul_params=config.num_layers * projections,
            head_params=table,
            attention_width=query,
            dtype_bytes=DTYPE_BYTES[chosen],
            kv_token_bytes=kv_bytes_per_token(
                layers=config.num_layers,
                kv_heads=config.num_kv_heads,
                head_dim=head,
                dtype_bytes=kv_dtype_bytes or DTYPE_BYTES[chosen],
                scale_bytes=kv_scale_bytes,
            ),
            max_position_embeddings=config.max_position_embeddings,
            saved_layer_bytes=config.num_layers * saved_layer,
            saved_head_bytes=saved_table,
            saved_embedding_bytes=0 if config.tie_word_embeddings else saved_table,
        )


def _saved_bytes(outputs: int, inputs: int, quantization: str, *, dtype_bytes: int) -> int:
    """Of a matrix; one whose inputs are no whole blocks stays as it is."""
    if quantization == "none" or inputs % _BLOCK:
        return 0
    return outputs * inputs * dtype_bytes - outputs * (inputs // _BLOCK) * _BLOCK_BYTES[quantization]


def opt_shape(name: str, layers: int, hidden: int) -> ModelShape:
    """A model of the OPT family in float16: learned positions, MLP of four times the hidden size, tied output layer."""
    vocab, positions = 50_272, 2050
    per_layer = 4 * hidden * hidden + 8 * hidden * hidden
    biases_and_norms = 13 * hidden
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        params=layers * (per_layer + biases_and_norms) + (vocab + positions + 2) * hidden,
        matmul_params=layers * per_layer,
        head_params=vocab * hidden,
        attention_width=hidden,
        dtype_bytes=2,
        kv_token_bytes=2 * layers * hidden * 2,
    )
