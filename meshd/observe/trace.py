"""What a peer does when, written as Chrome trace events: how the phases of microbatches lie beside each other
(docs/trace.md). `meshd.observe.timeline` reads it.

Off, a tracer costs one test of `on`. On, the threads that work only put tuples into a queue; a thread of the tracer's
own makes text of them and writes it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import queue
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from meshd.errors import DataError
from meshd.observe.log import event
from meshd.proto import meshd_pb2 as pb
from meshd.state.disk import disk_faults

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 64 << 20
# Events that wait for a slow disk; above it they are left out.
_MAX_WAITING = 1 << 16
# What has gathered for so long is written in one piece, so that a process that is killed leaves whole lines.
_WRITE_S = 0.5
# Evaluations are numbered from here (meshd.pipeline.injector).
_EVALUATION = 1 << 63


@dataclass(frozen=True)
class Timed:
    """One phase. lane: its first word is its category. Times in microseconds since the epoch."""

    lane: str
    name: str
    began: int
    ended: int
    args: dict[str, Any]


class Phase:
    """From `with` to its end, in whatever thread. Without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None, lane: str, name: str, args: dict[str, Any]) -> None:
        self._tracer, self._lane, self._name, self._args = tracer, lane, name, args
        self._began = 0

    def __enter__(self) -> Phase:
        if self._tracer is not None and self._tracer.on:
            self._began = self._tracer.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._tracer is not None and self._began:
            if kind is not None:
                self._args["ended_by"] = kind.__name__
            self._tracer.put(Timed(self._lane, self._name, self._began, self._tracer.now(), self._args))

    def note(self, **args: Any) -> None:
        """What is known only meanwhile."""
        if self._began:
            self._args.update(args)

    def around(self, call: Callable[..., T], *args: Any) -> T:
        """Call within the phase: for functions that run in another thread."""
        with self:
            return call(*args)


_NOTHING = Phase(None, "", "", {})


