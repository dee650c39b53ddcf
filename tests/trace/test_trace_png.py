"""The pictures: colours stand where the trace says, and names are drawn as they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from trace_support import HOSTILE_IDS, record_all, request

from jaxpaged.cli import main
from jaxpaged.trace import Replay, TraceFile
from jaxpaged.trace.format import Header
from jaxpaged.trace.png import colour_of, draw_map, draw_pool, moment_png, new_figure, timeline_png

pytest.importorskip("matplotlib")

HEADER, RECORDS = record_all([request("A", 6, 12), request("B", 9, 20), request("C", 7, 16)], prefix_caching=False)


def test_the_map_has_each_block_in_its_owners_colour() -> None:
    axes = new_figure(4, 3).subplots()
    draw_map(axes, HEADER, RECORDS)
    image = axes.images[0].get_array()
    assert image.shape == (12, len(RECORDS), 3)
    replay = Replay(HEADER)
    for column, record in enumerate(RECORDS):
        replay.apply(record)
        owner = {block: r for (r, _), table in replay.tables.items() for block in table}
        for block in range(1, 13):
            expected = colour_of(owner[block]) if block in owner else (0xEC / 255, 0xEF / 255, 0xF3 / 255)
            assert image[block - 1, column].tolist() == pytest.approx(expected)


def test_the_pool_has_as_much_of_each_colour_as_there_are_tokens() -> None:
    replay = Replay(HEADER)
    for record in RECORDS[:4]:
        replay.apply(record)
    axes = new_figure(4, 3).subplots()
    draw_pool(axes, replay)
    area: Counter[tuple[float, ...]] = Counter()
    for patch in axes.patches:
        if patch.get_alpha() is None:
            area[tuple(round(c, 6) for c in patch.get_facecolor()[:3])] += patch.get_width() * patch.get_height()
    block = 0.92**2
    for r in range(3):
        tokens = replay.kv_lens[r, 0]
        assert area[tuple(round(c, 6) for c in colour_of(r))] == pytest.approx(block * tokens / 4, rel=1e-6)


def test_pictures_of_hostile_ids(tmp_path: Path) -> None:
    header, records = record_all([request(name[:4], 4, 3) for name in HOSTILE_IDS[:4]])
    header = Header(**{**vars(header), "model": "$\\frac{$ & <b>"})
    for picture in (moment_png(header, records), timeline_png(header, records)):
        assert picture.startswith(b"\x89PNG\r\n") and len(picture) > 10_000
    trace = tmp_path / "t"
    with TraceFile(trace) as file:
        file.begin(header)
        for record in records:
            file.write(record)
    out, line = tmp_path / "moment.png", tmp_path / "line.png"
    assert main(["view", str(trace), "--png", str(out), "--step", "1", "--timeline-png", str(line)]) == 0
    assert out.read_bytes() == moment_png(header, records, 1)
    assert not (tmp_path / "t.html").exists()
