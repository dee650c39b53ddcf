"""The synchronous engine: one thread adds requests, calls `step`, and hands on what comes out."""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import Future
from typing import Any

import jax
from flax import nnx

from jaxpaged.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, format_size
from jaxpaged.core.grammar import Grammar
from jaxpaged.core.rules import Rules
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.collector import Collector
from jaxpaged.engine.request_maker import RequestMaker
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.step_loop import StepLoop, StepObserver
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.grammars import GrammarCompiler
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import SamplingParams
from jaxpaged.runner.compile_cache import enable_compilation_cache, start_folder
from jaxpaged.runner.runner import Runner
from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.tokenizer import backend_tokenizer
from jaxpaged.weights import (
    GenerationConfig,
    dummy_model,
    has_tokenizer,
    load_config,
    load_generation_config,
    load_model,
    quantize_model,
    resolve,
)
from jaxpaged.weights.quantization import is_quantized
from jaxpaged.weights.stored_tokenizer import open_tokenizer
from jaxpaged_kernels import native
from jaxpaged_kernels.api import IMPLEMENTATIONS
from jaxpaged_kernels.linear import LINEAR_IMPLEMENTATIONS
from jaxpaged_kernels.quantized import WEIGHT_FORMATS

logger = logging.getLogger(__name__)


