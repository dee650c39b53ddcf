"""Values of XML parameters as JSON, by the types that a function's schema gives them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_STRING = frozenset({"string"})


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class ParameterValue:
    """One value, in pieces: the line breaks right after its start tag and before its end tag are not part of it.

    A string is passed on as it comes; a value of any other type is looked at when it is complete.

    Attributes:
        opening: JSON before the first piece.
    """

    def __init__(self, schema: Any) -> None:
        self._types = _types_of(schema)
        self._is_string = self._types == _STRING
        self._started = False
        self._break = ""  # a line break that may turn out to be the last
        self._pieces: list[str] = []
        self.opening = '"' if self._is_string else ""

    def feed(self, text: str) -> str:
        """The JSON that is certain now."""
        if not text:
            return ""
        if not self._started:
            self._started = True
            text = text.removeprefix("\n")
        text = self._break + text
        self._break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._is_string:
            return json_string(text)[1:-1]
        self._pieces.append(text)
        return ""

    def end(self) -> str:
        """The JSON that is left once the value is complete."""
        return '"' if self._is_string else _convert("".join(self._pieces), self._types)

    def cut(self) -> str:
        """The JSON that is left of a value that was cut off."""
        return "" if self._is_string else "".join(self._pieces)


def _convert(text: str, types: frozenset[str]) -> str:
    """`text` as a JSON value of one of `types`, else as a string."""
    bare = text.strip()
    lower = bare.lower()
    if lower in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if lower in ("true", "false") and "boolean" in types:
        return lower
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json_string(text)
    kind = _TYPES.get(type(value), "null")
    fits = kind in types or (kind == "integer" and "number" in types)
    return bare if fits and kind != "string" else json_string(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """Names of the JSON types that a schema allows; a string where it does not say."""
    if not isinstance(schema, dict) or depth > 8:
        return _STRING
    if isinstance(schema.get("type"), (str, list)):
        return frozenset(str(name) for name in _as_list(schema["type"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return frozenset().union(*(_types_of(option, depth + 1) for option in schema[key]))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(_TYPES.get(type(value), "null") for value in schema["enum"])
    return frozenset({"object", "array", "string"}) if "$ref" in schema else _STRING


def _as_list(value: str | Iterable[Any]) -> Iterable[Any]:
    return [value] if isinstance(value, str) else value
