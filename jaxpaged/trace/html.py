"""The page that shows a trace: one HTML file that fetches nothing.

The trace is embedded compressed and in base64, so nothing of it can be markup; the page writes it to text nodes and
canvases only, and a content security policy lets no script run but the page's own.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from jaxpaged.trace.format import Header, Record

_SCRIPTS = ("model.js", "draw.js", "timeline.js", "live.js", "app.js")


def trace_page(header: Header, records: Iterable[Record]) -> str:
    """A page that shows these records. They must fit one another: see `Replay`."""
    text = "\n".join([header.to_json(), *(record.to_json() for record in records)])
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    data = f'<script type="application/octet-stream" id="trace-data">{packed}</script>'
    return _page(title=header.model or "trace", body="", data=data, policy=page_policy())


def live_page(title: str, events_path: str) -> str:
    """A page that shows what the server-sent events at `events_path` bring."""
    return _page(title=title, body=f' data-live="{html.escape(events_path)}"', data="", policy=page_policy(live=True))


@cache
def page_policy(*, live: bool = False) -> str:
    """The content security policy of the page."""
    script, style = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (_script(), _read("page.css"))
    )
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _page(*, title: str, body: str, data: str, policy: str) -> str:
    parts = {
        "CSP": policy,
        "TITLE": html.escape(title),
        "BODY": body,
        "STYLE": _read("page.css"),
        "DATA": data,
        "SCRIPT": _script(),
    }
    pieces = _read("page.html").split("@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


@cache
def _script() -> str:
    return "\n".join(_read(name) for name in _SCRIPTS)


@cache
def _read(name: str) -> str:
    return (files("jaxpaged.trace") / "page" / name).read_text(encoding="utf-8")
