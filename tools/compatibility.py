"""Write docs/compatibility.md from the request models, docs/compatibility.json and docs/differences.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jaxpaged.server.chat_protocol import ChatCompletionRequest, TokenizeChatRequest
from jaxpaged.server.embeddings_protocol import EmbeddingsChatRequest, EmbeddingsRequest
from jaxpaged.server.protocol import (
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeTextRequest,
    UnsupportedFields,
    UnsupportedInText,
)
from jaxpaged.server.responses_api.conversation import REFUSED
from jaxpaged.server.responses_api.protocol import ResponsesRequest

DOCS = Path(__file__).resolve().parent.parent / "docs"
OUTPUT = DOCS / "compatibility.md"

# The tables of parameters: title, key of the anchor's names, model.
MODELS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Chats, completions and responses", "all", GenerationRequest),
    ("Chats only", "chat", ChatCompletionRequest),
    ("Completions only", "completions", CompletionRequest),
    ("Responses only", "responses", ResponsesRequest),
    ("/v1/embeddings, of prompts", "embeddings", EmbeddingsRequest),
    ("/v1/embeddings, of a chat", "embeddings_chat", EmbeddingsChatRequest),
    ("/tokenize, of a text", "tokenize", TokenizeTextRequest),
    ("/tokenize, of a chat", "tokenize_chat", TokenizeChatRequest),
    ("/detokenize", "detokenize", DetokenizeRequest),
)
_NO_EFFECT = "Accepted, without effect"
_INTRODUCTION = """\
# Compatibility

What the server that ours conforms to, {anchor}, offers, and whether ours does. "differs": it is there, but not quite
the same, or is refused where it would be ignored. A parameter with "no" gets 400 if its value would change the result;
those that are "ignored" are accepted, as unknown ones are, and change nothing.

`python tools/compatibility.py` writes this page; a test checks that it is up to date.
"""


def load(name: str) -> Any:
    return json.loads((DOCS / name).read_text())


def own_fields(model: type[BaseModel]) -> list[str]:
    """Fields of a model, without those that all three endpoints that generate have."""
    return [name for name in model.model_fields if name not in _shared(model)]


def _shared(model: type[BaseModel]) -> Collection[str]:
    """Fields that the table of a model leaves out, as another table has them."""
    is_special = issubclass(model, GenerationRequest) and model is not GenerationRequest
    return GenerationRequest.model_fields if is_special else ()


def status(model: type[BaseModel], name: str, data: Any) -> tuple[str, str]:
    """What the page says of a parameter: yes, no, differs or ignored; and a note."""
    if name in data["differs"]:
        return "differs", data["differs"][name]
    field = model.model_fields.get(name)
    if field is None:
        return "ignored", data["ignored"].get(name, "")
    note = " ".join((field.description or "").split())
    is_refused = (
        name in UnsupportedFields.model_fields
        or (issubclass(model, CompletionRequest) and name in UnsupportedInText.model_fields)
        or (issubclass(model, ResponsesRequest) and name in REFUSED)
    )
    if is_refused:
        return "no", note
    return ("ignored" if note.startswith(_NO_EFFECT) else "yes"), note


def missing_parameters(data: Any) -> list[str]:
    """Parameters of the anchor that neither a model nor the data file says anything about."""
    missing = []
    for _, key, model in MODELS:
        known = {*model.model_fields, *data["ignored"], *data["differs"]}
        missing += [f"{key}: {name}" for name in data["anchor"][key] if name not in known]
    return missing


def page() -> str:
    """The whole page."""
    data, differences = load("compatibility.json"), load("differences.json")
    parts = [_INTRODUCTION.format(anchor=differences["anchor"]), "## Endpoints\n"]
    parts.append(_table(("Endpoint", "", "Note"), ((f"`{n}`", s, note) for n, s, note in data["endpoints"])))
    for title, key, model in MODELS:
        names = dict.fromkeys([*own_fields(model), *data["anchor"][key]])
        names = dict.fromkeys(n for n in names if n not in _shared(model))
        parts.append(f"## Parameters: {title[0].lower()}{title[1:]}\n")
        rows = ((f"`{name}`", *status(model, name, data)) for name in names)
        parts.append(_table(("Parameter", "", "Meaning"), rows))
        if model is ResponsesRequest:
            refused = sorted(name for name in REFUSED if name in GenerationRequest.model_fields)
            parts.append(f"Of the parameters above, responses refuse {', '.join(f'`{n}`' for n in refused)}.\n")
    parts.append("## Metrics\n")
    parts.append("Each is there under `jaxpaged:` and, unless `--no-vllm-metric-aliases` is given, under `vllm:`.\n")
    parts.append(_table(("Metric", ""), ((f"`{name}`", state) for name, state in data["metrics"])))
    parts.append("## Deliberate differences\n")
    parts.append("".join(f"- {d['what']}\n" for d in (*differences["differences"], *differences["elsewhere"])))
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        yield "| " + " | ".join(head) + " |"
        yield "|" + " --- |" * len(head)
        for row in rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    return "".join(f"{line.replace('|  |', '| |')}\n" for line in lines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    check = parser.parse_args().check
    if missing := missing_parameters(load("compatibility.json")):
        print(f"docs/compatibility.json says nothing about {', '.join(missing)}", file=sys.stderr)
        return 1
    if not check:
        OUTPUT.write_text(page())
    elif not OUTPUT.exists() or OUTPUT.read_text() != page():
        print("docs/compatibility.md is out of date: run python tools/compatibility.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
