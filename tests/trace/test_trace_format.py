"""The file: what is written, that it reads back the same and stays in bounds, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_support import HOSTILE_IDS, record_all, request

from jaxpaged.trace import Header, Record, Replay, TraceError, TraceFile, open_trace
from jaxpaged.trace.cut import cut

HEADER = '{"trace":"jaxpaged","version":1,"block_size":4,"num_blocks":9}'
STEP = '{"step":0,"t":0.0,"free":8,"findable":0}'


def write(path: Path, header: Header, records: list[Record]) -> Path:
    with TraceFile(path) as file:
        file.begin(header)
        for record in records:
            file.write(record)
    return path


def read(path: Path) -> tuple[Header, list[Record]]:
    with open_trace(path) as (header, records):
        return header, list(records)


def test_two_outputs_of_one_prompt_by_hand(tmp_path: Path) -> None:
    # A prompt of 6 tokens, blocks of 4: one full block and a half. Both outputs write their first token (the 7th) into
    # the half-full block 2: A.0 comes first and gets a copy, block 3; A.1 keeps block 2. The third and last token of
    # each is drawn in step 2 and never written. When all is over two full blocks can be found: block 1, and, as both
    # outputs drew the same tokens, one of blocks 2 and 3: that of A.0, who was first.
    header, records = record_all([request("A", 6, 3, n=2)])
    lines = write(tmp_path / "t", header, records).read_text().splitlines()
    assert lines[0] == (
        '{"trace":"jaxpaged","version":1,"block_size":4,"num_blocks":13,"num_host_blocks":0,"prefix_caching":true,'
        '"model":"bare","unit":"step","started":0.0}'
    )
    assert [json.loads(line) for line in lines[1:]] == [
        {
            "step": 0, "t": 0.0, "free": 10, "findable": 0, "new": [[0, "A", 6, 3, 2, 0, 0.0]],
            "admitted": [[0, 0, 6]], "tables": [[0, 0, 0, [1, 2]]], "prefills": [[0, 0, 6, 6]],
        },
        {
            "step": 1, "t": 1.0, "free": 9, "findable": 1, "tables": [[0, 0, 1, [3]], [0, 1, 0, [1, 2]]],
            "cached": [1], "copies": [[2, 3]], "decodes": [[0, 0, 7], [0, 1, 7]],
        },
        {"step": 2, "t": 2.0, "free": 9, "findable": 1},
        {
            "step": 3, "t": 3.0, "free": 12, "findable": 2, "idle": True,
            "finished": [[0, 0, "length"], [0, 1, "length"]], "tables": [[0, 0, 0, []], [0, 1, 0, []]],
            "cached": [3], "decodes_ended": [[0, 0], [0, 1]],
        },
    ]  # fmt: skip


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    header, records = record_all([request(name, 5 + i, 9) for i, name in enumerate(HOSTILE_IDS)])
    assert any(record.preempted for record in records)
    path = write(tmp_path / "t.jsonl", header, records)
    assert path.read_bytes().isascii()
    assert read(path) == (header, records)
    ids = [new.id for record in records for new in record.new]
    assert ids[:4] == list(HOSTILE_IDS[:4])
    assert ids[4] == "lone ? surrogate"
    assert len(ids[5]) == 200


def test_a_part_of_a_trace_leads_to_the_same_state(tmp_path: Path) -> None:
    header, records = record_all([request("A", 6, 10, n=3), request("B", 9, 20), request("C", 7, 16)])
    whole, part = Replay(header), Replay(header)
    chosen = cut(header, records, 5, 11)
    assert [record.step for record in chosen] == [5, 6, 7, 8, 9, 10, 11]
    for record in records[:12]:
        whole.apply(record)
    for record in chosen:
        part.apply(record)
    for name in ("tables", "references", "findable", "kv_lens", "decodes", "status", "requests", "open_sequences"):
        assert getattr(part, name) == getattr(whole, name), name


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    header, records = record_all([request("A", 6, 3)])
    path = write(tmp_path / "t", header, records)
    path.write_bytes(path.read_bytes()[:-5])
    assert read(path) == (header, records[:-1])


def test_a_file_stops_at_its_limit_and_what_is_recorded_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header, records = record_all([request("A", 6, 30)])
    path = tmp_path / "t"
    with TraceFile(path, max_bytes=500) as file:
        file.begin(header)
        for record in records * 20:
            file.write(record)
    assert 400 < path.stat().st_size <= 500
    _, kept = read(path)
    assert kept == records[: len(kept)]
    assert caplog.text.count("is at its limit of 500 B") == 1


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    header, records = record_all([request("A", 6, 3)])
    file = TraceFile("/dev/full")
    file.begin(header)
    for record in records * 3:
        file.write(record)
    file.close()
    assert caplog.text.count("cannot write the trace /dev/full: No space left on device") == 1


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^cannot write the trace .*/no/where: No such file or directory$"):
        TraceFile(tmp_path / "no" / "where")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; give a file that `jaxpaged trace`"),
        ("{}", "is no trace; give"),
        ("\x00\xff\n", "is no trace; give"),
        ("[" * 100_000 + "\n", "is no trace; give"),
        ('{"trace":"jaxpaged","version":2}\n', "has trace version 2; this program reads version 1"),
        ('{"trace":"jaxpaged","version":1,"block_size":4}\n', "line 1 of .*: num_blocks: Field required"),
        (HEADER.replace("9}", "0}") + "\n", "line 1 of .*: num_blocks: Input should be greater than or equal to 2"),
        (HEADER.replace("9}", "99999999999}") + "\n", "line 1 of .*: num_blocks: .* less than or equal to 16777216"),
        (f"{HEADER}\n{{\n", "line 2 of .*Invalid JSON"),
        (f"{HEADER}\n{STEP[:-1]},\"fre\":1}}\n", "line 2 of .*: fre: Unexpected keyword argument"),
        (f'{HEADER}\n{{"step":0,"t":0,"findable":0}}\n', "line 2 of .*: free: Field required"),
        (f"{HEADER}\n{STEP.replace('0.0', '-1')}\n", "line 2 of .*: t: Input should be greater than or equal to 0"),
        (f"{HEADER}\n{STEP.replace('0.0', 'NaN')}\n", "line 2 of .*: t: Input should be a finite number"),
        (f"{HEADER}\n{STEP.replace('8', '7')}\n", "counted 7 free blocks, the tables leave 8; the file is damaged"),
        (f'{HEADER}\n{STEP[:-1]},"admitted":[[3,0,1]]}}\n', "request 3 is not known; the file is damaged"),
        (f'{HEADER}\n{STEP[:-1]},"tables":[[0,0,0,[1]]]}}\n', "sequence 0 of request 0 is not known"),
        (f'{HEADER}\n{STEP[:-1]},"new":[[0,"a",1,1,1,0,0]],"tables":[[0,0,0,[9]]]}}\n', "block 9 is none of the pool"),
        (f'{HEADER}\n{STEP[:-1]},"new":[[0,"a",1,1,1,0,0]],"tables":[[0,0,2,[1]]]}}\n', "0 blocks keeps 2"),
        (f'{HEADER}\n{STEP[:-1]},"new":[[0,"a",1,1,1,0,0]],"decodes":[[0,0,3]]}}\n', "3 tokens in too few blocks"),
        (f'{HEADER}\n{STEP[:-1]},"decodes_ended":[[0,0]]}}\n', "ends to decode, but did not"),
        (f'{HEADER}\n{STEP[:-1]},"cached":[1]}}\n', "counted 0 findable blocks, here are 1"),
        (f'{HEADER}\n{STEP[:-1]},"finished":[[0,0,"stop"]]}}\n', "ends, but was not open"),
        (f"{HEADER}\n{STEP.replace('0,', '5,', 1)}\n{STEP}\n", "step 0 of the trace follows step 5"),
        (f"{HEADER}\n", "the trace has no steps to show: none at all"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(TraceError, match=message) as caught, open_trace(path) as (header, records):
        cut(header, records)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(TraceError, match=r"^cannot read the trace .*/none: No such file"),
        open_trace(tmp_path / "none"),
    ):
        pass


def test_steps_that_a_trace_does_not_have() -> None:
    header, records = record_all([request("A", 6, 3)])
    with pytest.raises(TraceError, match="no steps to show: none from 90 on; its last is 3"):
        cut(header, records, 90)
