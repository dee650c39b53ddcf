"""Tool calls in every format: hand-written answers, whole and at every possible split."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.tools.tool_support import PLACES, cut, in_two, new_reply, read

HERMES = [
    ("hello", "hello", []),
    ("", "", []),
    (" \n hi \n", " \n hi \n", []),
    ("1 < 2 <tool> </tool_call> <<tool_call", "1 < 2 <tool> </tool_call> <<tool_call", []),
    ('<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>', "", [("f", '{"city": "Rome"}')]),
    (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>\n',
        "Let me see.",
        [("f", '{"city": "Rome"}')],
    ),
    (
        'A <tool_call>{"name":"f","arguments":{"days":1}}</tool_call>\n<tool_call>\n'
        '{"name": "nobody.knows-it", "arguments": {}}\n</tool_call> B\n',
        "A B\n",
        [("f", '{"days":1}'), ("nobody.knows-it", "{}")],
    ),
    # Braces, quotes, backslashes and markers inside strings; characters beyond ASCII.
    (
        r'<tool_call>{"name": "f", "arguments": {"a}{": "say \"}</tool_call>\" \\", "b": [{"c": {}}, []]}}</tool_call>',
        "",
        [("f", r'{"a}{": "say \"}</tool_call>\" \\", "b": [{"c": {}}, []]}')],
    ),
    (
        '<tool_call>{"name": "f\\u00e9", "arguments": {"città": "Zürich 🦊 \\ud83e\\udd8a"}}</tool_call>',
        "",
        [("fé", '{"città": "Zürich 🦊 \\ud83e\\udd8a"}')],
    ),
    # Other orders and members; arguments that are not there.
    ('<tool_call>{"arguments": {"x": {}}, "id": [1, null], "name": "f"}</tool_call>', "", [("f", '{"x": {}}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {"x": -1.5e+3}}</tool_call>', "", [("f", '{"x": -1.5e+3}')]),
    ('<tool_call>{"name": "f", "arguments": {}, "name": "g", "arguments": {"x": 1}}</tool_call>', "", [("f", "{}")]),
    # Line breaks that belong escaped.
    ('<tool_call>{"name": "f", "arguments": {"x": "a\nb\t"}}</tool_call>', "", [("f", '{"x": "a\\nb\\t"}')]),
    # End tags and braces that are missing.
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_c', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "", [("f", '{"x": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ('<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", [("f", "{}")]),
    # Cut off: before it is a call, and in its arguments.
    ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    ('Hm <tool_call>\n {"name": "f", "arguments": {"city"', 'Hm <tool_call>\n {"name": "f", "arguments": {"city"', []),
    ('<tool_call>{"name": "f", "arguments": {"city": "Ro', "", [("f", '{"city": "Ro')]),
    ('<tool_call>{"name": "f", "arguments": {"days": 1', "", [("f", '{"days": 1')]),
    ('<tool_call>{"name": "f", "arguments": {"city": "R\\u00', "", [("f", '{"city": "R\\u00')]),
    # Malformed once the arguments have begun: a call stays one, and the rest is content.
    ('<tool_call>{"name": "f", "arguments": {"x": 1,}}</tool_call>', "}}</tool_call>", [("f", '{"x": 1,')]),
    ('<tool_call>{"name": "f", "arguments": {"x": "a"b"}} z', 'b"}} z', [("f", '{"x": "a"')]),
]
# No calls: not a character is lost.
MALFORMED = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call> \n",
    "<tool_call>not JSON</tool_call> and more",
    "<tool_call>[1]</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"city": Rome}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": nul}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
    '<tool_call>{"name" "f"}</tool_call>',
    "<tool_call>{'name': 'f', 'arguments': {\"x\": 1}}</tool_call>",
    '<tool_call>{"arguments": {"x": 01}, "name": "f"}</tool_call>',
    '<tool_call>{"arguments": {"x": +1}, "name": "f"}</tool_call>',
    '<tool_call>{"arguments": {"x": True}, "name": "f"}</tool_call>',
    '<tool_call>{"arguments": {"x": 1]}, "name": "f"}</tool_call>',
    '<tool_call>{"arguments": {"x": "\\u12g4"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": ' + "[" * 30,
]
XML = [
    ("hello <b>", "hello <b>", []),
    (
        "On it.\n\n<tool_call>\n<function=f>\n<parameter=city>\nNew York\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "On it.",
        [("f", '{"city": "New York", "days": 3}'), ("g", "{}")],
    ),
    # A string keeps all but the line breaks next to its tags.
    (
        '<tool_call><function=f><parameter=city>\n\n "a" \\ <b>\t\n</paramete r>🦊\n\n</parameter></function>',
        "",
        [("f", json.dumps({"city": '\n "a" \\ <b>\t\n</paramete r>🦊\n'}, ensure_ascii=False))],
    ),
    (
        "<tool_call><function=f><parameter=city></parameter><parameter=unknown>5</parameter></function></tool_call>",
        "",
        [("f", '{"city": "", "unknown": "5"}')],
    ),
    # Values have the types of the schema; where they do not fit, they are strings.
    (
        "<tool_call><function=f><parameter=ratio> 0.50 </parameter><parameter=sure>True</parameter>"
        '<parameter=extra>{"a": [1, {"b": null}]}</parameter><parameter=tags>\n["x"]\n</parameter>'
        "<parameter=note>None</parameter></function></tool_call>",
        "",
        [("f", '{"ratio": 0.50, "sure": true, "extra": {"a": [1, {"b": null}]}, "tags": ["x"], "note": null}')],
    ),
    (
        "<tool_call><function=f><parameter=days>soon</parameter><parameter=sure>1</parameter><parameter=extra>[1]"
        "</parameter><parameter=ratio>NaN</parameter><parameter=note>5</parameter></function></tool_call>",
        "",
        [("f", '{"days": "soon", "sure": "1", "extra": "[1]", "ratio": "NaN", "note": "5"}')],
    ),
    # Tags that are missing.
    ("<function=f><parameter=days>1</parameter></function></tool_call>", "", [("f", '{"days": 1}')]),
    ("<function=h></function>", "<function=h></function>", []),
    ("<tool_call><function=f><parameter=days>1</parameter></tool_call>", "", [("f", '{"days": 1}')]),
    # Cut off.
    ("x <tool_call>\n<function=f>\n<para", "x <tool_call>\n<function=f>\n<para", []),
    ("<tool_call><function=f><parameter=ci", "<tool_call><function=f><parameter=ci", []),
    ("<tool_call><function=f><parameter=city>\nNew Yo", "", [("f", '{"city": "New Yo')]),
    ("<tool_call><function=f><parameter=city>Rome\n</para", "", [("f", '{"city": "Rome')]),
    ("<tool_call><function=f><parameter=extra>{'a", "", [("f", '{"extra": {\'a')]),
    ("<tool_call><function=f><parameter=days>1</parameter>\n<para", "", [("f", '{"days": 1')]),
    ("<tool_call><function=f><parameter=days>1</parameter>\n<parameter=ci", "", [("f", '{"days": 1')]),
    # Malformed.
    ("<tool_call>f()</tool_call>", "<tool_call>f()</tool_call>", []),
    ("<tool_call><function=>x", "<tool_call><function=>x", []),
    ('<tool_call><function="f">x', '<tool_call><function="f">x', []),
    ("<tool_call><function=f>x</function>", "<tool_call><function=f>x</function>", []),
    ("<tool_call><function=f><parameter=days>1</parameter> x", " x", [("f", '{"days": 1')]),
    ("<tool_call><tool_call><function=g></function></tool_call>", "<tool_call>", [("g", "{}")]),
]
LLAMA = [
    ("hello {} { } {{ ; }", "hello {} { } {{ ; }", []),
    ('{"name": "f", "parameters": {"city": "Rome"}}', "", [("f", '{"city": "Rome"}')]),
    ('<|python_tag|>{"name": "f", "parameters": {"city": "Rome"}}', "", [("f", '{"city": "Rome"}')]),
    (
        'First: {"type": "function", "name": "f", "arguments": {"a": ";"}};\n<|python_tag|> {"name": "g"}; done',
        "First:; done",
        [("f", '{"a": ";"}'), ("g", "{}")],
    ),
    ('{"name": "f", "parameters": {"a": 1}}{"name": "g"};', "", [("f", '{"a": 1}'), ("g", "{}")]),
    # JSON that is an answer, calls inside of it included.
    ('{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ('{"calls": [{"name": "f", "parameters": {}}]} ok', '{"calls": [{"name": "f", "parameters": {}}]} ok', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|python_tag|>", "<|python_tag|>", []),
    ('{"name": "f", "parameters": {"a": ', '{"name": "f", "parameters": {"a": ', []),
    ('{"name": "f", "parameters": {"a": "b', "", [("f", '{"a": "b')]),
]
GOLDENS = [
    *[("hermes", *case) for case in HERMES],
    *[("hermes", text, text, []) for text in MALFORMED],
    *[("qwen", *case) for case in HERMES],
    *[("qwen", *case) for case in XML],
    *[("qwen3_coder", *case) for case in XML],
    ("qwen3_xml", *XML[1]),
    ("qwen3_coder", HERMES[4][0], HERMES[4][0], []),
    ("hermes", XML[1][0], XML[1][0], []),
    *[("llama3_json", *case) for case in LLAMA],
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), GOLDENS)
def test_goldens_at_every_split(parser: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    make = partial(new_reply, parser)
    expected = (content, "", calls)
    assert read([text], make) == expected
    assert read([*text, ""], make) == expected
    for pieces in in_two(text):
        assert read(pieces, make) == expected, pieces
    for size in (2, 3, 7):
        assert read([text[i : i + size] for i in range(0, len(text), size)] or [""], make) == expected


@given(case=st.sampled_from(GOLDENS), places=PLACES)
def test_goldens_in_random_pieces(case: Any, places: list[int]) -> None:
    parser, text, content, calls = case
    assert read(cut(text, places), partial(new_reply, parser)) == (content, "", calls)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "f>", "</function>", "<parameter=", "city>", "days>", "</parameter>",
    "<|python_tag|>", '{"name": "f", ', '"arguments": {', '"parameters": {', '"city": "', '"', "}", "}}", "{", "[", "]",
    ",", ":", ";", "\\", "\\u00", "n", "null", "1", "-", " ", "\n", "x", "é🦊", "<", ">", "</", '{"', '"name": ',
]  # fmt: skip


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "qwen", "llama3_json"])
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=25), places=PLACES)
def test_any_text_at_any_split(parser: str, fragments: list[str], places: list[int]) -> None:
    text, make = "".join(fragments), partial(new_reply, parser)
    whole = read([text], make)
    assert read([*text, ""], make) == whole
    assert read(cut(text, places), make) == whole
    if not whole[2]:
        assert whole[0] == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)
STYLES = st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])


@given(arguments=st.lists(OBJECTS, min_size=1, max_size=3), style=STYLES, swap=st.booleans(), places=PLACES)
def test_json_calls_that_json_wrote(arguments: list[Any], style: Any, swap: bool, places: list[int]) -> None:
    objects: list[dict[str, Any]] = [{"name": "f", "arguments": a} for a in arguments]
    if swap:
        objects = [dict(reversed(o.items())) for o in objects]
    written = [json.dumps(o, **style) for o in objects]
    texts = {
        "hermes": "Yes.\n" + "\n".join(f"<tool_call>\n{w}\n</tool_call>" for w in written),
        "llama3_json": "Yes. <|python_tag|>" + "; ".join(written),
    }
    for parser, text in texts.items():
        content, _, calls = read(cut(text, places), partial(new_reply, parser))
        assert content == "Yes."
        assert [(name, json.loads(text)) for name, text in calls] == [("f", a) for a in arguments]


@given(city=st.text(), days=st.integers(), extra=OBJECTS, tags=st.lists(JSON, max_size=3), places=PLACES)
def test_xml_calls(city: str, days: int, extra: Any, tags: Any, places: list[int]) -> None:
    values = {"city": city, "days": str(days), "extra": json.dumps(extra), "tags": json.dumps(tags)}
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    [(name, arguments)] = read(cut(text, places), partial(new_reply, "qwen3_xml"))[2]
    assert name == "f"
    assert json.loads(arguments) == {"city": city, "days": days, "extra": extra, "tags": tags}


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_deep_nesting(parser: str) -> None:
    nested = "[" * 20_000 + "]" * 20_000
    for start, content, calls in (
        ('{"arguments": {"x": ', "", [("f", '{"x": ' + nested + "}")]),
        ('{"name": {"x": ', '{"name": {"x": ' + nested + '}, "name": "f"}', []),
    ):
        text = start + nested + '}, "name": "f"}'
        if parser == "hermes":
            text, content = "<tool_call>" + text, content and "<tool_call>" + content
        assert read([text], partial(new_reply, parser)) == (content, "", calls)


def test_arguments_come_as_they_are_written() -> None:
    reply = new_reply("hermes")
    parts = [
        (c.index, c.function.arguments)
        for char in '<tool_call>{"name": "f", "arguments": {"a": "xyz"}}</tool_call>'
        for c in reply.take(char, finished=False).tool_calls or ()
    ]
    assert parts == [(0, '{"a": "'), *((0, c) for c in 'xyz"}')]


def test_only_the_first_call_without_parallel_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    make = partial(new_reply, "hermes", parallel_calls=False)
    for pieces in in_two(call + "\n" + call + "z"):
        assert read(pieces, make) == ("z", "", [("f", '{"a": 1}')])
