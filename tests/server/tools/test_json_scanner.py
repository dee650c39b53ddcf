"""The JSON scanner against Python's parser, and values of XML parameters against their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server.tools.tool_support import PLACES, cut

from jaxpaged.server.tools.json_scanner import JsonScanner
from jaxpaged.server.tools.xml_values import ParameterValue

FRAGMENTS = [
    "{", "}", "[", "]", ",", ":", '"', '"a"', '"a":', "1", "0", "-", ".", "e", "E+", "01", "1.5e-3", "true", "false",
    "null", "nul", "NaN", "\\", "\\n", '\\"', "\\u", "00e9", "\\ud83e", "\\x", " ", "\n", "\t", "\x00", "é", "🦊", "'",
    "\u2028", "\x7f", "\xa0", "Infinity", "١",
]  # fmt: skip
VALID = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def refuse(constant: str) -> None:
    raise ValueError(constant)


def scan(pieces: list[str]) -> tuple[JsonScanner, str, int]:
    """The scanner, what it passed on, and how many characters it took."""
    scanner, out, taken = JsonScanner(), [], 0
    for piece in pieces:
        pos = 0
        while pos < len(piece) and not scanner.done and not scanner.failed:
            pos = scanner.feed(piece, pos, out)
        taken += pos
    return scanner, "".join(out), taken


def check(text: str, places: list[int]) -> None:
    scanner, out, taken = scan(cut(text, places))
    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=refuse).raw_decode(text)
    except ValueError:
        assert not scanner.done
        return
    assert scanner.done and taken == end
    assert json.loads(out) == value  # also where raw control characters stood in strings


@given(middle=st.lists(st.sampled_from(FRAGMENTS), max_size=12), places=PLACES)
@example(middle=['"a":', "01", "}"], places=[])
@example(middle=['"a":', "1", ",", "}"], places=[])
@example(middle=['"a"', "\n", ":", "\t", '"', "\n", '"', "}", "}"], places=[])
@example(middle=['"a":', "١", "}"], places=[])
def test_any_text(middle: list[str], places: list[int]) -> None:
    check("{" + "".join(middle), places)


@given(
    value=st.dictionaries(st.text(), VALID, max_size=3),
    indent=st.sampled_from([None, 1]),
    change=st.none() | st.tuples(st.integers(0, 10_000), st.sampled_from(["", *FRAGMENTS])),
    places=PLACES,
)
def test_objects_and_objects_with_a_fault(
    value: Any, indent: int | None, change: tuple[int, str] | None, places: list[int]
) -> None:
    text = json.dumps(value, indent=indent)
    if change is not None:
        at = 1 + change[0] % len(text)
        text = text[:at] + change[1] + text[at + 1 :]
    check(text, places)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (None, "5", "5"),
        ({}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "null", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "None", "None"),
        ({"type": "boolean"}, "False", False),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": 3}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"oneOf": [{"anyOf": [{"type": "object"}]}]}, '{"a": 1}', {"a": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"$ref": "#/$defs/Place"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Name"}, "5", "5"),
    ],
)
def test_parameter_values(schema: Any, text: str, value: Any) -> None:
    for pieces in ([text], list(text)):
        parameter = ParameterValue(schema)
        written = parameter.opening + "".join(parameter.feed(p) for p in pieces) + parameter.end()
        assert json.loads(written) == value and type(json.loads(written)) is type(value)
