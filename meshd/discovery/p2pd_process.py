"""The p2pd process itself: started apart from the terminal, its words read, ended and collected for certain.

It gets a process group of its own: a terminal sends Ctrl-C to all of its foreground group, and a p2pd that died of it
before the daemon has left could not take the daemon's record back. The session stays the daemon's, so that whoever
sweeps up after a killed daemon finds it there.

It is started by `subprocess`, which uses vfork, and not by the event loop: uvloop forks, which runs fork handlers, and
grpc's can hang a process with calls in flight (C26).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import hivemind.hivemind_cli

log = logging.getLogger(__name__)

_READY = "Peer ID:"  # p2pd's word for: all listeners are up
_LONGEST_LINE = 1 << 16


class P2pdDied(Exception):
    """It ended before it was ready; the text is its last line."""


class P2pdProcess:
    """A p2pd that was started. `control`: its control socket."""

    def __init__(self, process: subprocess.Popen[bytes], control: Path, words: _Words) -> None:
        self.control = control
        self._process, self._words = process, words

    @classmethod
    async def start(cls, identity: Path, listen: str, announce: str | None) -> P2pdProcess:
        """Start it. identity: key file; listen, announce: multiaddrs. Raises OSError when the binary cannot be run."""
        control = Path(tempfile.gettempdir()) / f"meshd-p2pd-{secrets.token_urlsafe(8)}.sock"
        # What hivemind passes, less what is p2pd's default.
        options = {
            "id": identity,
            "listen": f"/unix{control}",
            "hostAddrs": listen,
            **({} if announce is None else {"announceAddrs": announce}),
            "dhtServer": 1,
            "autonat": 1,
            "connManager": 1,
            # Without a client for so long it ends by itself.
            "idleTimeout": "30s",
        }
        with contextlib.ExitStack() as undo:
            process = _spawn(options)
            undo.callback(process.kill)
            words = _Words()
            await asyncio.get_running_loop().connect_read_pipe(lambda: words, process.stdout)
            undo.pop_all()
        return cls(process, control, words)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it listens. Raises P2pdDied."""
        await asyncio.shield(self._words.ready)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, SIGKILL `grace_s` seconds later or when this is cancelled; then its socket is removed."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                await asyncio.to_thread(self._ended, grace_s)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                await asyncio.to_thread(self._ended, grace_s)
            self._words.close()
            await asyncio.to_thread(self.control.unlink, missing_ok=True)

    def _ended(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def _spawn(options: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Takes a millisecond: done on the event loop, so that a cancelled start leaves no process that nobody knows."""
    return subprocess.Popen(
        [binary(), *(f"-{name}={value}" for name, value in options.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"GOLOG_LOG_LEVEL": "warn", **os.environ},
        process_group=0,
    )


class _Words(asyncio.Protocol):
    """What p2pd prints, line by line: all of it to the log, the last line kept."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last, self._rest = "it said nothing", b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for line in lines:
            text = line.decode(errors="replace").strip()
            if not text:
                continue
            self._last = text
            log.debug("p2pd: %s", text)
            if text.startswith(_READY) and not self.ready.done():
                self.ready.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(P2pdDied(self._last))
            self.ready.exception()  # nobody may be waiting for it

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def binary() -> str:
    """Path of the p2pd that hivemind brings."""
    return str(files(hivemind.hivemind_cli) / "p2pd")