class Tracer:
    """Passed to whoever has phases. Without a file it is off."""

    def __init__(self) -> None:
        self.on = False
        self._queue: queue.Queue[Timed | tuple[str, int] | None] = queue.Queue(_MAX_WAITING)
        self._left_out = 0
        # A wall clock that is set meanwhile would make phases overlap.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def now(self) -> int:
        """Microseconds since the epoch, never going back."""
        return (self._epoch_ns + time.perf_counter_ns()) // 1000

    def phase(
        self, lane: str, name: str, id: pb.MicrobatchId | None = None, hop: int | None = None, **args: Any
    ) -> Phase:
        """A phase to be entered once. lane: `device`, `coder`, `uplink to NAME`: its first word is the category."""
        if not self.on:
            return _NOTHING
        return Phase(self, lane, name, _arguments(id, hop, args))

    def sending(self, lane: str, id: pb.MicrobatchId, hop: int, size: int, priority: str) -> Handing | None:
        """A payload of `size` bytes that is queued from now on; None when off."""
        if not self.on:
            return None
        args = _arguments(id, hop, {"bytes": size, "priority": priority})
        return Handing(self, lane, self.now(), size, args)

    def named(self, name: str, stage: int) -> None:
        """What the peer is called from now on."""
        if self.on:
            self.put((name, stage))

    def put(self, item: Timed | tuple[str, int]) -> None:
        """For phases."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._left_out += 1

    @asynccontextmanager
    async def writing(self, path: Path, peer_id: str, max_bytes: int = MAX_BYTES) -> AsyncIterator[None]:
        """Be on within the block.

        Raises DataError or ResourceError when the file cannot be made.
        """
        await asyncio.to_thread(_make, path)
        thread = threading.Thread(
            target=self._write, args=(path, Events(peer_id), max_bytes), name="trace", daemon=True
        )
        self.on = True
        thread.start()
        try:
            yield
        finally:
            self.on = False
            if thread.is_alive():
                # The writer takes what there is first, so there is room soon.
                await asyncio.to_thread(self._queue.put, None)
                await asyncio.to_thread(thread.join)
            if self._left_out:
                event(log, "trace_incomplete", level=logging.WARNING, path=path, left_out=self._left_out)

    def _write(self, path: Path, events: Events, max_bytes: int) -> None:
        """The tracer's own thread, until it is told to end, the file is full, or the disk fails."""
        written = 0
        try:
            with path.open("wb", buffering=0) as file:
                ended = False
                while not ended:
                    lines, ended = self._gathered(events)
                    text = "".join(lines).encode()
                    if full := written + len(text) > max_bytes:
                        text = _whole_lines(text, max_bytes - written)
                    file.write(text)
                    written += len(text)
                    if full:
                        self.on = False
                        event(log, "trace_full", level=logging.WARNING, path=path, max_bytes=max_bytes)
                        break
                file.write(b"\n]\n" if written else b"[\n]\n")
        except OSError as fault:
            self.on = False
            event(log, "trace_failed", level=logging.WARNING, path=path, reason=str(fault))
        finally:
            # Nobody takes any more: whoever ends the block must not wait for room.
            while not self._queue.empty():
                self._queue.get_nowait()

    def _gathered(self, events: Events) -> tuple[list[str], bool]:
        """The text of what comes within a while, and whether it was the last."""
        lines: list[str] = []
        until = time.monotonic() + _WRITE_S
        while (left := until - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if item is None:
                return lines, True
            lines += events.named(*item) if isinstance(item, tuple) else events.lines(item)
        return lines, False


def _make(path: Path) -> None:
    """An empty file. Raises DataError or ResourceError."""
    if path.is_dir():
        raise DataError(f"trace = {str(path)!r}: that is a directory. Fix: name a file in it")
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def _whole_lines(text: bytes, room: int) -> bytes:
    """The events that fit, each of which begins with the separator from the one before."""
    return text[: max(0, text.rfind(b",\n", 0, room))]


class Handing:
    """A payload on its way through a sender's queue: told of each message that was handed to the stream."""

    def __init__(self, tracer: Tracer, lane: str, began: int, size: int, args: dict[str, Any]) -> None:
        self._tracer, self._lane, self._began, self._left, self._args = tracer, lane, began, size, args

    def __call__(self, message: pb.LinkMessage) -> None:
        self._left -= len(message.chunk.data)
        if self._left <= 0:
            self._tracer.put(Timed(self._lane, "send", self._began, self._tracer.now(), self._args))


def _arguments(id: pb.MicrobatchId | None, hop: int | None, args: dict[str, Any]) -> dict[str, Any]:
    if id is not None:
        number = id.sequence
        sequence = number if number < _EVALUATION else f"evaluation {number - _EVALUATION}"
        args |= {"origin": id.origin[-8:], "sequence": sequence, "attempt": id.attempt}
    if hop is not None:
        args["hop"] = hop
    return args


class Events:
    """Makes lines of a JSON array of one peer's events, a line each. Of a lane's events that overlap, the later go to a
    lane of their own beside it: viewers draw only what is nested or apart."""

    def __init__(self, peer_id: str) -> None:
        # Not the process's own: files of several machines are laid side by side.
        self._pid = zlib.crc32(peer_id.encode()) >> 1
        self._separators = itertools.chain(["[\n"], itertools.repeat(",\n"))
        self._lanes: dict[str, list[tuple[int, int]]] = {}  # (number, end of its last event)
        self._numbers = itertools.count(1)

    def named(self, name: str, stage: int) -> list[str]:
        return [
            self._metadata("process_name", 0, name=f"{name}, stage {stage}"),
            self._metadata("process_sort_index", 0, sort_index=stage),
        ]

    def lines(self, item: Timed) -> list[str]:
        made = []
        lanes = self._lanes.setdefault(item.lane, [])
        place = next((n for n, (_, end) in enumerate(lanes) if end <= item.began), len(lanes))
        if place == len(lanes):
            number = next(self._numbers)
            lanes.append((number, 0))
            name = f"{item.lane} ({place + 1})" if place else item.lane
            made.append(self._metadata("thread_name", number, name=name))
        number = lanes[place][0]
        lanes[place] = (number, item.ended)
        made.append(
            self._line(
                {
                    "name": item.name,
                    "cat": item.lane.split()[0],
                    "ph": "X",
                    "ts": item.began,
                    "dur": item.ended - item.began,
                    "pid": self._pid,
                    "tid": number,
                    "args": item.args,
                }
            )
        )
        return made

    def _metadata(self, kind: str, number: int, **args: Any) -> str:
        return self._line({"name": kind, "ph": "M", "pid": self._pid, "tid": number, "args": args})

    def _line(self, made: dict[str, Any]) -> str:
        return next(self._separators) + json.dumps(made, separators=(",", ":"))
