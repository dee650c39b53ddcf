"""The form of an answer, from what a request's body says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import InvalidRequestError
from jaxpaged.structured_outputs import KINDS, StructuredOutputs

# What a client may ask for; calls of tools are asked for otherwise.
_FIELDS = (*KINDS[:-1], "disable_any_whitespace")
_UNSUPPORTED = ("disable_additional_properties", "whitespace_pattern")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def answer_form(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputs | None:
    """The form that either of the two asks for; None = any.

    Raises:
        InvalidRequestError: both ask for one, or one is malformed.
    """
    form = None if response_format is None else _of_format(response_format)
    if structured_outputs is None:
        return form
    if form is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other; leave one of them out",
            param="structured_outputs",
        )
    for name in _UNSUPPORTED:
        if structured_outputs.get(name):
            raise InvalidRequestError(
                f"structured_outputs.{name} is not supported yet; leave it out", param="structured_outputs"
            )
    fields = {name: structured_outputs[name] for name in _FIELDS if structured_outputs.get(name) is not None}
    return StructuredOutputs(**fields)


def _of_format(given: Mapping[str, Any]) -> StructuredOutputs | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            raise _malformed('needs a "json_schema" with a "schema"')
        return StructuredOutputs(json=schema, lenient=named.get("strict") is False)  # type: ignore[union-attr]
    if kind == "structural_tag":
        if "format" in given:
            raise _malformed('of type "structural_tag" is supported with "structures" and "triggers", not "format"')
        return StructuredOutputs(structural_tag=given)
    raise _malformed(f"has the type {kind!r:.80}, but must have one of {', '.join(_FORMATS)}")


def _malformed(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"response_format {reason}", param="response_format")
