"""Hugging Face transformers: `generate` one request at a time or in static batches, and its continuous batching."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList


def load(options: dict[str, Any]) -> Any:
    torch.set_num_threads(options["threads"])
    return AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])).eval()


class Clock(StoppingCriteria):
    """Notes when each token came; `generate` calls it after every one. It stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class GenerateEngine:
    """Takes what waits, at most `batch_size`, and generates for all of them until the longest is done."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._model = load(options)
        self._batch_size: int = options["batch_size"]
        self._waiting: deque[tuple[int, list[int], int]] = deque()

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        self._waiting.append((index, prompt, output_len))

    def step(self) -> list[tuple[int, float]]:
        batch = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
        width = max(len(prompt) for _, prompt, _ in batch)
        padding = [width - len(prompt) for _, prompt, _ in batch]
        ids = torch.tensor([[0] * pad + prompt for pad, (_, prompt, _) in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max(n for _, _, n in batch), eos_token_id=None, pad_token_id=0
        )
        # What is not given is taken from the model's own, where an end-of-sequence token would be.
        self._model.generation_config = config
        clock = Clock()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([clock])
            )
        return [(index, when) for index, _, n in batch for when in clock.times[:n]]


class ContinuousEngine:
    """Its scheduler runs in a thread of its own and puts the outputs into a queue."""

    def __init__(self, options: dict[str, Any]) -> None:
        from transformers.generation import ContinuousBatchingConfig

        model = load(options)
        shape = model.config
        token_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * model.dtype.itemsize
        page = 256
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page,
                num_blocks=options["kv_gib"] * (1 << 30) // (token_bytes * page),
                max_batch_tokens=options["max_num_batched_tokens"],
                max_requests_per_batch=options["max_num_seqs"],
            ),
        )
        self._manager.start()
        self._ids = itertools.count()
        # Of each request's id: its index, and how many of its tokens have been reported.
        self._seen: dict[str, tuple[int, int]] = {}

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        request_id = str(next(self._ids))
        self._seen[request_id] = (index, 0)
        self._manager.add_request(prompt, request_id=request_id, max_new_tokens=output_len, streaming=True)

    def step(self) -> list[tuple[int, float]]:
        output = self._manager.get_result(timeout=0.05)
        if output is None:
            if self._manager.background_thread_status.fatal_error is not None:
                raise RuntimeError(self._manager.background_thread_status.fatal_error)
            return []
        now = time.perf_counter()
        if output.error is not None:
            raise RuntimeError(output.error)
        index, seen = self._seen[output.request_id]
        self._seen[output.request_id] = (index, len(output.generated_tokens))
        return [(index, now)] * (len(output.generated_tokens) - seen)


def start(options: dict[str, Any]) -> GenerateEngine | ContinuousEngine:
    return ContinuousEngine(options) if options["batch_size"] == 0 else GenerateEngine(options)
