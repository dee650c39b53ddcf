"""OpenVINO GenAI's continuous batching."""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any

import numpy as np


class OpenVINOEngine:
    def __init__(self, options: dict[str, Any]) -> None:
        # Of this environment alone: by name, so that type checkers of the project need not have them.
        self._openvino = importlib.import_module("openvino")
        self._genai = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = options["kv_gib"]
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.enable_prefix_caching = True
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            options["model"], scheduler, "CPU", options["properties"]
        )
        self._ids = itertools.count()
        self._handles: dict[int, Any] = {}

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        ids = self._openvino.Tensor(np.array([prompt], np.int64))
        self._handles[index] = self._pipeline.add_request(next(self._ids), ids, config)

    def step(self) -> list[tuple[int, float]]:
        self._pipeline.step()
        now = time.perf_counter()
        tokens = []
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    tokens += [(index, now)] * len(output.generated_ids)
            if str(handle.get_status()).rpartition(".")[2] == "FINISHED" and not handle.can_read():
                del self._handles[index]
        return tokens


def start(options: dict[str, Any]) -> OpenVINOEngine:
    return OpenVINOEngine(options)
