"""The page: nothing of a trace becomes markup, nothing is fetched, and what a browser shows is what the trace says."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trace_support import HOSTILE_IDS, record_all, request

from jaxpaged.cli import main
from jaxpaged.trace import Header, Record, Replay, TraceFile
from jaxpaged.trace.format import clean
from jaxpaged.trace.html import live_page, trace_page
from jaxpaged.trace.png import colour_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
TRACE = record_all([request("A", 6, 10, n=3), request("B", 9, 20), request("C", 7, 16), request("D", 11, 9)])


def save(path: Path, header: Header, records: list[Record]) -> str:
    with TraceFile(path) as file:
        file.begin(header)
        for record in records:
            file.write(record)
    return str(path)


def in_browser(page: Path, fragment: str = "") -> str:
    """The document as it is when its scripts have run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, f"{page.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def text_of(dom: str, element: str) -> str:
    found = re.search(rf'<(\w+) [^>]*id="{element}"[^>]*>(.*?)</\1>', dom, re.S)
    assert found is not None, element
    return html.unescape(re.sub("<[^>]*>", "\n", found[2])).strip()


def test_nothing_of_a_trace_is_markup() -> None:
    header, records = record_all([request(name, 4, 3) for name in HOSTILE_IDS])
    page = trace_page(Header(**{**vars(header), "model": HOSTILE_IDS[0]}), records)
    assert "<img" not in page and "<svg" not in page and "<b>" not in page
    assert page.count("<script") == page.count("</script>") == 2


def test_a_page_fetches_nothing() -> None:
    page = trace_page(*TRACE)
    assert not re.search(r"https?://|@import|url\(|<link|src=|href=|import\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src 'self'" in live_page("model", "dashboard/events")


def test_the_title_of_a_live_page_is_escaped() -> None:
    page = live_page("</title><script>alert(1)</script>", 'x" onload="y')
    assert "alert(1)</script>" not in page and 'onload="y' not in page


@in_a_browser
@pytest.mark.parametrize("index", [0, 7, 19, len(TRACE[1]) - 1])
def test_a_browser_shows_what_the_trace_says(tmp_path: Path, index: int) -> None:
    header, records = TRACE
    page = tmp_path / "page.html"
    page.write_text(trace_page(header, records), encoding="utf-8")
    dom = in_browser(page, f"#record={index}")
    replay = Replay(header)
    for record in records[: index + 1]:
        replay.apply(record)
    used, running = len(replay.references), sum(s == "running" for s in replay.status.values())
    assert text_of(dom, "t-step") == str(records[index].step)
    assert text_of(dom, "t-used") == str(used)
    assert text_of(dom, "t-used-unit").startswith("of 12 (")
    assert text_of(dom, "t-shared") == str(len(replay.shared))
    assert text_of(dom, "t-queue") == f"{running} / {len(replay.status) - running}"
    assert text_of(dom, "t-preempt") == str(replay.totals.preemptions)
    prefill, decode = replay.num_tokens
    assert text_of(dom, "t-tokens-unit") == f"{prefill} prefill + {decode} decode"
    queue = [replay.requests[r].id for r in replay.queue]
    shown = text_of(dom, "queue").split()
    assert [word for word in shown if word in "ABCD"] == queue
    colours = re.findall(r"background: rgb\((\d+), (\d+), (\d+)\)", dom[dom.index('id="queue"') :])
    assert [tuple(map(int, rgb)) for rgb in colours] == [
        tuple(round(255 * c) for c in colour_of(r)) for r in replay.queue
    ]
    assert text_of(dom, "message") == ""


@in_a_browser
def test_hostile_ids_do_nothing_in_a_browser(tmp_path: Path) -> None:
    header, records = record_all([request(name, 20, 3) for name in HOSTILE_IDS], num_blocks=8)
    page = tmp_path / "page.html"
    page.write_text(trace_page(header, records), encoding="utf-8")
    dom = in_browser(page)
    assert "<title>KV memory – bare</title>" in dom and "<img" not in dom and "<svg" not in dom
    titles = {html.unescape(title) for title in re.findall(r'<li title="([^"]*)"', dom)}
    assert clean(HOSTILE_IDS[1]) in titles  # it waits, and its id is the tooltip


def test_view_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = save(tmp_path / "steps.jsonl", *TRACE)
    assert main(["view", trace]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'steps.html'}\n"
    assert (tmp_path / "steps.html").read_text(encoding="utf-8") == trace_page(*TRACE)
    assert main(["view", trace, "--steps", "3:8", "-o", str(tmp_path / "part.html")]) == 0
    assert "KV memory" in (tmp_path / "part.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "500:"], "the trace has no steps to show: none from 500 on"),
        (["-o", "/no/where.html"], "cannot write /no/where.html: No such file or directory"),
        (["--png", "x.png", "--step", "999"], "the trace has no step 999; it goes from 0 to"),
    ],
)
def test_view_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "--png" in arguments:
        pytest.importorskip("matplotlib")
    assert main(["view", save(tmp_path / "t", *TRACE), *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_picture_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["view", save(tmp_path / "t", *TRACE), "--png", str(tmp_path / "x.png")]) == 2
    assert "PNG pictures need matplotlib; install it with: pip install 'jaxpaged[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
