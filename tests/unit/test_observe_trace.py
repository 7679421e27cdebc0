"""Traces: what is written, how much of it at most, and what a cut-off file still says."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from meshd.errors import DataError
from meshd.observe.log import fields_of
from meshd.observe.timeline import (
    Timeline,
    both,
    cause,
    gaps,
    length,
    main,
    parse,
    table,
    timelines,
    union,
)
from meshd.observe.trace import Events, Timed, Tracer
from meshd.proto import meshd_pb2 as pb
from meshd.transport.chunks import split

ID = pb.MicrobatchId(origin="12D3KooWlongpeerid", sequence=7, attempt=2)


def written(path: Path) -> None:
    """A trace of two phases, and of a payload of two chunks."""

    async def scenario() -> None:
        tracer = Tracer()
        async with tracer.writing(path, "peer"):
            tracer.named("a0", 3)
            with tracer.phase("device", "forward", ID, 1):
                pass
            with tracer.phase("gossip", "exchange", partner="b0") as phase:
                phase.note(bytes=12)
            handed = tracer.sending("uplink to b1", ID, 2, 100_000, "forward")
            assert handed is not None
            for chunk in split(ID, 2, bytes(100_000)):
                handed(pb.LinkMessage(chunk=chunk))

    asyncio.run(scenario())


def phases(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in events if item["ph"] == "X"}


def test_a_trace_is_json_with_one_event_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    written(path)
    events = json.loads(path.read_text())
    assert len(path.read_text().splitlines()) == len(events) + 2
    found = phases(events)
    assert list(found) == ["forward", "exchange", "send"]
    known = {"origin": "ngpeerid", "sequence": 7, "attempt": 2}
    assert found["forward"]["args"] == known | {"hop": 1}
    assert found["exchange"]["args"] == {"partner": "b0", "bytes": 12}
    assert found["send"]["args"] == known | {"hop": 2, "bytes": 100_000, "priority": "forward"}
    assert {item["cat"] for item in found.values()} == {"device", "gossip", "uplink"}
    names = {item["args"]["name"] for item in events if item["name"] in ("thread_name", "process_name")}
    assert names == {"a0, stage 3", "device", "gossip", "uplink to b1"}
    assert {item["pid"] for item in events} == {events[0]["pid"]}


def test_a_trace_that_is_cut_off_anywhere_still_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    written(path)
    text = path.read_text()
    whole = parse(text, "whole")
    for end in range(len(text)):
        events = parse(text[:end], "cut")
        assert events == whole[: len(events)]
        assert len(events) >= text[:end].count("\n") - 2
    with pytest.raises(DataError, match="line 2"):
        parse("[\nsomething else\n{}", "other")


def test_a_trace_stops_at_its_bound_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"

    async def scenario() -> None:
        tracer = Tracer()
        async with tracer.writing(path, "peer", max_bytes=2000):
            async with asyncio.timeout(60):
                while tracer.on:
                    with tracer.phase("device", "forward", ID, 1):
                        await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert 1500 < path.stat().st_size <= 2000 + len("\n]\n")
    assert len(json.loads(path.read_text())) > 5
    said = [fields_of(record) for record in caplog.records if record.getMessage() == "trace_full"]
    assert [fields["max_bytes"] for fields in said] == [2000]


def test_off_nothing_is_made_and_a_phase_begun_before_it_went_on_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    async def scenario() -> None:
        tracer = Tracer()
        early = tracer.phase("device", "early")
        assert early is tracer.phase("coder", "another")
        assert tracer.sending("uplink to b", ID, 1, 1, "forward") is None
        with early:
            async with tracer.writing(path, "peer"):
                with early:
                    pass
                with pytest.raises(ValueError), tracer.phase("device", "fails"):
                    raise ValueError

    asyncio.run(scenario())
    found = phases(json.loads(path.read_text()))
    assert list(found) == ["fails"]
    assert found["fails"]["args"] == {"ended_by": "ValueError"}


def test_a_directory_in_the_files_place_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Tracer().writing(tmp_path, "peer"):
            pass

    with pytest.raises(DataError, match="Fix: name a file in it"):
        asyncio.run(scenario())


def test_events_that_overlap_go_to_lanes_beside_each_other() -> None:
    events = Events("peer")
    times = [(0, 10), (10, 20), (5, 25), (24, 30), (26, 31), (8, 40)]
    lines = [line for begin, end in times for line in events.lines(Timed("coder", "encode", begin, end, {}))]
    made = parse("".join(lines), "made")
    lanes = [item["tid"] for item in made if item["ph"] == "X"]
    assert lanes == [1, 1, 2, 1, 2, 3]
    names = [item["args"]["name"] for item in made if item["name"] == "thread_name"]
    assert names == ["coder", "coder (2)", "coder (3)"]


def test_the_arithmetic_of_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert length([(0, 4), (5, 7)]) == 6
    assert both([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 20)]) == [(1, 2), (3, 4), (5, 6), (8, 9)]
    assert both([(0, 4)], []) == []
    assert gaps([(1, 2), (4, 6)], (0, 6)) == [(0, 1), (2, 4)]
    assert gaps([], (0, 6)) == [(0, 6)]


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ({"away": [(0, 100)], "coder": [(0, 50)]}, "encoding or decoding"),
        ({"away": [(0, 100)], "coder": [(0, 49)]}, "what is away: the peers behind it"),
        ({"away": [(0, 30)], "uplink": [(20, 90)]}, "its uplink"),
        ({"waiting": [(0, 100)], "uplink": [(20, 90)]}, "its uplink"),
        ({"uplink": [(0, 10)], "gossip": [(0, 100)]}, "others: nothing was here"),
    ],
)
def test_a_gap_is_explained_by_what_filled_half_of_it(
    busy: dict[str, list[tuple[int, int]]], expected: str
) -> None:
    assert cause((0, 100), busy) == expected


def phase(pid: int, category: str, begin: int, end: int, name: str = "x") -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "cat": category, "name": name, "ts": begin, "dur": end - begin}


def test_shares_and_gaps_are_of_each_peer_alone() -> None:
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "a0, stage 0"}},
        phase(1, "device", 0, 400_000),
        phase(1, "device", 900_000, 1_000_000, "gossip"),
        phase(1, "uplink", 200_000, 800_000),
        phase(2, "waiting", 0, 100_000),
    ]
    other, first = timelines(events)
    assert (other.name, first.name) == ("2", "a0, stage 0")
    assert first.share(first.busy["device"]) == 0.5
    assert first.share(both(first.busy["device"], first.busy["uplink"])) == 0.2
    assert first.longest_gaps() == [(400_000, 900_000)]
    assert other.longest_gaps() == [(0, 100_000)]
    text = table([first])
    assert " 50.0%   60.0%   20.0% 10.0%, 100.0 ms at most" in text
    assert "idle 0.500 s at 0.400 s, waiting for its uplink" in text
    assert table([Timeline("none", (0, 0), {})])


def test_files_are_merged_into_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, out = tmp_path / "one.json", tmp_path / "out.json"
    written(one)
    cut = tmp_path / "cut.json"
    cut.write_text(one.read_text()[:-40])
    assert main([str(one), str(cut), "--out", str(out)]) == 0
    merged = json.loads(out.read_text())
    assert merged == parse(one.read_text(), "one") + parse(cut.read_text(), "cut")
    assert "a0, stage 3" in capsys.readouterr().out
    assert main([str(tmp_path / "missing.json")]) == 2
    assert "Fix: name a trace file that can be read" in capsys.readouterr().err
