"""What the form of an output can be asked to be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import InvalidRequestError

MAX_NESTING = 64
MAX_CHARS = 128 * 1024
MAX_CHOICES = 10_000

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "tool_calls")


@dataclass(frozen=True)
class CallForm:
    """Calls of functions, as a model writes them: BEGIN{"name": NAME, ARGUMENTS_KEY: {...}}END.

    Attributes:
        functions: (name, JSON schema of the arguments as text, enforce all of it or be refused) of each.
        begin: marker before a call, a token of its own where the tokenizer has one; "" is none.
        end: marker behind a call.
        space: between the markers and the call.
        arguments_key: "arguments" or "parameters".
        separator: between calls; None is one call only.
    """

    functions: tuple[tuple[str, str, bool], ...]
    begin: str = ""
    end: str = ""
    space: str = ""
    arguments_key: str = "parameters"
    separator: str | None = None


# How every refusal of a grammar begins, and every failure of one on the way.
GRAMMAR_ERROR = "Grammar error: "


def grammar_error(reason: str) -> InvalidRequestError:
    """The refusal of a schema, regex or grammar, in one line."""
    return InvalidRequestError(f"{GRAMMAR_ERROR}{' '.join(reason.split())[:300]}", param="structured_outputs")


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an output; exactly one of the first seven fields is to be given.

    A text that has the form and cannot be continued ends the output, with finish_reason "stop", whatever min_tokens
    says. One that max_tokens, a stop string or a stop token ends may lack its end.

    Attributes:
        json: a JSON schema, as a mapping or as text. Keywords that cannot be enforced are refused, unless `lenient`.
        regex: the whole output, as Rust's `regex` writes it, save that \\d is 0 to 9: no look-around, no
            back-references.
        choice: the whole output is one of these texts.
        grammar: in llguidance's Lark dialect (with a rule `start`) or in GBNF (with a rule `root`).
        json_object: any JSON object.
        structural_tag: free text, in which what follows any of "triggers" is one of the "structures": each a "begin",
            a JSON "schema" and an "end". A mapping or its JSON text.
        tool_calls: calls of functions.
        lenient: do not enforce the keywords of a JSON schema that cannot be enforced.
        disable_any_whitespace: write JSON in its shortest form.
        thinking: what may come before: "open", as the prompt opened it, is text up to </think>; "optional" is that,
            from <think> on, or nothing; None is nothing.

    Raises:
        InvalidRequestError: none or several are given, or one is too large or of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    tool_calls: CallForm | None = None
    lenient: bool = False
    disable_any_whitespace: bool = False
    thinking: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(KINDS[:-1])}, but has {found}",
                param="structured_outputs",
            )
        for name in ("json", "structural_tag"):
            if name in given:
                object.__setattr__(self, name, json_text(name, getattr(self, name)))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("lenient", "disable_any_whitespace"):
            _check(isinstance(getattr(self, name), bool), name, "True or False")
        _check(self.tool_calls is None or isinstance(self.tool_calls, CallForm), "tool_calls", "a CallForm")
        _check(self.json_object in (None, False, True), "json_object", "True or False")
        _check(self.thinking in (None, "open", "optional"), "thinking", '"open", "optional" or None')
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            _check(text is None or isinstance(text, str), name, "a string")
            if text is not None:
                _check_text(name, text)
        object.__setattr__(self, "json_object", self.json_object or None)

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)


def _check(ok: bool, name: str, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"structured_outputs.{name} must be {rule}", param="structured_outputs")


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise grammar_error(f"{name} has {len(text)} characters, but at most {MAX_CHARS} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise grammar_error(f"{name} is not valid Unicode: {error}") from None


def _choices(given: object) -> tuple[str, ...]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(c, str) for c in given)
    _check(is_list and bool(given), "choice", "a list of strings that is not empty")
    choices = tuple(dict.fromkeys(given))  # type: ignore[call-overload]
    if len(choices) > MAX_CHOICES:
        raise grammar_error(f"choice has {len(choices)} texts, but at most {MAX_CHOICES} are allowed")
    _check_text("choice", "".join(choices))
    return choices


def json_text(name: str, given: object) -> str:
    """A JSON object, or its text, as text within the limits.

    Args:
        name: for errors.

    Raises:
        InvalidRequestError: not JSON, no object, too large or nested too deeply.
    """
    value = given
    if isinstance(given, str):
        _check_text(name, given)
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise grammar_error(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise grammar_error(f"{name} must be a JSON object, not {type(value).__name__}")
    _check_nesting(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise grammar_error(f"{name} is not valid JSON: {error}") from None
    _check_text(name, text)
    return text


def _check_nesting(name: str, value: object) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_NESTING:
            raise grammar_error(f"{name} is nested deeper than {MAX_NESTING} levels")
        level = [
            child
            for node in level
            if isinstance(node, (Mapping, list, tuple))
            for child in (node.values() if isinstance(node, Mapping) else node)
        ]
        depth += 1
