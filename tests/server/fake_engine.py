"""An engine without a model: the interface of `Engine`, with text that is known beforehand.

Sequence i of a request writes "abcd...", from letter i on when it samples and from "a" when it is greedy, or what
`scripts` has for its prompt's text. The embedding of a prompt, before it is normalized, is its length, its last and its
first token, and 1 where the pooling is "mean".
"""

from __future__ import annotations

import string
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxpaged.core.grammar import Grammar
from jaxpaged.core.plan import PoolSpan, PositionLogprobs, StepResult
from jaxpaged.core.stats import SchedulerStats
from jaxpaged.engine.embedding_builder import EmbeddingBuilder
from jaxpaged.engine.output_builder import OutputBuilder
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.validation import check_params, check_prompt
from jaxpaged.errors import QueueFullError
from jaxpaged.grammars import GrammarCompiler
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import FinishReason, Request, SamplingParams, Sequence, SequenceStatus
from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.weights.generation import GenerationConfig

MAX_MODEL_LEN = 256
VOCAB_SIZE = 260
HIDDEN_SIZE = 4
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (continue_final_message and loop.last) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ extra or '' }}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; adds BOS to plain text, as its chat template does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) == VOCAB_SIZE
    return fast


class FakeEngine:
    """
    Attributes:
        scripts: token ids that a prompt's sequences write, by the prompt's text (without special tokens).
        step_s: seconds that a step takes.
        fail_steps: the requests of that many next steps end with an error, for `fail_reason`.
        dies: the next step raises.
        params: sampling parameters of every request so far that was not for an embedding, by request id.
        held: tokens in memory, by request id.
        broken: what was written although its grammar does not allow it.
    """

    def __init__(
        self, *, step_s: float = 0.0, max_num_seqs: int = 8, max_queued: int | None = None, tokenizer: object = None
    ) -> None:
        self.tokenizer = tokenizer or make_tokenizer()
        self.config = EngineConfig(max_num_seqs=max_num_seqs)
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE)
        self.scheduler_config = SchedulerConfig(MAX_MODEL_LEN, max_num_seqs, max_num_queued_requests=max_queued)
        self.cache_config = CacheConfig(num_blocks=1 + max_num_seqs * MAX_MODEL_LEN // 16)
        self.generation = GenerationConfig(eos_token_ids=(EOS,), bos_token_id=BOS, temperature=0.6, top_p=0.9)
        self.model_name = "fake"
        self.grammars = GrammarCompiler(self.tokenizer, (EOS,), VOCAB_SIZE)
        self.scripts: dict[str, list[int]] = {}
        self.step_s = step_s
        self.fail_steps = 0
        self.fail_reason = "RuntimeError: out of memory"
        self.dies = False
        self.params: dict[str, SamplingParams] = {}
        self.requests: dict[str, Request] = {}
        self.all_requests: list[Request] = []
        self.is_shut_down = False
        self.broken: list[str] = []
        self.cache_resets = 0
        self._builders: dict[str, OutputBuilder] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._finished: Counter[str] = Counter()
        self._steps = self._prompt_tokens = self._generated = 0

    @property
    def held(self) -> dict[str, int]:
        return {r.request_id: sum(s.num_tokens for s in r.sequences) for r in self._running}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def add_request(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        assert request_id not in self._builders
        limits = self.scheduler_config
        if isinstance(params, PoolingParams):
            request = Request(request_id, list(prompt), SamplingParams(), max_tokens=0, seed=0, pooling=params)
            request.priority, request.cache_salt = priority, cache_salt
            self._add_pooling(request, params)
            return
        check_params(
            params,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=limits.max_num_seqs,
            max_logprobs=self.config.max_logprobs,
        )
        check_prompt(prompt, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        if limits.max_num_queued_requests is not None and len(self._waiting) >= limits.max_num_queued_requests:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, the limit; try again later")
        room = MAX_MODEL_LEN - len(prompt)
        request = Request(
            request_id,
            list(prompt),
            params,
            max_tokens=min(params.max_tokens or room, room),
            seed=params.seed or 0,
            eos_token_ids=frozenset({EOS}),
            arrival_time=arrival_time or time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
        )
        request.num_cached_tokens = len(prompt) // 16 * 16
        self.params[request_id] = params
        self.all_requests.append(request)
        self._waiting.append(request)
        self._builders[request_id] = OutputBuilder(request, self.tokenizer)

    def compile_grammar(self, wanted: StructuredOutputs) -> Future[Grammar]:
        return self.grammars.compile(wanted)

    def _add_pooling(self, request: Request, params: PoolingParams) -> None:
        prompt = request.prompt_token_ids
        check_prompt(prompt, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, draws=False)
        request.num_cached_tokens = len(prompt) // 16 * 16
        self.all_requests.append(request)
        self._waiting.append(request)
        self._builders[request.request_id] = EmbeddingBuilder(request, params)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        builder = self._builders.pop(request_id, None)
        if builder is None:
            return None
        for sequence in builder.request.sequences:
            if not sequence.is_finished:
                sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, FinishReason.ABORT
        builder.metrics.finished_time = time.monotonic()
        self._running = [r for r in self._running if r.request_id != request_id]
        self._waiting = [r for r in self._waiting if r.request_id != request_id]
        self._finished["abort"] += 1
        return builder.build()

    def has_unfinished_requests(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.step_s)
        if self.dies:
            raise RuntimeError("the device is gone")
        self._steps += 1
        while self._waiting and len(self._running) < self.scheduler_config.max_num_seqs:
            self._running.append(self._waiting.pop(0))
        if self.fail_steps:
            self.fail_steps -= 1
            return [self._fail(r) for r in self._running]
        outputs = [self._advance(r) for r in self._running]
        self._running = [r for r in self._running if not r.is_finished]
        return [o for o in outputs if o is not None]

    def stats(self) -> EngineStats:
        blocks = sum(-(-n // 16) for n in self.held.values())
        total = self.cache_config.num_blocks - 1
        scheduler = SchedulerStats(
            num_running=len(self._running),
            num_running_sequences=sum(r.params.n for r in self._running),
            num_waiting=len(self._waiting),
            num_swapped=0,
            num_free_blocks=total - blocks,
            num_total_blocks=total,
            num_cached_blocks=0,
            num_free_host_blocks=0,
            num_total_host_blocks=0,
            prefix_queries_total=self._prompt_tokens,
            prefix_hits_total=0,
            preemptions_total=0,
            swapped_out_blocks_total=0,
            swapped_in_blocks_total=0,
            copied_blocks_total=0,
        )
        return EngineStats(
            scheduler=scheduler,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated,
            steps_total=self._steps,
            finished=dict(self._finished),
        )

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1

    def shutdown(self) -> None:
        self.is_shut_down = True
        for request_id in list(self._builders):
            self.abort_request(request_id)

    def _advance(self, request: Request) -> RequestOutput | None:
        builder, now = self._builders[request.request_id], time.monotonic()
        times = builder.metrics
        if times.first_token_time is None:
            times.first_scheduled_time = times.first_token_time = now
            self._prompt_tokens += len(request.prompt_token_ids)
            if request.params.prompt_logprobs is not None:
                builder.append_prompt(request.prompt_token_ids[1:], self._prompt_logprobs(request), 0)
        times.last_token_time = now
        if isinstance(builder, EmbeddingBuilder) and request.pooling is not None:
            ids = request.prompt_token_ids
            total = np.float32([len(ids), ids[-1], ids[0], request.pooling.pooling == "mean"])
            builder.add(PoolSpan(request, 0, 1, is_first=True, is_last=True), total)
            self._end(request.sequences[0], FinishReason.STOP)
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._draw(request, sequence, builder)
        return self._output(request)

    def _prompt_logprobs(self, request: Request) -> PositionLogprobs:
        """As those of drawn tokens: each is the second most probable one. Token 0 has -inf."""
        ids, top = np.int32(request.prompt_token_ids[1:]), max(request.params.prompt_logprobs or 0, 1)
        return PositionLogprobs(
            np.where(ids == 0, -np.inf, -1.0).astype(np.float32),
            np.full(len(ids), 2, np.int32),
            (ids[:, None] + np.arange(top) - 1) % VOCAB_SIZE,
            np.tile(np.float32([-0.5 * (i + 1) for i in range(top)]), (len(ids), 1)),
        )

    def _draw(self, request: Request, sequence: Sequence, builder: OutputBuilder) -> None:
        params, step = request.params, len(sequence.output_token_ids)
        text = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
        script = self.scripts.get(text)
        if script is None:
            start = 0 if params.temperature == 0 else sequence.index
            script = self.ids("".join(string.ascii_lowercase[(start + k) % 26] for k in range(26)))
        token = script[step % len(script)]
        sequence.output_token_ids.append(token)
        self._generated += 1
        if token == EOS and not params.ignore_eos:
            self._end(sequence, FinishReason.STOP)
        elif token in params.stop_token_ids:
            self._end(sequence, FinishReason.STOP, token)
        elif step + 1 == request.max_tokens:
            self._end(sequence, FinishReason.LENGTH)
        if sequence.matcher is not None:
            sequence.matcher.accept(token)
            self.broken += [sequence.matcher.error] * (sequence.matcher.error is not None)
            if sequence.matcher.is_finished and not sequence.is_finished:
                self._end(sequence, FinishReason.STOP)
        if request.beams is not None:  # its tokens are known at the end
            return
        top = params.logprobs or 0
        # The drawn token is the second most probable one; the others follow by id.
        best = np.int32([[(token + i - 1) % VOCAB_SIZE for i in range(max(top, 1))]])
        result = StepResult(
            np.int32([token]),
            np.float32([-1.0]),
            np.int32([2]),
            best,
            np.float32([[-0.5 * (i + 1) for i in range(best.shape[1])]]),
            np.full((1, len(params.logprob_token_ids)), -np.inf, np.float32),
            np.full((1, len(params.logprob_token_ids)), VOCAB_SIZE, np.int32),
        )
        stop = builder.append(sequence, result, 0)
        if stop is not None:
            self._end(sequence, FinishReason.STOP, stop)

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def _fail(self, request: Request) -> RequestOutput:
        for sequence in request.sequences:
            self._end(sequence, FinishReason.ERROR)
        self._running = [r for r in self._running if r is not request]
        return self._output(request, self.fail_reason)

    def _output(self, request: Request, error: str | None = None) -> RequestOutput | None:
        builder = self._builders[request.request_id]
        if request.is_finished:
            builder.metrics.finished_time = time.monotonic()
            self._finished.update(s.finish_reason.value for s in request.sequences)
            del self._builders[request.request_id]
        return builder.build(error)
