"""What is asked for, and the state of each sequence that answers it. No JAX here."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxpaged.core.beam import BeamSearch, BeamSettings
from jaxpaged.core.constraints import Constraints
from jaxpaged.core.grammar import Grammar, Matcher
from jaxpaged.errors import InvalidRequestError
from jaxpaged.pooling import PoolingParams
from jaxpaged.structured_outputs import StructuredOutputs

MAX_N = 16_384
GREEDY_EPS = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_LOGIT_BIAS = 100.0
# Beyond these a penalized logit may leave the range of float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30
# Each of these takes room in a step for every row of the batch.
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_EARLY_STOP_IDS = 128


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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_token_ids(param: str, ids: Collection[object]) -> None:
    bad = next((t for t in ids if not (_is_int(t) and t >= 0)), None)  # type: ignore[operator]
    if bad is not None:
        raise InvalidRequestError(f"{param} has {bad!r}, but must hold token ids", param=param)


def _clamped_bias(logit_bias: Mapping[object, object]) -> dict[int, float]:
    """Token ids as ints (JSON has only strings for keys), biases between -100 and 100."""
    biases = {}
    for key, value in logit_bias.items():
        digits = key.strip() if isinstance(key, str) else ""
        is_id = _is_int(key) or (digits.isascii() and digits.isdigit() and len(digits) < 19)
        if not is_id or int(key) < 0:  # type: ignore[call-overload]
            raise InvalidRequestError(f"logit_bias has the key {key!r}, but keys must be token ids", param="logit_bias")
        if not _is_number(value):
            raise InvalidRequestError(
                f"logit_bias[{key}] is {value!r}, but must be a finite number", param="logit_bias"
            )
        biases[int(key)] = min(max(float(value), -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)  # type: ignore[call-overload, arg-type]
    return biases


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
        logprobs: None, or how many of the most probable tokens to report beside the drawn one, at each position; -1 is
            all.
        prompt_logprobs: the same for the tokens of the prompt. The request then does not read the prefix cache.
        logprob_token_ids: tokens to report too at each output position, whatever their rank; at most 128.
        frequency_penalty: taken off a token's logit for each time the output has it, in [-2, 2].
        presence_penalty: taken off the logit of each token that the output has, in [-2, 2].
        repetition_penalty: divides a positive logit, multiplies a negative one, of each token of prompt and output.
        logit_bias: token id -> what is added to its logit, clamped to [-100, 100]; at most 1024 ids.
        bad_words: texts that the output must not have, at the front of a word or within one; at most 128.
        allowed_token_ids: the only tokens that may be drawn; None = all.
        min_tokens: before that many output tokens nothing ends the output: stop tokens (end-of-sequence ones even with
            ignore_eos) are not drawn, and stop strings are not looked for.
        structured_outputs: the form of the output; None = any.
        beam_search: instead of drawing, find the n most probable outputs, best first; see `BeamSearchParams`.

    The order: structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias,
    repetition_penalty, frequency_penalty, presence_penalty, temperature, min_p, top_k, top_p. Log-probabilities are
    those before any of these. Where bad_words and min_tokens leave no token that may be drawn, they give way.

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
    prompt_logprobs: int | None = None
    logprob_token_ids: Collection[int] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Collection[str] = ()
    allowed_token_ids: Collection[int] | None = None
    min_tokens: int = 0
    skip_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.FINAL_ONLY
    beam_search: BeamSettings | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "logprob_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            is_list = isinstance(value, Collection) and (name == "stop" or not isinstance(value, str))
            _check(value is None or is_list, name, value, "a list")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _check(isinstance(self.output_kind, OutputKind), "output_kind", self.output_kind, "an OutputKind")
        is_form = self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        _check(is_form, "structured_outputs", self.structured_outputs, "StructuredOutputs")
        if self.structured_outputs is not None and self.beam_search is not None:
            raise InvalidRequestError(
                "structured_outputs cannot be had with beam search; leave one of them out", param="structured_outputs"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        self._check_shape()
        self._check_output()
        self._check_logprobs()
        self._check_constraints()

    def _check_shape(self) -> None:
        """The parameters of the distribution that is drawn from."""
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            _check(_is_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        _check(0 <= self.temperature <= 2, "temperature", self.temperature, "between 0 and 2")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        rule = "-1, 0 (both: off) or a positive integer"
        _check(_is_int(self.top_k) and -1 <= self.top_k < 2**31, "top_k", self.top_k, rule)
        is_seed = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _check(is_seed, "seed", self.seed, "a signed 64-bit integer")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "between -2 and 2")
        limits = f"between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}"
        is_sound = MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY
        _check(is_sound, "repetition_penalty", self.repetition_penalty, limits)

    def _check_output(self) -> None:
        """How many outputs, and where they end."""
        _check(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"an integer between 1 and {MAX_N}")
        is_length = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check(is_length, "max_tokens", self.max_tokens, "at least 1")
        most = math.inf if self.max_tokens is None else self.max_tokens
        rule = "0 or a positive integer, and at most max_tokens"
        _check(_is_int(self.min_tokens) and 0 <= self.min_tokens <= most, "min_tokens", self.min_tokens, rule)
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", list(self.stop), "non-empty strings")
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        num_stops = len(set(self.stop_token_ids))
        if self.min_tokens and num_stops > MAX_EARLY_STOP_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {num_stops} ids, but with min_tokens at most {MAX_EARLY_STOP_IDS} are allowed",
                param="stop_token_ids",
            )

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or (_is_int(value) and value >= -1), name, value, "-1 (all), 0 or a positive integer")
        ids = tuple(dict.fromkeys(self.logprob_token_ids or ()))
        object.__setattr__(self, "logprob_token_ids", ids)
        _check_token_ids("logprob_token_ids", ids)
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(
                f"logprob_token_ids has {len(ids)} ids, but at most {MAX_LOGPROB_TOKEN_IDS} are allowed",
                param="logprob_token_ids",
            )

    def _check_constraints(self) -> None:
        """Which tokens may be drawn."""
        given = self.logit_bias
        _check(given is None or isinstance(given, Mapping), "logit_bias", given, "a mapping of token ids to numbers")
        object.__setattr__(self, "logit_bias", _clamped_bias(given) if given else None)  # type: ignore[arg-type]
        if given and len(given) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias has {len(given)} ids, but at most {MAX_LOGIT_BIASES} are allowed", param="logit_bias"
            )
        is_text = all(isinstance(word, str) and word.strip() for word in self.bad_words)
        _check(is_text, "bad_words", list(self.bad_words), "strings that are not blank")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words has {len(self.bad_words)} entries, but at most {MAX_BAD_WORDS} are allowed",
                param="bad_words",
            )
        if self.allowed_token_ids is not None:
            ids = tuple(dict.fromkeys(self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", ids)
            _check_token_ids("allowed_token_ids", ids)
            if not ids:
                raise InvalidRequestError("allowed_token_ids is empty; name a token id", param="allowed_token_ids")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the output's log-probabilities are to be reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)


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
        matcher: where it is in the request's grammar; None where that has none.
    """

    __slots__ = (
        "block_keys",
        "block_table",
        "finish_reason",
        "host_blocks",
        "index",
        "matcher",
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
        self.matcher: Matcher | None = None if request.grammar is None else request.grammar.new_matcher()
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
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
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
        bad_words: token ids of the bad words, each as it is spelled at the front of a text and, where that differs,
            within one.
        vocab_size: tokens that may be drawn.
        pooling: the request is for the prompt's embedding, and no token is drawn; None = for output.
        num_prompt_logprobs: leading tokens of the prompt whose log-probabilities are known.
        grammar: of the output; None = any output.
        constraints: what the draws change in the logits or report of them; None = nothing.
        beams: the state of a beam search; None for a request that draws.
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    vocab_size: int = 2**31 - 1
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    pooling: PoolingParams | None = None
    grammar: Grammar | None = None
    constraints: Constraints | None = field(init=False)
    beams: BeamSearch | None = field(init=False)
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.constraints = Constraints.of(self)
        settings = self.params.beam_search
        self.beams = None if settings is None else BeamSearch(settings, self.params.n)
        mask = (1 << 64) - 1
        self.sequences = [Sequence(self, i, (self.seed + i) & mask) for i in range(self.params.n)]

    @property
    def is_finished(self) -> bool:
        return all(s.status is SequenceStatus.FINISHED for s in self.sequences)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return frozenset(self.params.stop_token_ids).union(() if self.params.ignore_eos else self.eos_token_ids)
