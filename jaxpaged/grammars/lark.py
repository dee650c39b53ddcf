"""From what is asked for to a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from llguidance import StructTag, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from jaxpaged.structured_outputs import CallForm, StructuredOutputs, grammar_error

# White space between the parts of JSON: without a limit a small model may write nothing else until its length ends.
WHITESPACE = r"( {1,4}|\r?\n[ \t]{0,32})"
# Without this llguidance narrows what is certain to come to the tokens that the tokenizer makes of its text, which are
# special tokens where the text spells one, as in a choice "</s>".
NO_FORCING = '%llguidance {"no_forcing": true}\n'
THINK_START, THINK_END = "<think>", "</think>"


def to_lark(wanted: StructuredOutputs, special_tokens: Collection[str]) -> str:
    """A grammar for llguidance's matcher.

    Args:
        special_tokens: of the tokenizer.

    Raises:
        InvalidRequestError: it cannot be written as one.
    """
    body = _body(wanted, special_tokens)
    if wanted.thinking is None:
        if body.startswith("{"):
            return _joined(f"{NO_FORCING}start: @body\n", body)
        return f"{body}\n{NO_FORCING}"  # at the end, so that errors name the lines that were given
    think = f"think: THINK_TEXT {THINK_END}\nTHINK_TEXT: /(.|\\n)*/\n"
    if THINK_END not in special_tokens:
        think = f"think[lazy]: /(.|\\n)*{re.escape(THINK_END).replace('/', chr(92) + '/')}/\n"
    start = "start: think space @body\n"
    if wanted.thinking == "optional":
        start = f"start: @body | {_marker(THINK_START, special_tokens)} think space @body\n"
    return _joined(f"{NO_FORCING}{start}{think}space: /[ \\t\\r\\n]{{0,8}}/\n", body)


def _joined(main: str, body: str) -> str:
    """`main`, which refers to `body`, with it."""
    given = json.loads(body)["grammars"] if body.startswith("{") else [{"lark_grammar": body}]
    given[0]["name"] = "body"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *given]}, ensure_ascii=False)


def _body(wanted: StructuredOutputs, special_tokens: Collection[str]) -> str:
    match wanted.kind:
        case "json":
            assert isinstance(wanted.json, str)
            return f"start: {json_rule(json.loads(wanted.json), wanted)}"
        case "json_object":
            return f"start: {json_rule({'type': 'object'}, wanted)}"
        case "regex":
            assert wanted.regex is not None
            return _regex(wanted.regex)
        case "choice":
            assert wanted.choice is not None
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        case "structural_tag":
            assert isinstance(wanted.structural_tag, str)
            return _tags(json.loads(wanted.structural_tag), wanted, special_tokens)
        case "tool_calls":
            assert wanted.tool_calls is not None
            return _calls(wanted.tool_calls, wanted, special_tokens)
        case _:
            assert wanted.grammar is not None
            return _grammar(wanted.grammar)


def _regex(pattern: str) -> str:
    num_backslashes = len(pattern) - len(pattern.rstrip("\\"))
    if num_backslashes % 2:  # it would take in the end of the rule
        raise grammar_error(f"invalid regex {pattern!r:.80}: incomplete escape sequence at its end")
    return f"start: /{regex_to_lark(pattern, use_ascii='d')}/"


def json_rule(schema: dict[str, Any], wanted: StructuredOutputs) -> str:
    """The part of a rule that is JSON by `schema`."""
    return f"%json {json.dumps(_with_options(schema, wanted), ensure_ascii=False)}"


def _with_options(schema: dict[str, Any], wanted: StructuredOutputs) -> dict[str, Any]:
    options: dict[str, Any] = {"lenient": wanted.lenient}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = WHITESPACE
    return schema | {"x-guidance": options}


def _grammar(text: str) -> str:
    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise grammar_error("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises what its parser happens to stumble over
        raise grammar_error(f"{error}" or type(error).__name__) from None
    return lark


def _calls(form: CallForm, wanted: StructuredOutputs, special_tokens: Collection[str]) -> str:
    begin, end = (_marker(text, special_tokens) for text in (form.begin, form.end))
    space = _quoted(form.space)
    lines = ["start: call" if form.separator is None else f"start: call ({_quoted(form.separator)} call)*"]
    lines.append(f"call: {begin} {space} function {space} {end}")
    lines.append("function: " + " | ".join(f"f{i}" for i in range(len(form.functions))))
    for i, (name, schema, is_strict) in enumerate(form.functions):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": '
        arguments = json_rule(json.loads(schema), replace(wanted, lenient=not is_strict))
        lines.append(f'f{i}: {_quoted(head)} {arguments} "}}"')
    return "\n".join(lines)


def _marker(text: str, special_tokens: Collection[str]) -> str:
    return text if text in special_tokens else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _tags(given: dict[str, Any], wanted: StructuredOutputs, special_tokens: Collection[str]) -> str:
    triggers, structures = given.get("triggers"), given.get("structures")
    if not isinstance(triggers, list) or not isinstance(structures, list) or not structures:
        raise grammar_error('a structural tag needs a list "triggers" and a list "structures" that is not empty')
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise grammar_error("triggers must be strings that are not empty")
    tags = []
    for structure in structures:
        tag = structure if isinstance(structure, dict) else {}
        begin, end, schema = tag.get("begin"), tag.get("end", ""), tag.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise grammar_error('a structure needs a string "begin", a JSON "schema" and a string "end"')
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise grammar_error(f"begin {begin!r:.80} starts with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=_with_options(schema, wanted), end=end))
    are_special = {tag.trigger in special_tokens for tag in tags}
    if len(are_special) > 1:
        raise grammar_error("either all triggers or none must be special tokens of the tokenizer")
    grammar: str = StructTag.to_grammar(tags, assume_special=are_special.pop())
    return grammar
