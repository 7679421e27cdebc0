"""Progress of a local swarm on a terminal: a live view, or plain lines where there is no terminal."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from meshd.clock import Clock
from meshd.observe.status import duration, headline, peers_table, summarize
from meshd.proto import meshd_pb2 as pb

_BARS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Where the supervisor's news go."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def tell(self, line: str) -> None:
        """One event, for people."""

    def status(self, reply: pb.StatusReply) -> None:
        """What the seed said last."""


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as at most `width` bars, each the mean of its share; from the lowest bar to the highest."""
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * width
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


class LiveView:
    """One screen region that is redrawn: progress, loss curve, peers by stage, the latest events."""

    def __init__(self, console: Console, clock: Clock, events: int = 6) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._events: deque[str] = deque(maxlen=events)
        self._reply: pb.StatusReply | None = None
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=2)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def tell(self, line: str) -> None:
        self._events.append(f"{duration(self._clock.monotonic() - self._started):>12}  {line}")

    def status(self, reply: pb.StatusReply) -> None:
        self._reply = reply

    def render(self) -> RenderableType:
        """What is on the screen now."""
        parts: list[RenderableType] = []
        if (reply := self._reply) is not None:
            summary = summarize(reply)
            parts.append(Text(headline(summary), style="bold"))
            parts.append(ProgressBar(total=max(1, summary.stop_tokens), completed=summary.tokens))
            if losses := [point.loss for point in reply.losses]:
                text = f"loss {losses[0]:.3f} {sparkline(losses, 60)} {losses[-1]:.3f}"
                parts.append(Text(text, style="cyan"))
            parts.append(peers_table(summary))
        parts += [Text(line, style="dim") for line in self._events]
        return Group(*parts)


class PlainView:
    """Lines: every event at once, progress every `every_s` seconds and at the end."""

    def __init__(self, console: Console, clock: Clock, every_s: float = 10.0) -> None:
        self._console = console
        self._clock = clock
        self._every_s = every_s
        self._started = clock.monotonic()
        self._due = self._started

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def tell(self, line: str) -> None:
        age = duration(self._clock.monotonic() - self._started)
        self._console.print(f"[{age}] {line}", markup=False, highlight=False, soft_wrap=True)

    def status(self, reply: pb.StatusReply) -> None:
        now = self._clock.monotonic()
        if now < self._due and not reply.finished:
            return
        self._due = now + self._every_s
        summary = summarize(reply)
        peers = ",".join(str(len(peers)) for peers in summary.stages.values()) or "none"
        self.tell(f"{headline(summary)}  peers per stage {peers}")