class Engine:
    """Scheduler, runner and detokenizers around one model. Not thread-safe: one thread may call it.

    Attributes:
        config: what the user set.
        model_config: shape of the model.
        scheduler_config: limits in force, defaults filled in.
        cache_config: the pools as allocated.
        generation: the model's own defaults for sampling and its end-of-sequence ids.
        tokenizer: None where prompts and outputs are token ids only.
        model_name: what the server calls the model.
    """

    def __init__(
        self,
        model: nnx.Module,
        tokenizer: Any | None,
        config: EngineConfig,
        *,
        model_name: str = "model",
        generation: GenerationConfig | None = None,
        rules: Rules | None = None,
    ) -> None:
        """Compiles the programs and allocates the pools around a model that is in memory; its weights are not copied.

        Args:
            rules: of an experiment with another way to hand out memory; None = the engine's own.

        Raises:
            ConfigError: the options do not fit the model or the machine.
        """
        _check_parts(model, tokenizer, config)
        enable_compilation_cache(config)
        self.config = config
        self.model_config: ModelConfig = model.config
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.generation = generation or GenerationConfig()
        device = "cpu" if jax.default_backend() == "cpu" else "gpu"
        self.scheduler_config: SchedulerConfig = config.scheduler_config(self._max_model_len(), device=device)
        self._drawable_vocab = self._count_drawable()
        self._runner = Runner(model, config, self.scheduler_config, vocab_size=self._drawable_vocab)
        self.cache_config = CacheConfig(
            num_blocks=self._runner.num_blocks,
            block_size=config.block_size,
            num_host_blocks=self._runner.num_host_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            cache_dtype=str(self._runner.cache.shape.values),
            num_eager_blocks=self._runner.num_eager_blocks,
        )
        self._grammars = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, self.generation.eos_token_ids, self._drawable_vocab)
        fill_masks = self._grammars.fill_masks if self._grammars is not None else None
        self._scheduler = Scheduler(self.scheduler_config, self.cache_config, fill_masks, rules)
        self._collector = Collector(self._scheduler, tokenizer)
        self._loop = StepLoop(self._scheduler, self._runner, self._collector, overlap=config.async_scheduling)
        self._requests = RequestMaker(
            self.scheduler_config,
            tokenizer,
            vocab_size=self.model_config.vocab_size,
            drawable_vocab=self._drawable_vocab,
            eos_token_ids=frozenset(self.generation.eos_token_ids),
            max_logprobs=config.max_logprobs,
            compile_grammar=self.compile_grammar,
            seeds=random.Random(config.seed),
        )
        self._log_sizes()

    @classmethod
    def from_pretrained(cls, model: str, config: EngineConfig, *, model_name: str | None = None) -> Engine:
        """Loads `model` (a folder, a GGUF file, a catalog or hub name) with its tokenizer and starts an engine.

        With load_format "dummy" `model` may also be a config.json, and the tokenizer is None where there is none.

        Raises:
            ModelLoadError: it is not there, corrupt, or not supported.
            ConfigError: the options do not fit the model or the machine.
        """
        enable_compilation_cache(config)
        is_dummy = config.load_format == "dummy"
        files = resolve(model, weights=not is_dummy)
        tokenizer = None
        if has_tokenizer(files) or not is_dummy:
            folder = start_folder()
            tokenizer = open_tokenizer(
                files,
                None if folder is None else folder / "tokenizers",
                trust_remote_code=config.trust_remote_code,
            )
        if is_dummy:
            module = dummy_model(load_config(files), dtype=config.dtype, seed=config.seed)
            if config.quantization != "auto" and config.quantization != "none":
                quantize_model(module, config.quantization)
        else:
            # Other products than the native ones are slower by quantized weights.
            is_dense = config.quantization == "auto" and config.linear == "xla"
            module = load_model(files, dtype=config.dtype, quantization="none" if is_dense else config.quantization)
        return cls(
            module,
            tokenizer,
            config,
            model_name=model_name or model,
            generation=load_generation_config(files),
        )

    @property
    def observers(self) -> list[StepObserver]:
        """Called with each plan before it runs, and with None when nothing is left; they only look."""
        return self._loop.observers

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Queues a request.

        Args:
            prompt: text, tokenized with the model's special tokens, or token ids taken as they are.
            params: how to draw the output, or that the prompt's embedding is wanted instead.
            arrival_time: seconds of the monotonic clock; None = now.
            grammar: what `compile_grammar` made of `params.structured_outputs`; None: compile it now, if need be.

        Raises:
            InvalidRequestError: it can never be served as asked; nothing has been queued.
            QueueFullError: too many requests are waiting.
        """
        if request_id in self._collector:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use; give each request its own", param="request_id"
            )
        if not isinstance(priority, int):
            raise InvalidRequestError(f"priority is {priority!r}, but must be an integer", param="priority")
        request = self._requests.make(request_id, prompt, params, grammar)
        request.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        request.priority = priority
        request.cache_salt = cache_salt
        self._collector.add(request)

    def validate(self, prompt: str | list[int], params: SamplingParams | PoolingParams) -> None:
        """Raises what `add_request` would raise for a bad request, and queues nothing."""
        self._requests.make("", prompt, params, dry_run=True)

    def compile_grammar(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """Compiles in a thread, or finds among those compiled lately; any thread may call this.

        Raises:
            InvalidRequestError: no tokenizer; the future raises it for what is no grammar or too large a one.
        """
        if self._grammars is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and this engine has none", param="structured_outputs"
            )
        return self._grammars.compile(wanted)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its blocks at once.

        Returns:
            Its last output, with finish_reason "abort" for what was still running; None if it is not there.
        """
        output = self._collector.abort(request_id)
        self._loop.discard(request_id)
        self._loop.note_idle()
        return output

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Computes one batch; returns the news of each request that has some.

        With `async_scheduling` they are those of the batch before, and this one is still being computed. A failure on
        the device ends the requests of the batch with finish_reason "error" and leaves the others.
        """
        outputs = self._loop.step()
        self._loop.note_idle()
        return outputs

    def note_idle(self) -> None:
        """Tells the observers if nothing is left to compute, such as one who has come since the last step."""
        self._loop.note_idle()

    def stats(self) -> EngineStats:
        collector = self._collector
        return EngineStats(
            scheduler=self._scheduler.stats(),
            prompt_tokens_total=collector.prompt_tokens,
            cached_prompt_tokens_total=collector.cached_tokens,
            generation_tokens_total=collector.generated_tokens,
            compiles_after_warmup=self._runner.guard.count,
            steps_total=self._loop.num_steps,
            finished=dict(collector.finished),
        )

    def update_weights(self, state: Any) -> None:
        """Swaps the weights, with no compilation; `state` is an nnx state or module like the one being served.

        KV computed with the old weights is dropped: the prefix cache is emptied, and running requests compute their
        tokens so far again before they go on. Arrays that are on the device already are not copied: a training step
        must not donate them while they serve.

        Raises:
            ConfigError: another structure, shape or dtype; nothing has changed then.
        """
        self._runner.update_weights(state)
        self._loop.drop_kv()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests keep their blocks."""
        self._scheduler.reset_prefix_cache()

    def temporaries(self) -> dict[str, int]:
        """Bytes of temporaries of every compiled program, by its name."""
        return self._runner.temporaries()

    def shutdown(self) -> None:
        """Aborts what is running, and waits for the device."""
        for request_id in self._collector.request_ids:
            self.abort_request(request_id)
        self._loop.close()
        if self._grammars is not None:
            self._grammars.close()

    def _max_model_len(self) -> int:
        trained = self.model_config.max_position_embeddings
        asked = self.config.max_model_len
        if asked is not None and asked > trained:
            raise ConfigError(
                f"max_model_len ({asked}) is more than the model was made for "
                f"(max_position_embeddings={trained}); lower it"
            )
        return asked or trained

    def _count_drawable(self) -> int:
        """Embeddings are often padded beyond the tokenizer's last id; such an id must never be drawn."""
        vocab_size = self.model_config.vocab_size
        if self.tokenizer is None:
            return vocab_size
        # Not the number of tokens: some tokenizers leave ids out.
        return min(vocab_size, max(self.tokenizer.get_vocab().values()) + 1)

    def _log_sizes(self) -> None:
        tokens = (self.cache_config.num_blocks - 1) * self.cache_config.block_size
        length = self.scheduler_config.max_model_len
        logger.info(
            "weights %s, KV cache %s tokens (%d blocks of %d); maximum concurrency for %d tokens per request: %.2fx",
            format_size(self._runner.weights_bytes),
            f"{tokens:,}",
            self.cache_config.num_blocks - 1,
            self.cache_config.block_size,
            length,
            tokens / length,
        )


def _check_parts(model: object, tokenizer: Any | None, config: EngineConfig) -> None:
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise ConfigError(f"{type(model).__name__} is no model of jaxpaged.models; load one with load_model")
    if tokenizer is not None:
        backend_tokenizer(tokenizer)
    if config.quantization in WEIGHT_FORMATS and not is_quantized(model):
        raise ConfigError(
            f"quantization is {config.quantization!r}, but the weights of the model that was given are dense; "
            "quantize it first, with jaxpaged.weights.quantize_model"
        )
    for name, value, known in (
        ("attention", config.attention, tuple(IMPLEMENTATIONS)),
        ("linear", config.linear, LINEAR_IMPLEMENTATIONS),
    ):
        if value is not None and value not in known:
            raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(known)} in this version")
        if value == "native" and (reason := native.why_unavailable()) is not None:
            raise ConfigError(f"{name} is 'native', but {reason}")
