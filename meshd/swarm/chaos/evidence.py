"""What a run has left to be judged by: the origins' journals, the metrics that peers showed, and their logs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from meshd.errors import DataError

# Said by a peer whose stream to another broke: `peer` is the other's name.
_NOTICES = frozenset({"link_lost", "upstream_lost"})


@dataclass
class Account:
    """Microbatches of one origin, or of several together, by their journals. twice: data committed more than once.
    lost: committed, but the origin died before its own part was kept."""

    injected: int = 0
    committed: int = 0
    dropped: int = 0
    partial: int = 0
    tokens: int = 0
    in_flight: int = 0
    twice: int = 0
    lost: int = 0

    @property
    def holds(self) -> bool:
        """The ledger's invariant after a drain."""
        whole = self.injected == self.committed + self.dropped + self.in_flight
        return whole and self.in_flight == 0 and self.twice == 0

    def __add__(self, other: Account) -> Account:
        return Account(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class _Reading:
    account: Account
    sequence: int = 0
    open: dict[int, int] = field(default_factory=dict)
    items: Counter[int] = field(default_factory=Counter)

    def apply(self, kind: str, values: Sequence[int]) -> None:
        account = self.account
        match kind, values:
            case "B", [injected, committed, dropped, partial, tokens, sequence, _, *lost]:
                self.account = Account(injected, committed, dropped, partial, tokens, lost=sum(lost))
                self.sequence = sequence
            case "I", [item]:
                account.injected += 1
                self.open[self.sequence] = item
                self.sequence += 1
            case "C", [sequence, tokens]:
                account.committed += 1
                account.tokens += tokens
                self.items[self.open.pop(sequence)] += 1
            case "D", [sequence, partial]:
                account.dropped += 1
                account.partial += partial
                del self.open[sequence]
            case "R" | "K", [_]:
                pass
            case _:
                raise ValueError(f"line {kind} {values}")


def read_journal(path: Path) -> Account:
    """The account of one journal (meshd.pipeline.journal has the form), read without the code that wrote it: in flight
    is what has neither come back nor been given up. Raises DataError for one that does not add up."""
    reading = _Reading(Account())
    try:
        # What follows the last newline was torn by a crash.
        for line in path.read_bytes().split(b"\n")[:-1]:
            kind, *fields = line.decode().split()
            reading.apply(kind, [int(value) for value in fields])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read as a journal: {error!r}") from error
    account = reading.account
    account.in_flight = len(reading.open)
    account.twice = sum(count - 1 for count in reading.items.values() if count > 1)
    return account


def summed(metrics: Iterable[Mapping[str, float]], name: str) -> int | None:
    """A counter over all processes that ever ran; None when none of them has it."""
    values = [one[name] for one in metrics if name in one]
    return round(sum(values)) if values else None


@dataclass(frozen=True)
class Event:
    """One line of a peer's log. time: seconds since the epoch."""

    peer: str
    time: float
    name: str
    fields: Mapping[str, Any]


def read_log(peer: str, path: Path) -> list[Event]:
    """Events of a log in JSON form. Lines that are none (a process that died in one, words of others) are left out."""
    events = []
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            values = json.loads(line)
            when = datetime.fromisoformat(values["time"]).timestamp()
            events.append(Event(peer, when, str(values["event"]), values))
        except (ValueError, KeyError, TypeError):
            continue
    return events


@dataclass(frozen=True)
class Detection:
    """The first line about a fault in another peer's log. seconds: after the fault."""

    seconds: float
    by: str
    reason: str


def detected(events: Iterable[Event], peer: str, at: float, within_s: float) -> Detection | None:
    """Who first said that its stream to `peer` broke, in the `within_s` seconds after `at` (seconds since the epoch).

    None: nobody, for nobody may have had a stream to it.
    """
    said = [
        event
        for event in events
        if event.name in _NOTICES
        and event.peer != peer
        and event.fields.get("peer") == peer
        and at <= event.time <= at + within_s
    ]
    if not said:
        return None
    first = min(said, key=lambda event: event.time)
    return Detection(first.time - at, first.peer, str(first.fields.get("reason", "")))


def tracebacks(peer: str, path: Path) -> list[str]:
    """The last line of every traceback in a log: each is a bug (C10)."""
    found = [str(event.fields["traceback"]) for event in read_log(peer, path) if "traceback" in event.fields]
    return [f"{peer}: {text.strip().splitlines()[-1]}" for text in found]
