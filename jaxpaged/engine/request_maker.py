"""From what a caller asks for to a `Request` that can be served, or a refusal."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.grammar import Grammar
from jaxpaged.engine.validation import (
    bad_word_ids,
    check_beam_width,
    check_constraints,
    check_params,
    check_prompt,
    with_all_logprobs,
)
from jaxpaged.errors import InvalidRequestError
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import Request, SamplingParams
from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.tokenizer import encode


@dataclass(frozen=True)
class RequestMaker:
    """Checks requests against one engine's limits, tokenizes their prompts, and gives them their seeds.

    Attributes:
        tokenizer: None where prompts are token ids only.
        vocab_size: of the model's logits.
        drawable_vocab: tokens that may be drawn.
        eos_token_ids: the model's own.
        max_logprobs: as in `EngineConfig`.
        compile_grammar: as `Engine.compile_grammar`.
        seeds: of requests that bring none.
    """

    limits: SchedulerConfig
    tokenizer: Any | None
    vocab_size: int
    drawable_vocab: int
    eos_token_ids: frozenset[int]
    max_logprobs: int
    compile_grammar: Callable[[StructuredOutputs], Future[Grammar]]
    seeds: random.Random

    def make(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | PoolingParams,
        grammar: Grammar | None = None,
        *,
        dry_run: bool = False,
    ) -> Request:
        """
        Args:
            prompt: text, tokenized with the model's special tokens, or token ids.
            grammar: what was compiled for `params.structured_outputs`; None: compile it now, if need be.
            dry_run: the request is not to be served; it takes no seed.

        Raises:
            InvalidRequestError: it can never be served as asked.
        """
        if isinstance(params, PoolingParams):
            return self._make_pooling(request_id, prompt, params)
        limits = self.limits
        check_params(
            params,
            vocab_size=self.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_logprobs=self.max_logprobs,
        )
        if self.tokenizer is None and params.stop:
            raise InvalidRequestError("stop strings need a tokenizer, and this engine has none", param="stop")
        token_ids = self._tokenize(prompt)
        check_prompt(token_ids, vocab_size=self.vocab_size, max_model_len=limits.max_model_len)
        if grammar is None and params.structured_outputs is not None:
            grammar = self.compile_grammar(params.structured_outputs).result()
        room = limits.max_model_len - len(token_ids)
        seed = params.seed if params.seed is not None else 0 if dry_run else self.seeds.getrandbits(64)
        request = Request(
            request_id,
            token_ids,
            with_all_logprobs(params, self.drawable_vocab),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            prompt=prompt if isinstance(prompt, str) else None,
            bad_words=bad_word_ids(params.bad_words, self.tokenizer),
            vocab_size=self.drawable_vocab,
            grammar=grammar,
        )
        check_constraints(request)
        check_beam_width(request, self.max_logprobs)
        return request

    def _make_pooling(self, request_id: str, prompt: str | list[int], pooling: PoolingParams) -> Request:
        token_ids = self._tokenize(prompt)
        check_prompt(token_ids, vocab_size=self.vocab_size, max_model_len=self.limits.max_model_len, draws=False)
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
