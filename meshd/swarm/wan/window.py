"""When a lab measures, and what comes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rich import box
from rich.table import Table

from meshd.swarm.wan.network import Counts
from meshd.swarm.wan.rates import Link, show_rate


class Step(Enum):
    """What to do about a look at the swarm."""

    WAIT = "wait"
    START = "start"
    STOP = "stop"


class Window:
    """The time that is measured: from a commit to a commit, so that no half of a microbatch is counted.

    warmup_s: from the first commit on. It ends after `seconds`, or `tokens`, whichever is given; when nothing is
    committed any more, at the latest after twice the seconds.
    """

    def __init__(self, warmup_s: float, seconds: float | None, tokens: int | None) -> None:
        self._warmup_s, self._seconds, self._tokens = warmup_s, seconds, tokens
        self._last: int | None = None
        self._first_at: float | None = None
        self._began: tuple[float, int] | None = None

    @property
    def began(self) -> bool:
        return self._began is not None

    def look(self, now: float, tokens: int) -> Step:
        """tokens: committed by the whole swarm until `now`."""
        grew = self._last is not None and tokens > self._last
        self._last = tokens
        if grew and self._first_at is None:
            self._first_at = now
        if self._began is None:
            if not grew or self._first_at is None or now < self._first_at + self._warmup_s:
                return Step.WAIT
            self._began = (now, tokens)
            return Step.START
        began, before = self._began
        if self._seconds is not None and now >= began + self._seconds * (1 if grew else 2):
            return Step.STOP
        if self._tokens is not None and tokens >= before + self._tokens:
            return Step.STOP
        return Step.WAIT


@dataclass(frozen=True)
class Look:
    """Tokens committed, and what had passed the links, at one time."""

    at: float
    tokens: int
    counts: Mapping[str, Counts]


@dataclass(frozen=True)
class Result:
    """What passed between two looks. links: the limits, by peer."""

    links: Mapping[str, Link]
    start: Look
    stop: Look

    @property
    def seconds(self) -> float:
        return self.stop.at - self.start.at

    @property
    def tokens(self) -> int:
        return self.stop.tokens - self.start.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def passed(self, peer: str) -> Counts:
        return self.stop.counts[peer] - self.start.counts[peer]

    @property
    def bytes_per_token(self) -> float | None:
        """Over all uplinks; None when no token was committed."""
        return sum(self.passed(peer).up for peer in self.links) / self.tokens if self.tokens else None

    def busy(self, peer: str) -> tuple[float | None, float | None]:
        """Share of the peer's link, up and down, that was used; None where it has no limit."""
        passed, link = self.passed(peer), self.links[peer]
        return (
            passed.up * 8 / self.seconds / link.up_bps if link.up_bps else None,
            passed.down * 8 / self.seconds / link.down_bps if link.down_bps else None,
        )

    def table(self) -> Table:
        """For people."""
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("link", "up", "of", "busy", "down", "of", "busy", "dropped"):
            table.add_column(name, justify="left" if name == "link" else "right", no_wrap=True)
        for peer, link in self.links.items():
            passed, (up, down) = self.passed(peer), self.busy(peer)
            table.add_row(
                peer,
                f"{passed.up / 1e6:.3f} MB", show_rate(link.up_bps), _percent(up),
                f"{passed.down / 1e6:.3f} MB", show_rate(link.down_bps), _percent(down),
                str(passed.dropped),
            )  # fmt: skip
        return table

    def summary(self) -> str:
        each = (
            ""
            if self.bytes_per_token is None
            else f", {self.bytes_per_token:,.0f} bytes per token over all uplinks"
        )
        return f"{self.tokens:,} tokens in {self.seconds:.1f} s: {self.tokens_per_s:,.1f} tokens/s{each}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
