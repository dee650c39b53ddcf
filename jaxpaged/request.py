"""What is asked for, and the state of each sequence that answers it. No JAX here."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from jaxpaged.errors import InvalidRequestError

MAX_N = 16_384
GREEDY_EPS = 1e-5
MIN_TEMPERATURE = 1e-2


class OutputKind(enum.Enum):
    """What each `RequestOutput` carries: what is new, all so far, or nothing before all is finished."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL_ONLY = "final_only"


class FinishReason(enum.StrEnum):
    """Why a sequence ended, as the OpenAI API spells it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # no block, no row
    SWAPPED = "swapped"  # its blocks are in the host pool
    RUNNING = "running"
    FINISHED = "finished"


def _check(ok: bool, param: str, value: object, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} is {value}, but must be {rule}", param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the output of one request. Names and meanings are vLLM's.

    Attributes:
        n: sequences to draw; sequence i of a seeded request uses seed + i.
        temperature: 0 (below 1e-5) is greedy; between 0 and 0.01 it is taken as 0.01.
        top_p: smallest set of tokens with at least this probability mass, in (0, 1].
        top_k: number of most probable tokens kept; 0 or -1 keeps all.
        min_p: drop tokens below this share of the most probable token's probability, in [0, 1].
        seed: 64-bit signed; None draws one for the request from the engine's own generator.
        max_tokens: most output tokens; None = up to the model's length limit.
        stop: a string or strings that end the output; not part of the text unless include_stop_str_in_output.
        stop_token_ids: tokens that end the output like an end-of-sequence token.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: None, or how many of the most probable tokens to report beside the drawn one, at each position.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Collection[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, Collection), name, value, "a list")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _check(isinstance(self.output_kind, OutputKind), "output_kind", self.output_kind, "an OutputKind")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"an integer between 1 and {MAX_N}")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            _check(is_number and math.isfinite(value), name, value, "a finite number")
        _check(0 <= self.temperature <= 2, "temperature", self.temperature, "between 0 and 2")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _check(
            _is_int(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            self.top_k,
            "-1, 0 (both: off) or a positive integer",
        )
        _check(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            self.seed,
            "a signed 64-bit integer",
        )
        _check(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "at least 1",
        )
        _check(
            self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= 0),
            "logprobs",
            self.logprobs,
            "0 or a positive integer",
        )
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", list(self.stop), "non-empty strings")
        _check(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            list(self.stop_token_ids),
            "token ids",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS


class Sequence:
    """One output of a request: its tokens, its block table and how far its KV has been computed.

    Only the scheduler and the KV manager change it.

    Attributes:
        index: place among the request's n sequences.
        output_token_ids: tokens drawn so far.
        num_computed: leading tokens of prompt + output whose KV is in the pool.
        block_table: device block ids, in order; empty unless running.
        host_blocks: host block ids while swapped out, else empty.
        block_keys: prefix-cache keys of its leading full blocks, as far as they are known.
        row: row of the batch that it holds while running, else -1.
        seed: its own 64-bit seed.
    """

    __slots__ = (
        "block_keys",
        "block_table",
        "finish_reason",
        "host_blocks",
        "index",
        "num_computed",
        "output_token_ids",
        "request",
        "row",
        "seed",
        "status",
        "stop_reason",
    )

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.block_table: list[int] = []
        self.host_blocks: list[int] = []
        self.block_keys: list[bytes] = []
        self.row = -1
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output."""
        prompt = self.request.prompt_token_ids
        split = len(prompt)
        return prompt[start : min(stop, split)] + self.output_token_ids[max(start - split, 0) : max(stop - split, 0)]

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.index}, {self.status.value}, {self.num_tokens} tokens)"


@dataclass(eq=False)
class Request:
    """One request inside the engine; its sequences are one group, scheduled, preempted and freed together.

    Attributes:
        prompt_token_ids: never empty, every id within the vocabulary.
        eos_token_ids: tokens that end a sequence (unless ignore_eos).
        max_tokens: most output tokens of each sequence: `params.max_tokens` clipped to the model's length limit.
        seed: 64-bit seed of sequence 0; sequence i has seed + i, wrapped to 64 bits.
        arrival_time: seconds, any clock that does not go back; earlier is served first.
        priority: lower is served first under the "priority" policy.
        cache_salt: prefix-cache entries are shared only between requests with the same salt.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    prompt: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        mask = (1 << 64) - 1
        self.sequences = [Sequence(self, i, (self.seed + i) & mask) for i in range(self.params.n)]

    @property
    def is_finished(self) -> bool:
        return all(s.is_finished for s in self.sequences)
