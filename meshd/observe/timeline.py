"""Lays the traces of several peers side by side, and says in numbers what can be seen in them (docs/trace.md):
`python -m meshd.observe.timeline FILES... --out merged.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshd.errors import DataError, MeshdError

# Microseconds: from, to.
Interval = tuple[int, int]
Event = dict[str, Any]

# What can explain a gap of the device, the most telling first: room in flight is waited for whenever a link is slow,
# and some microbatches are nearly always away. Gossip is none: no microbatch waits for an exchange, only for the device
# and the uplink, which exchanges use, too.
_CAUSES = {
    "coder": "encoding or decoding",
    "uplink": "its uplink",
    "waiting": "a replica, or room in flight",
    "away": "what is away: the peers behind it",
}
_NOTHING = "others: nothing was here"
_LONGEST = 3


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, ascending and apart."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Of intervals that are apart."""
    return sum(end - begin for begin, end in intervals)


def both(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Times in both. Each ascending and apart."""
    found, a, b = [], 0, 0
    while a < len(some) and b < len(others):
        begin, end = max(some[a][0], others[b][0]), min(some[a][1], others[b][1])
        if begin < end:
            found.append((begin, end))
        if some[a][1] <= others[b][1]:
            a += 1
        else:
            b += 1
    return found


def gaps(intervals: Sequence[Interval], span: Interval) -> list[Interval]:
    """What of `span` is in none of the intervals, which are ascending and apart."""
    edges = [span[0], *(edge for interval in intervals for edge in interval), span[1]]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def cause(gap: Interval, busy: Mapping[str, Sequence[Interval]]) -> str:
    """What went on for at least half of a gap. busy: times by category."""
    for category, text in _CAUSES.items():
        if 2 * length(both([gap], busy.get(category, []))) >= gap[1] - gap[0]:
            return text
    return _NOTHING


def parse(text: str, where: str) -> list[Event]:
    """Events of a trace that may be cut off anywhere. Raises DataError for what is no trace."""
    lines = text.splitlines()
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        line = line.strip().removesuffix(",")
        if line in ("", "[", "]"):
            continue
        try:
            made = json.loads(line)
        except ValueError:
            made = None
            if number == len(lines):
                break  # the process was killed here
        if not isinstance(made, dict) or "ph" not in made:
            raise DataError(
                f"{where}, line {number}: {line[:40]!r} is no trace event. Fix: give files that `trace` of a peer's "
                "config has named"
            )
        events.append(made)
    return events


@dataclass
class Timeline:
    """One peer's phases. busy: by category, ascending and apart."""

    name: str
    span: Interval
    busy: dict[str, list[Interval]]
    gossip_jobs: list[Interval] = field(default_factory=list)

    def share(self, intervals: Sequence[Interval]) -> float:
        return length(intervals) / max(1, self.span[1] - self.span[0])

    def longest_gaps(self) -> list[Interval]:
        found = gaps(self.busy.get("device", []), self.span)
        return sorted(found, key=lambda gap: gap[0] - gap[1])[:_LONGEST]


def timelines(events: Sequence[Event]) -> list[Timeline]:
    """By peer, in the order of their names."""
    names: dict[int, str] = {}
    phases: dict[int, list[Event]] = {}
    for item in events:
        if item["ph"] == "M" and item["name"] == "process_name":
            names[item["pid"]] = item["args"]["name"]
        elif item["ph"] == "X":
            phases.setdefault(item["pid"], []).append(item)
    made = []
    for pid, mine in phases.items():
        times: dict[str, list[Interval]] = {}
        for item in mine:
            times.setdefault(item["cat"], []).append((item["ts"], item["ts"] + item["dur"]))
        every = [interval for intervals in times.values() for interval in intervals]
        span = min(begin for begin, _ in every), max(end for _, end in every)
        jobs = [
            (item["ts"], item["ts"] + item["dur"])
            for item in mine
            if item["cat"] == "device" and item["name"] == "gossip"
        ]
        busy = {category: union(intervals) for category, intervals in times.items()}
        made.append(Timeline(names.get(pid, str(pid)), span, busy, jobs))
    return sorted(made, key=lambda timeline: timeline.name)


def table(found: Sequence[Timeline]) -> str:
    """For people."""
    lines = [
        f"{'peer':<28} {'seconds':>8} {'device':>7} {'uplink':>7} {'both':>7} {'gossip on the device':>22}"
    ]
    for one in found:
        device, uplink = one.busy.get("device", []), one.busy.get("uplink", [])
        longest = max((end - begin for begin, end in one.gossip_jobs), default=0)
        gossip = f"{one.share(one.gossip_jobs):.1%}, {longest / 1000:.1f} ms at most"
        lines.append(
            f"{one.name[:28]:<28} {(one.span[1] - one.span[0]) / 1e6:>8.1f} {one.share(device):>7.1%} "
            f"{one.share(uplink):>7.1%} {one.share(both(device, uplink)):>7.1%} {gossip:>22}"
        )
        for gap in one.longest_gaps():
            at = (gap[0] - one.span[0]) / 1e6
            lines.append(
                f"    idle {(gap[1] - gap[0]) / 1e6:.3f} s at {at:.3f} s, waiting for {cause(gap, one.busy)}"
            )
    return "\n".join(lines)


def read(path: Path) -> list[Event]:
    """Raises DataError."""
    try:
        text = path.read_text(errors="replace")
    except OSError as fault:
        raise DataError(f"{path}: {fault.strerror}. Fix: name a trace file that can be read") from fault
    return parse(text, str(path))


def write(path: Path, events: Sequence[Event]) -> None:
    """As one whole JSON array, an event a line."""
    lines = ",\n".join(json.dumps(item, separators=(",", ":")) for item in events)
    try:
        path.write_text(f"[\n{lines}\n]\n")
    except OSError as fault:
        raise DataError(f"--out {path}: {fault.strerror}. Fix: name a file that can be written") from fault


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/trace", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="traces of peers (`trace` in their config)")
    parser.add_argument("--out", type=Path, help="write one file with all of them, for ui.perfetto.dev")
    given = parser.parse_args(arguments)
    try:
        events = [item for path in given.files for item in read(path)]
        if given.out is not None:
            write(given.out, events)
        print(table(timelines(events)))
    except MeshdError as error:
        print(f"scripts/trace: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
