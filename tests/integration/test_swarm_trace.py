"""The timeline of a whole swarm: every microbatch's phases, in order, at every stage (issue 7)."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from swarm import swarm, tiny_spec

from meshd.observe.timeline import timelines
from meshd.sim.clock import run_virtual

# What a hop does with a microbatch, in this order, of a run of three stages.
HOPS = {
    0: ["forward", "encode", "away", "decode gradient", "backward"],
    1: ["decode", "forward", "encode", "away", "decode", "decode gradient", "backward", "encode gradient"],
    2: ["decode", "head", "encode gradient"],
}


def test_every_committed_microbatch_has_its_phases_in_order_and_lanes_do_not_overlap(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """Without faults each microbatch passes each stage once, on one of its replicas."""
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        model={"stages": 3, "cut": [2, 4]},
        snapshot={"evaluate": False},
        stop={"steps": 8},
    )
    stages = ["a0"], ["a1", "b1"], ["a2"]
    names = [name for stage in stages for name in stage]

    async def scenario() -> list[int]:
        async with swarm(spec, tmp_path) as s:
            s.traces = tmp_path / "traces"
            s.delay(0.05, *names)
            await s.gathered(*stages)
            await s.finished(*names)
            assert s.counted("gossip_exchanges") > 0
            account = s.account("a0")
            assert account.committed == account.injected > 8
            return list(range(account.committed))

    committed = run_virtual(scenario())
    traces = {name: json.loads((tmp_path / "traces" / f"{name}.json").read_text()) for name in names}
    for events in traces.values():
        check_lanes(events)
    for hop, holders in enumerate(stages):
        found = by_sequence([item for name in holders for item in traces[name]], hop)
        assert {number: names_of(phases) for number, phases in found.items()} == dict.fromkeys(
            committed, HOPS[hop]
        )
    check_sends(traces, len(committed))
    everyone = timelines([item for events in traces.values() for item in events])
    assert [one.name for one in everyone] == ["a0, stage 0", "a1, stage 1", "a2, stage 2", "b1, stage 1"]
    assert all(0 < one.share(one.busy["device"]) <= 1 for one in everyone)
    assert any(one.gossip_jobs for one in everyone)
    steps = [item for item in traces["a0"] if item["name"] == "step"]
    assert len(steps) == 8


def check_lanes(events: list[dict[str, Any]]) -> None:
    """Events on one lane do not overlap."""
    lanes = defaultdict(list)
    for item in events:
        if item["ph"] == "X":
            lanes[item["tid"]].append((item["ts"], item["ts"] + item["dur"]))
    assert len(lanes) > 3
    for times in lanes.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(times)))


def by_sequence(events: list[dict[str, Any]], hop: int) -> dict[int, list[dict[str, Any]]]:
    """A hop's phases by microbatch, in order of their beginnings. Those of what goes on count for the hop before."""
    found = defaultdict(list)
    for item in events:
        args = item["args"]
        if "sequence" not in args or item["cat"] not in ("device", "coder", "away"):
            continue
        if args["hop"] - (item["cat"] == "away") == hop:
            found[args["sequence"]].append(item)
    return {number: sorted(items, key=lambda item: item["ts"]) for number, items in found.items()}


def names_of(phases: list[dict[str, Any]]) -> list[str]:
    """Each begins when the one before it has ended."""
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(phases))
    return [phase["name"] for phase in phases]


def check_sends(traces: dict[str, list[dict[str, Any]]], committed: int) -> None:
    """Every payload went over each boundary once down and once up, and all of it was handed over."""
    sends = [item for events in traces.values() for item in events if item["name"] == "send"]
    for hop in (1, 2):
        for way in ("forward", "backward"):
            mine = [s["args"] for s in sends if s["args"]["hop"] == hop and s["args"]["priority"] == way]
            assert len({args["sequence"] for args in mine}) == len(mine) == committed
            assert min(args["bytes"] for args in mine) > 0
