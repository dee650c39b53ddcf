"""Messages as chat templates want them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.messages import content_text, template_messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
    ],
)
def test_texts(content: Any, text: str) -> None:
    assert content_text(content) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (5, "content of type int"),
        ({"type": "text", "text": "a"}, "content of type dict"),
        ([5], "content of type 'int'"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "type 'image_url', but this model takes text only"),
        ([{"type": "text"}], "a part of type 'text' without a text"),
        ([{"text": "a"}], "content of type None"),
    ],
)
def test_what_is_no_text(content: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        template_messages([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = template_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert call["function"]["arguments"] == arguments, "what was given does not change"


@pytest.mark.parametrize("calls", [None, [], ()])
def test_no_calls_are_no_field(calls: Any) -> None:
    assert template_messages([{"role": "assistant", "content": "a", "tool_calls": calls}]) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"function": {"name": "f", "arguments": "{"}}, "must be a JSON object: Expecting"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "must be a JSON object"),
        ({"function": {"name": "f", "arguments": 5}}, "must be a JSON object"),
        ({"function": {"arguments": {}}}, "is no tool call"),
        ("f", "is no tool call"),
    ],
)
def test_malformed_calls(call: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        template_messages([{"role": "assistant", "tool_calls": [call]}])


def test_what_is_no_message() -> None:
    with pytest.raises(InvalidRequestError, match="'hi' is no message"):
        template_messages(["hi"])  # type: ignore[list-item]


def test_reasoning_has_the_name_that_templates_know() -> None:
    [message] = template_messages([{"role": "assistant", "content": "a", "reasoning": "r"}])
    assert message["reasoning_content"] == message["reasoning"] == "r"
    [message] = template_messages([{"role": "assistant", "reasoning": "r", "reasoning_content": "c"}])
    assert message["reasoning_content"] == "c"
