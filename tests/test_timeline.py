"""Traces of kernels become events; events become a picture, a table, and JSON that Perfetto reads."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autofuse.native_kernels.gpu.state import Event
from autofuse.timeline import LAYERS, Kind, Timeline, chrome_trace, draw_svg, read, summary

EVENTS = 8
ALL = 0xFF
Row = tuple[int, Kind, int, int]  # time, kind, rank, tile


def trace(*programs: list[Row]) -> list[list[list[int]]]:
    """What a kernel would have written."""
    filled = [
        [[time, kind << 32 | rank << 24 | tile] for time, kind, rank, tile in rows] for rows in programs
    ]
    return [rows + [[0, 0]] * (EVENTS - len(rows)) for rows in filled]


def reducing(rank: int = 1) -> Timeline:
    """Two programs that compute a tile of rank 0 and one of rank 1; the second starts late."""
    clock = 7_000_000_000 * (rank + 1)
    first: list[Row] = [
        (clock + 1000, Kind.BEGUN, rank, 0),
        (clock + 5000, Kind.COMPUTED, 0, 0),
        (clock + 5500, Kind.DRAINED, ALL, 0),
        (clock + 8500, Kind.WAITED, ALL, 3),
        (clock + 9000, Kind.REDUCED, rank, 3),
        (clock + 9250, Kind.ENDED, rank, 0),
    ]
    second: list[Row] = [
        (clock + 2000, Kind.BEGUN, rank, 0),
        (clock + 7000, Kind.COMPUTED, 1, 1),
        (clock + 8000, Kind.WAITED, 0, 5),
        (clock + 8125, Kind.COPIED, 0, 5),
        (clock + 9000, Kind.ENDED, rank, 0),
    ]
    return read(rank, trace(first, second))


def test_kinds_and_layout_are_those_of_the_kernels() -> None:
    assert {event.name: event.value for event in Event} == {kind.name: kind.value for kind in Kind}


STAMPING = """
import torch, triton
import triton.language as tl
from autofuse.native_kernels.triton.comm import BEGUN, COMPUTED, ENDED, WAITED, stamp

@triton.jit
def kernel(trace, rank, TRACE: tl.constexpr, EVENTS: tl.constexpr):
    program = tl.program_id(0)
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    tile = program
    while tile < 2:
        event = stamp(trace, program, event, COMPUTED, tile, 0xFFFFFF - tile, TRACE, EVENTS)
        tile += 1
    event = stamp(trace, program, event, WAITED, -1, 7, TRACE, EVENTS)
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)

trace = torch.zeros(2, 4, 2, dtype=torch.int64)
kernel[(2,)](trace, 1, False, 4)
assert not trace.any()
kernel[(2,)](trace, 1, True, 4)
print(trace.tolist())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_what_a_kernel_stamps(tmp_path: Path) -> None:
    """Program 0 has an event more than there is room for."""
    script = tmp_path / "stamping.py"
    script.write_text(STAMPING)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    timeline = read(1, json.loads(done.stdout))
    assert [(e.program, e.kind.name, e.peer, e.tile) for e in timeline.events] == [
        (0, "BEGUN", 1, 0),
        (0, "COMPUTED", 0, 0xFFFFFF),
        (0, "COMPUTED", 1, 0xFFFFFE),
        (0, "ENDED", 1, 0),
        (1, "BEGUN", 1, 0),
        (1, "COMPUTED", 1, 0xFFFFFE),
        (1, "WAITED", None, 7),
        (1, "ENDED", 1, 0),
    ]
    assert timeline.cut == 2  # program 1 has just enough: that cannot be told


def test_what_begins_when_the_event_before_ended() -> None:
    events = reducing().events
    assert [(e.kind.name, e.begin, e.end) for e in events if e.program == 0] == [
        ("BEGUN", 0.0, 0.0),
        ("COMPUTED", 0.0, 4.0),
        ("DRAINED", 4.0, 4.5),
        ("WAITED", 4.5, 7.5),
        ("REDUCED", 7.5, 8.0),
        ("ENDED", 8.0, 8.25),
    ]
    begun, computed, waited, *_ = (e for e in events if e.program == 1)
    assert (begun.begin, computed.begin, computed.end) == (1.0, 1.0, 6.0)
    assert (waited.peer, waited.tile) == (0, 5)


