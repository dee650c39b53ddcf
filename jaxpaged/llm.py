"""The Python interface: a model in this process, prompts in, outputs back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams
from jaxpaged.blocking_engine import BlockingEngine, Prompt
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.stats import EngineStats
from jaxpaged.errors import InvalidRequestError
from jaxpaged.interrupts import interrupts_deferred
from jaxpaged.llm_arguments import PromptMapping, as_params, as_prompts, params_of_each
from jaxpaged.messages import template_messages
from jaxpaged.outputs import EmbeddingRequestOutput, RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.tokenizer import Message, encode_rendered, render_chat
from jaxpaged.weights import GenerationConfig
from jaxpaged.weights.stored_tokenizer import StoredTokenizer

if TYPE_CHECKING:
    from flax import nnx

    from jaxpaged.trace import TraceFile

AnyPrompt = Prompt | PromptMapping


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
        self._blocking = BlockingEngine(engine)

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all in one run of continuous batches.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
            sampling_params: for all, or one for each prompt; None = the model's own defaults.
            use_tqdm: show a progress bar with tokens/s where there are several prompts.
            priority: for each prompt, lower first; counts under scheduling_policy="priority".

        Returns:
            One finished output a prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; then nothing has run.
        """
        return self._run(as_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next message in a conversation, or in each of a list of conversations.

        Args:
            messages: each with "role" and "content", in OpenAI's forms.
            chat_template: Jinja; None = the model's own.
            tools: functions that the model may call, in OpenAI's form, for templates that show them; calls stay text.
            add_generation_prompt, continue_final_message, chat_template_kwargs: as in transformers.

        Raises:
            InvalidRequestError: as for `generate`, or the template refuses the messages.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], messages if many else [messages])
        texts = [
            render_chat(
                self._engine.tokenizer,
                template_messages(conversation),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        prompts = [encode_rendered(self._engine.tokenizer, text) for text in texts]
        outputs = self._run(prompts, sampling_params, use_tqdm, None)
        return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The most probable outputs for each prompt, best first; all prompts in one run of continuous batches.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
            use_tqdm: show a progress bar.

        Raises:
            InvalidRequestError: a prompt or the parameters cannot be served; then nothing has run.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"{params!r:.80} is no BeamSearchParams", param="params")
        outputs = self._run(as_prompts(prompts), params.sampling_params(), use_tqdm, None)
        return [BeamSearchOutput.of(output, params, self._engine.tokenizer) for output in outputs]

    def embed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts, made of the model's hidden states, all in one run of continuous batches.

        Args:
            prompts: as for `generate`; as long as `max_model_len`.
            pooling_params: for all, or one for each prompt; None = the last token's, normalized.
            use_tqdm: show a progress bar where there are several prompts.

        Raises:
            InvalidRequestError: a prompt cannot be served; then nothing has run.
        """
        given = as_prompts(prompts)
        each = params_of_each(pooling_params or PoolingParams(), PoolingParams, len(given), "pooling_params")
        outputs = self._blocking.run(given, each, show_progress=use_tqdm)
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def stream(self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt; each output holds the new text and tokens only.

        The request is queued with the first output that is asked for. Closing the iterator, or dropping it, aborts it.

        Raises:
            InvalidRequestError: the request cannot be served; raised here, not by the iterator.
        """
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequestError(f"stream takes one prompt, not {len(prompts)}", param="prompt")
        params = as_params(sampling_params or self.get_default_sampling_params(), SamplingParams, "sampling_params")
        params = replace(params, output_kind=OutputKind.DELTA)
        self._engine.validate(prompts[0], params)
        return self._blocking.stream(prompts[0], params)

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
        """The tokenizer, whole, also where the engine does with less of it; None where there is none."""
        tokenizer = self._engine.tokenizer
        return tokenizer.load() if isinstance(tokenizer, StoredTokenizer) else tokenizer

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

    def recording(self, file: TraceFile | None) -> AbstractContextManager[None]:
        """While it is open, `file` gets what each step does to the KV memory; see `jaxpaged.trace`."""
        from jaxpaged.trace import recording  # needs more packages than generating does

        return recording(self._engine, file)

    def shutdown(self) -> None:
        """Aborts what is running and gives back what the engine holds."""
        self._blocking.shutdown()

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
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = params_of_each(given, SamplingParams, len(prompts), "sampling_params")
        each = [replace(params, output_kind=OutputKind.FINAL_ONLY) for params in each]
        return self._blocking.run(prompts, each, show_progress=show_progress, priority=priority)
