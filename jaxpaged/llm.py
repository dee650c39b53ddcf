"""The Python interface: a model in this process, prompts in, outputs back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams, as_prompts
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.stats import EngineStats
from jaxpaged.errors import EngineDeadError, InvalidRequestError
from jaxpaged.interrupts import interrupts_deferred
from jaxpaged.outputs import EmbeddingRequestOutput, RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.progress import GenerationProgress
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.tokenizer import Message, encode_rendered, render_chat
from jaxpaged.weights import GenerationConfig

if TYPE_CHECKING:
    from flax import nnx

Prompt = str | list[int]


class LLM:
    """A model that generates. One thread may use it; for many at once there is `AsyncEngine`.

    Example:
        >>> llm = LLM("smollm2-135m-instruct", max_model_len=1024)
        >>> [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
        >>> print(output.outputs[0].text)

    Args:
        model: a converted or Hugging Face folder, a GGUF file, a catalog name or a hub name.
        options: fields of `EngineConfig`; sizes in bytes may be written "4GiB".

    Raises:
        ModelLoadError: the model is not there, corrupt, or not supported.
        ConfigError: the options do not exist, or do not fit the model or the machine.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._start(Engine.from_pretrained(str(model), EngineConfig.from_options(options)))

    @classmethod
    def from_module(
        cls,
        module: nnx.Module,
        tokenizer: Any | None,
        *,
        model_name: str = "model",
        eos_token_ids: Iterable[int] | None = None,
        **options: Any,
    ) -> Self:
        """Serves a model that is in memory already; its weights are not copied.

        A training step must not donate arrays that are being served: it would take them away.

        Args:
            module: one of `jaxpaged.models`, as `load_model` returns them.
            tokenizer: a fast tokenizer of transformers; None where prompts and outputs are token ids only.
            eos_token_ids: tokens that end an output; None = the tokenizer's own.

        Raises:
            ConfigError: as for `LLM`.
        """
        if eos_token_ids is None:
            eos = getattr(tokenizer, "eos_token_id", None)
            eos_token_ids = () if eos is None else (eos,)
        generation = GenerationConfig(eos_token_ids=tuple(eos_token_ids))
        config = EngineConfig.from_options(options)
        llm = cls.__new__(cls)
        llm._start(Engine(module, tokenizer, config, model_name=model_name, generation=generation))
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        # Where the outputs of each unfinished request go: a stream may be open while `generate` runs.
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all in one run of continuous batches.

        Args:
            prompts: text, or token ids, or a list of either.
            sampling_params: for all, or one for each prompt; None = the model's own defaults.
            use_tqdm: show a progress bar with tokens/s where there are several prompts.
            priority: for each prompt, lower first; counts under scheduling_policy="priority".

        Returns:
            One finished output a prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; then nothing has run.
        """
        return self._run(_as_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next message in a conversation, or in each of a list of conversations.

        Args:
            messages: each with "role" and "content".
            chat_template: Jinja; None = the model's own.
            add_generation_prompt, continue_final_message, chat_template_kwargs: as in transformers.

        Raises:
            InvalidRequestError: as for `generate`, or the template refuses the messages.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], messages if many else [messages])
        texts = [
            render_chat(
                self._engine.tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        prompts = [encode_rendered(self._engine.tokenizer, text) for text in texts]
        outputs = self._run(prompts, sampling_params, use_tqdm, None)
        return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def beam_search(
        self,
        prompts: Prompt | Mapping[str, Any] | Sequence[Prompt | Mapping[str, Any]],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The most probable outputs for each prompt, best first; all prompts in one run of continuous batches.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of either.
            use_tqdm: show a progress bar.

        Raises:
            InvalidRequestError: a prompt or the parameters cannot be served; then nothing has run.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"{params!r:.80} is no BeamSearchParams", param="params")
        outputs = self._run(_as_prompts(as_prompts(prompts)), params.sampling_params(), use_tqdm, None)
        return [BeamSearchOutput.of(output, params, self._engine.tokenizer) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts, made of the model's hidden states, all in one run of continuous batches.

        Args:
            prompts: text, or token ids, or a list of either; as long as `max_model_len`.
            pooling_params: for all, or one for each prompt; None = the last token's, normalized.
            use_tqdm: show a progress bar where there are several prompts.

        Raises:
            InvalidRequestError: a prompt cannot be served; then nothing has run.
        """
        given = _as_prompts(prompts)
        if pooling_params is None:
            pooling_params = PoolingParams()
        many: list[object] = [*pooling_params] if isinstance(pooling_params, (list, tuple)) else []
        each = [_as_pooling_params(p) for p in many or [pooling_params] * len(given)]
        if len(each) != len(given):
            raise InvalidRequestError(
                f"{len(each)} pooling parameters for {len(given)} prompts; give one, or one for each",
                param="pooling_params",
            )
        return [EmbeddingRequestOutput.of(output) for output in self._run_each(given, each, use_tqdm, None)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt; each output holds the new text and tokens only.

        The request is queued with the first output that is asked for. Closing the iterator, or dropping it, aborts it.

        Raises:
            InvalidRequestError: the request cannot be served; raised here, not by the iterator.
        """
        prompts = _as_prompts(prompt)
        if len(prompts) > 1:
            raise InvalidRequestError(f"stream takes one prompt, not {len(prompts)}", param="prompt")
        params = replace(
            _as_params(sampling_params or self.get_default_sampling_params()), output_kind=OutputKind.DELTA
        )
        self._engine.validate(prompt, params)
        return self._stream(prompt, params)

    def update_weights(self, state: Any) -> None:
        """Swaps the weights for others of the same shapes, with no compilation, and drops the prefix cache.

        Args:
            state: an nnx state or module like the one being served.

        Raises:
            ConfigError: another structure, shape or dtype; nothing has changed then.
        """
        with interrupts_deferred():
            self._engine.update_weights(state)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._engine.scheduler_config.max_model_len

    def get_tokenizer(self) -> Any:
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """`SamplingParams()` with the defaults that the model's generation_config.json sets."""
        generation = self._engine.generation
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        own = {name: value for name in names if (value := getattr(generation, name)) is not None}
        return SamplingParams(**own)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        with interrupts_deferred():
            self._engine.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counters since the start, and what is running now."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Aborts what is running and gives back what the engine holds."""
        with interrupts_deferred():
            self._engine.shutdown()
            self._inboxes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self._params_of_each(sampling_params, len(prompts))
        return self._run_each(prompts, params, show_progress, priority)

    def _run_each(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prompts):
            raise InvalidRequestError(f"{len(priority)} priorities for {len(prompts)} prompts", param="priority")
        inbox: deque[RequestOutput] = deque()
        order: dict[str, int] = {}
        results: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for i, prompt in enumerate(prompts):
                request_id = self._new_id()
                order[request_id] = i
                self._add(request_id, prompt, params[i], inbox, priority[i] if priority is not None else 0)
            with GenerationProgress(len(prompts), shown=show_progress and len(prompts) > 1) as progress:
                while order:
                    self._step()
                    while inbox:
                        output = inbox.popleft()
                        results[order.pop(output.request_id)] = output
                    if progress.shown:
                        stats = self._engine.stats()
                        embeds = isinstance(params[0], PoolingParams)
                        tokens = stats.prompt_tokens_total if embeds else stats.generation_tokens_total
                        progress.update(len(prompts) - len(order), tokens)
        finally:  # a bad prompt among good ones, or Ctrl-C
            for request_id in order:
                self._drop(request_id)
        return cast(list[RequestOutput], results)

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        inbox: deque[RequestOutput] = deque()
        request_id = self._new_id()
        try:
            self._add(request_id, prompt, params, inbox)
            while True:
                while not inbox:
                    if request_id not in self._inboxes:
                        raise EngineDeadError("the LLM was shut down while this stream was open")
                    self._step()
                output = inbox.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._drop(request_id)

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        inbox: deque[RequestOutput],
        priority: int = 0,
    ) -> None:
        with interrupts_deferred():
            self._engine.add_request(request_id, prompt, params, priority=priority)
            self._inboxes[request_id] = inbox

    def _drop(self, request_id: str) -> None:
        with interrupts_deferred():
            self._inboxes.pop(request_id, None)
            self._engine.abort_request(request_id)

    def _step(self) -> None:
        with interrupts_deferred():
            for output in self._engine.step():
                inbox = self._inboxes.pop(output.request_id) if output.finished else self._inboxes[output.request_id]
                inbox.append(output)

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [*params] if isinstance(params, (list, tuple)) else [_as_params(params)] * count
        if len(each) != count:
            raise InvalidRequestError(
                f"{len(each)} sampling parameters for {count} prompts; give one, or one for each",
                param="sampling_params",
            )
        return [replace(_as_params(p), output_kind=OutputKind.FINAL_ONLY) for p in each]


def _as_params(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"{params!r:.80} is no SamplingParams; give one, e.g. SamplingParams(temperature=0)",
            param="sampling_params",
        )
    return params


def _as_pooling_params(params: object) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise InvalidRequestError(f"{params!r:.80} is no PoolingParams", param="pooling_params")
    return params


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, from one or many."""
    if isinstance(prompts, str):
        return [prompts]
    given: object = prompts
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; give text, a list of token ids, or a list of either",
            param="prompts",
        )
    if len(prompts) > 0 and all(isinstance(item, int) for item in prompts):
        return [cast(list[int], list(prompts))]
    for item in prompts:
        is_ids = isinstance(item, list) and all(isinstance(token, int) for token in item)
        if not isinstance(item, str) and not is_ids:
            raise InvalidRequestError(f"{item!r:.80} is no prompt; give text or a list of token ids", param="prompts")
    return cast(Sequence[Prompt], prompts)