def test_all_ranks_are_no_peer_and_large_tiles_fit() -> None:
    timeline = read(0, trace([(1, Kind.BEGUN, 0, 0), (2, Kind.COMPUTED, ALL, 0xFFFFFF)]))
    assert (timeline.events[1].peer, timeline.events[1].tile) == (None, 0xFFFFFF)
    assert timeline.layer(timeline.events[1]) == "remote"


def test_own_tiles_and_those_of_peers_apart() -> None:
    timeline = reducing(rank=1)
    assert [timeline.layer(e) for e in timeline.events if e.kind is Kind.COMPUTED] == ["remote", "own"]


def test_programs_that_wrote_nothing() -> None:
    timeline = read(0, trace([(5, Kind.BEGUN, 0, 0), (9, Kind.ENDED, 0, 0)], []))
    assert (timeline.programs, len(timeline.events), timeline.computed) == (2, 2, 0.0)
    draw_svg([timeline], "nothing computed")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace of rank 3 is empty"):
        read(3, trace([], []))


def test_a_trace_that_was_too_short() -> None:
    """The last event has overwritten what came before it: nobody knows when it began."""
    rows: list[Row] = [(1000 * (i + 1), Kind.COMPUTED, 0, i) for i in range(EVENTS - 1)]
    timeline = read(0, trace([*rows, (99_000, Kind.ENDED, 0, 0)]))
    assert timeline.cut == 1
    assert timeline.events[-1].begin == timeline.events[-1].end == 98.0
    assert "the traces of 1 programs were too short" in summary([timeline])


def test_perfetto_json() -> None:
    found = json.loads(chrome_trace([reducing(0), reducing(1)]))["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["ph"] == "M"}
    assert names == {
        (rank, program): f"rank {rank}" if program is None else f"program {program}"
        for rank in range(2)
        for program in (None, 0, 1)
    }
    complete = [e for e in found if e["ph"] == "X" and e["pid"] == 1]
    assert complete[3] == {
        "name": "WAITED",
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "ts": 4.5,
        "dur": 3.0,
        "args": {"tile": 3, "rank": "all"},
    }
    assert {e["name"] for e in complete} <= {kind.name for kind in Kind}


def test_the_table() -> None:
    lines = summary([reducing(0), reducing(1)]).splitlines()
    rows = {line[:16].strip(): line[16:].split() for line in lines}
    assert lines[0].split() == ["kind", "count", "first", "mean", "last", "duration"]
    assert rows["COMPUTED own"] == ["2", "4.0", "5.0", "6.0", "4.5"]
    assert rows["COMPUTED remote"] == ["2", "4.0", "5.0", "6.0", "4.5"]
    assert rows["WAITED"] == ["4", "7.0", "7.2", "7.5", "2.0"]
    assert lines[-1] == "rank 1: last tile computed at 6.0, kernel ended at 8.2"


def test_the_picture_has_a_panel_a_rank_and_a_colour_a_layer() -> None:
    svg = ElementTree.fromstring(draw_svg([reducing(0), reducing(1)], "a < b"))
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "last tile computed", *LAYERS.values()} <= set(texts)
    drawn = [element.get("class") for element in svg.iter("{http://www.w3.org/2000/svg}path")]
    assert drawn.count("frame") == 2
    for layer in ("remote", "own", "wait", "reduce", "copy", "move"):
        assert drawn.count(layer) == 3, layer  # the legend's, and one in each panel


def test_many_programs_are_drawn_as_few_elements() -> None:
    rows: list[Row] = [(1000 * (i + 1), Kind.COMPUTED, i % 2, i) for i in range(EVENTS - 1)]
    svg = draw_svg([read(0, trace(*[rows] * 132))], "many")
    assert len(list(ElementTree.fromstring(svg))) < 60
    assert svg.count("M") > 132 * (EVENTS - 2)
