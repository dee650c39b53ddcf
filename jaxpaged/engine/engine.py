"""The synchronous engine: one thread adds requests, calls `step`, and hands on what comes out."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, format_size
from jaxpaged.core.grammar import Grammar
from jaxpaged.core.plan import NONE_ALLOWED, StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.embedding_builder import EmbeddingBuilder
from jaxpaged.engine.output_builder import OutputBuilder
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.validation import (
    bad_word_ids,
    check_beam_width,
    check_constraints,
    check_params,
    check_prompt,
    with_all_logprobs,
)
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.grammars import GrammarCompiler
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import FinishReason, Request, SamplingParams
from jaxpaged.runner.compile_cache import enable_compilation_cache
from jaxpaged.runner.runner import Runner
from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.tokenizer import backend_tokenizer, encode
from jaxpaged.weights import (
    GenerationConfig,
    dummy_model,
    has_tokenizer,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    resolve,
)
from jaxpaged_kernels.api import IMPLEMENTATIONS

logger = logging.getLogger(__name__)

# Of the cause of a failed step, as its requests are told.
MAX_ERROR_CHARS = 500


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
    ) -> None:
        """Compiles the programs and allocates the pools around a model that is in memory; its weights are not copied.

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
        )
        self._grammars = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, self.generation.eos_token_ids, self._drawable_vocab)
        fill_masks = self._grammars.fill_masks if self._grammars is not None else None
        self._scheduler = Scheduler(self.scheduler_config, self.cache_config, fill_masks)
        self._outputs: dict[str, OutputBuilder] = {}
        self._seeds = random.Random(config.seed)
        self._finished: Counter[str] = Counter()
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._pool_may_be_lost = False
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
            tokenizer = load_tokenizer(files, trust_remote_code=config.trust_remote_code)
        if is_dummy:
            module = dummy_model(load_config(files), dtype=config.dtype, seed=config.seed)
        else:
            module = load_model(files, dtype=config.dtype)
        return cls(
            module,
            tokenizer,
            config,
            model_name=model_name or model,
            generation=load_generation_config(files),
        )

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
        if request_id in self._outputs:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use; give each request its own", param="request_id"
            )
        if not isinstance(priority, int):
            raise InvalidRequestError(f"priority is {priority!r}, but must be an integer", param="priority")
        request = self._make_request(request_id, prompt, params, grammar)
        request.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        request.priority = priority
        request.cache_salt = cache_salt
        # Before it is queued: it must not be there without one.
        if request.pooling is not None:
            builder: OutputBuilder = EmbeddingBuilder(request, request.pooling)
        else:
            builder = OutputBuilder(request, self.tokenizer)
        self._scheduler.add(request)
        self._outputs[request_id] = builder

    def validate(self, prompt: str | list[int], params: SamplingParams | PoolingParams) -> None:
        """Raises what `add_request` would raise for a bad request, and queues nothing."""
        self._make_request("", prompt, params, None, dry_run=True)

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
        builder = self._outputs.get(request_id)
        if builder is None:
            return None
        self._scheduler.abort(request_id)
        return self._build([builder], time.monotonic())[0]

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Computes one batch; returns the news of each request that has some.

        A failure on the device ends the requests of the batch with finish_reason "error" and leaves the others.
        """
        if self._pool_may_be_lost:
            self._restore_pool()
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        now = time.monotonic()
        for sequence in plan.scheduled:
            metrics = self._outputs[sequence.request.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
        self._steps += 1
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._pool_may_be_lost = True
            return self._fail(plan, error)
        except BaseException:  # such as Ctrl-C: the requests stay, and compute again what the step may have half done
            self._pool_may_be_lost = True
            self._scheduler.drop_kv()
            raise
        failed = self._end_without_token(plan, result) + self._end_without_embedding(plan, result)
        accepted = self._scheduler.update(plan, result)
        failed += self._end_without_grammar(plan, accepted)
        return failed + self._collect(plan, result, accepted)

    def stats(self) -> EngineStats:
        return EngineStats(
            scheduler=self._scheduler.stats(),
            prompt_tokens_total=self._prompt_tokens,
            cached_prompt_tokens_total=self._cached_tokens,
            generation_tokens_total=self._generated_tokens,
            compiles_after_warmup=self._runner.guard.count,
            steps_total=self._steps,
            finished=dict(self._finished),
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
        self._scheduler.drop_kv()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests keep their blocks."""
        self._scheduler.reset_prefix_cache()

    def temporaries(self) -> dict[str, int]:
        """Bytes of temporaries of every compiled program, by its name."""
        return self._runner.temporaries()

    def shutdown(self) -> None:
        """Aborts what is running."""
        for request_id in list(self._outputs):
            self.abort_request(request_id)
        if self._grammars is not None:
            self._grammars.close()

    def _make_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | PoolingParams,
        grammar: Grammar | None,
        dry_run: bool = False,
    ) -> Request:
        if isinstance(params, PoolingParams):
            return self._make_pooling_request(request_id, prompt, params)
        limits = self.scheduler_config
        vocab_size = self.model_config.vocab_size
        check_params(
            params,
            vocab_size=vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_logprobs=self.config.max_logprobs,
        )
        if self.tokenizer is None and params.stop:
            raise InvalidRequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        token_ids = self._tokenize(prompt)
        check_prompt(token_ids, vocab_size=vocab_size, max_model_len=limits.max_model_len)
        if grammar is None and params.structured_outputs is not None:
            grammar = self.compile_grammar(params.structured_outputs).result()
        room = limits.max_model_len - len(token_ids)
        seed = params.seed if params.seed is not None else 0 if dry_run else self._seeds.getrandbits(64)
        request = Request(
            request_id,
            token_ids,
            with_all_logprobs(params, vocab_size),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed,
            eos_token_ids=frozenset(self.generation.eos_token_ids),
            prompt=prompt if isinstance(prompt, str) else None,
            bad_words=bad_word_ids(params.bad_words, self.tokenizer),
            vocab_size=self._drawable_vocab,
            grammar=grammar,
        )
        check_constraints(request)
        check_beam_width(request, self.config.max_logprobs)
        return request

    def _make_pooling_request(self, request_id: str, prompt: str | list[int], pooling: PoolingParams) -> Request:
        limits, vocab_size = self.scheduler_config, self.model_config.vocab_size
        token_ids = self._tokenize(prompt)
        check_prompt(token_ids, vocab_size=vocab_size, max_model_len=limits.max_model_len, draws=False)
        return Request(
            request_id,
            token_ids,
            SamplingParams(),
            max_tokens=0,
            seed=0,
            prompt=prompt if isinstance(prompt, str) else None,
            pooling=pooling,
        )

    def _tokenize(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise InvalidRequestError("a text prompt needs a tokenizer; give token ids", param="prompt")
        return encode(self.tokenizer, prompt)

    def _collect(self, plan: StepPlan, result: StepResult, accepted: list[int]) -> list[RequestOutput]:
        """Appends the accepted draws to their requests, ends those with a stop string, and builds the outputs."""
        now = time.monotonic()
        self._collect_prompts(plan, result)
        touched: dict[str, OutputBuilder] = {}
        for draw in accepted:
            sequence = plan.sampled[draw]
            request = sequence.request
            if request.request_id not in self._outputs:  # has ended with an error
                continue
            builder = touched[request.request_id] = self._outputs[request.request_id]
            self._generated_tokens += 1
            self._note_tokens(builder, now)
            stop = builder.append(sequence, result, draw)
            if stop is not None:
                self._scheduler.finish(sequence, FinishReason.STOP, stop)
        embedded = self._collect_embeddings(plan, result, now)
        return self._build([*touched.values(), *self._finished_beams(plan, now), *embedded], now)

    def _note_tokens(self, builder: OutputBuilder, now: float) -> None:
        if builder.metrics.first_token_time is None:
            builder.metrics.first_token_time = now
            self._prompt_tokens += len(builder.request.prompt_token_ids)
            self._cached_tokens += builder.request.num_cached_tokens
        builder.metrics.last_token_time = now

    def _finished_beams(self, plan: StepPlan, now: float) -> list[OutputBuilder]:
        """Of the beam searches in `plan`, those that are over: before that nothing is known of their outputs."""
        if plan.sample.num_logprobs < 0:
            return []
        searches = dict.fromkeys(s.request for s in plan.sampled if s.request.beams is not None)
        over = []
        for request in searches:
            builder = self._outputs.get(request.request_id)
            if builder is None:  # has ended with an error
                continue
            self._note_tokens(builder, now)
            if request.is_finished:
                self._generated_tokens += sum(len(s.output_token_ids) for s in request.sequences)
                over.append(builder)
        return over

    def _collect_embeddings(self, plan: StepPlan, result: StepResult, now: float) -> list[OutputBuilder]:
        """Adds the sums of hidden states to their requests; returns the builders of those that are complete."""
        complete: list[OutputBuilder] = []
        for i, span in enumerate(plan.pool_spans):
            assert result.pooled is not None, "the plan asks for hidden states, the result has none"
            builder = self._outputs.get(span.request.request_id)
            if builder is None:  # has ended with an error
                continue
            assert isinstance(builder, EmbeddingBuilder)
            builder.add(span, result.pooled[i])
            if span.is_last:
                self._note_tokens(builder, now)
                complete.append(builder)
        return complete

    def _collect_prompts(self, plan: StepPlan, result: StepResult) -> None:
        start = 0
        for span in plan.prompt_spans:
            assert result.prompt is not None, "the plan asks for log-probabilities of prompts, the result has none"
            builder = self._outputs.get(span.request.request_id)
            if builder is not None:
                builder.append_prompt(span.target_ids.tolist(), result.prompt, start)
            start += len(span.target_ids)

    def _end_without_token(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Ends the requests whose logits are NaN, as the model overflowed or its weights are broken, or all -inf."""
        requests = [plan.sampled[draw].request for draw in np.flatnonzero(result.token_ids < 0).tolist()]
        message = "the model's logits are NaN: it overflowed, or its weights are broken; try dtype float32"
        if (result.token_ids == NONE_ALLOWED).any():
            message = "no token may be drawn: its own logits or what the request allows leave none"
        return self._end_with_error(requests, message)

    def _end_without_grammar(self, plan: StepPlan, accepted: list[int]) -> list[RequestOutput]:
        """Ends the requests whose grammars could not be followed further, as they are too complex at this point."""
        if plan.adjustments is None or not plan.adjustments.masks:
            return []
        failed = [
            (sequence.request, matcher.error)
            for draw in accepted
            if (matcher := (sequence := plan.sampled[draw]).matcher) is not None and matcher.error is not None
        ]
        if not failed:
            return []
        return self._end_with_error([request for request, _ in failed], f"Grammar error: {failed[0][1]}")

    def _end_without_embedding(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Ends the requests whose hidden states are not finite."""
        if result.pooled is None:
            return []
        bad = np.flatnonzero(~np.isfinite(result.pooled).all(axis=1)).tolist()
        requests = [plan.pool_spans[i].request for i in bad]
        message = "the model's hidden states are NaN: it overflowed, or its weights are broken; try dtype float32"
        return self._end_with_error(requests, message)

    def _end_with_error(self, requests: Iterable[Request], message: str) -> list[RequestOutput]:
        builders: dict[str, OutputBuilder] = {}
        for request in requests:
            builders[request.request_id] = self._outputs[request.request_id]
            for sequence in request.sequences:
                self._scheduler.finish(sequence, FinishReason.ERROR)
        if builders:
            logger.error("%d requests end with an error: %s", len(builders), message)
        return self._build(builders.values(), time.monotonic(), error=message)

    def _build(self, builders: Iterable[OutputBuilder], now: float, error: str | None = None) -> list[RequestOutput]:
        outputs = []
        for builder in builders:
            request = builder.request
            if request.is_finished:
                builder.metrics.finished_time = now
                self._finished.update(s.finish_reason.value for s in request.sequences if s.finish_reason)
                del self._outputs[request.request_id]
            output = builder.build(error)
            if output is not None:
                outputs.append(output)
        return outputs

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        logger.error(
            "a step of %d tokens failed; its %d sequences end with an error",
            plan.num_tokens,
            len(plan.scheduled),
            exc_info=error,
        )
        failed = self._scheduler.fail(plan)
        builders = [self._outputs[request.request_id] for request in failed]
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # XLA writes pages; the log has them all
        return self._build(builders, time.monotonic(), error=reason[:MAX_ERROR_CHARS])

    def _restore_pool(self) -> None:
        """After a step that failed or was interrupted: if it took the pool, whoever had KV in it computes it again."""
        if self._runner.restore_pools():
            self._scheduler.drop_kv()
        self._pool_may_be_lost = False

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
    if config.attention is not None and config.attention not in IMPLEMENTATIONS:
        raise ConfigError(
            f"attention is {config.attention!r}, but must be one of {', '.join(IMPLEMENTATIONS)} in this version"
        )
