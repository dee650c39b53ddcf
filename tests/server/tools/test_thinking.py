"""Reasoning, apart from the answer and together with tool calls."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.tools.tool_support import PLACES, Answer, cut, in_two, new_reply, read

from jaxpaged.server.tools.thinking import Start, thinking_at_end, thinking_within

THINKING, ANSWER, UNDECIDED = Start.THINKING, Start.ANSWER, Start.UNDECIDED
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>'
F = [("f", '{"a": {"b": 1}}')]
GOLDENS: list[tuple[Start, str, Answer]] = [
    (THINKING, "so\n</think>\n\nHi", ("\n\nHi", "so\n", [])),
    (THINKING, "<think>\nso</think>Hi</think><think>", ("Hi</think><think>", "\nso", [])),
    (THINKING, " <think>a<think>b</think>", ("", "a<think>b", [])),
    (THINKING, "never </thin ends </think", ("", "never </thin ends </think", [])),
    (THINKING, "  <thi", ("", "  <thi", [])),
    (THINKING, "</think>", ("", "", [])),
    (THINKING, "", ("", "", [])),
    (UNDECIDED, "\n<think>\nso\n</think>\n\nHi", ("\n\nHi", "\nso\n", [])),
    (UNDECIDED, "<think></think>Hi", ("Hi", "", [])),
    (UNDECIDED, "Hi <think>no</think>", ("Hi <think>no</think>", "", [])),
    (UNDECIDED, " <thi", (" <thi", "", [])),
    (UNDECIDED, "<think>cut off", ("", "cut off", [])),
    (ANSWER, "<think>no</think> Hi", ("<think>no</think> Hi", "", [])),
    (THINKING, f"I call it.</think>\n\n{CALL}", ("", "I call it.", F)),
    (UNDECIDED, f"<think>I call it.</think>\n\nWait.\n{CALL}\n", ("\n\nWait.", "I call it.", F)),
    (UNDECIDED, CALL + CALL, ("", "", F + F)),
    (THINKING, f"maybe {CALL} or not </think>{CALL}", ("", f"maybe {CALL} or not ", F)),
]


@pytest.mark.parametrize(("start", "text", "expected"), GOLDENS)
def test_goldens_at_every_split(start: Start, text: str, expected: Answer) -> None:
    make = partial(new_reply, "hermes", start)
    assert read([text], make) == expected
    assert read([*text, ""], make) == expected
    for pieces in in_two(text):
        assert read(pieces, make) == expected, pieces
    if "tool_call" not in text:
        assert read([text], partial(new_reply, None, start)) == expected
    content, reasoning, calls = expected
    assert reasoning is not None
    assert read([text], partial(new_reply, "hermes", start, include_reasoning=False)) == (content, "", calls)


@given(
    start=st.sampled_from(Start),
    words=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "th", "\n", " ", "x", CALL, "<tool_call>", "🦊"])
    ),
    places=PLACES,
)
def test_any_text_at_any_split(start: Start, words: list[str], places: list[int]) -> None:
    text, make = "".join(words), partial(new_reply, "hermes", start)
    whole = read([text], make)
    assert read([*text, ""], make) == whole
    assert read(cut(text, places), make) == whole


def test_reasoning_comes_as_it_is_written() -> None:
    reply = new_reply("hermes", UNDECIDED)
    deltas = [reply.take(c, finished=False) for c in "<think>ab</think>cd"]
    assert [(d.reasoning, d.content) for d in deltas if d.model_fields_set] == [
        ("a", None),
        ("b", None),
        (None, "c"),
        (None, "d"),
    ]


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", UNDECIDED),
        ("<|im_start|>assistant\n<think>\n", THINKING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ANSWER),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", UNDECIDED),
    ],
)
def test_the_end_of_a_prompt(prompt: str, start: Start) -> None:
    assert thinking_at_end(prompt) is start


@pytest.mark.parametrize(
    ("message", "start"),
    [
        ("", UNDECIDED),
        ("<think>well", THINKING),
        ("<think>well</think>", ANSWER),
        ("The answer", ANSWER),
        ("x</think>", ANSWER),
    ],
)
def test_the_beginning_of_an_answer(message: str, start: Start) -> None:
    assert thinking_within(message) is start
