"""One supervised child process: started with its own log file, stopped for certain, restarted by a stated policy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from meshd.errors import ConfigError, MismatchError

# Exit codes after which a new start would fail the same way.
FINAL_CODES = frozenset({ConfigError.exit_code, MismatchError.exit_code})


@dataclass(frozen=True)
class RestartPolicy:
    """When a peer that ended is started again. Pure.

    limit: restarts of one peer over the whole run. base_s, cap_s: first and longest wait, doubling in between.
    """

    limit: int = 5
    base_s: float = 1.0
    cap_s: float = 30.0

    def decide(self, code: int, restarts: int) -> tuple[float | None, str]:
        """Seconds to wait before the next start (None: do not start again), and why, in words.

        code: exit status as asyncio gives it (negative: killed by that signal). restarts: how many there were.
        """
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if code == 0:
            return None, "left"
        if code in FINAL_CODES:
            return None, f"{how}: a new start would fail the same way"
        if restarts >= self.limit:
            return None, f"{how}, after {restarts} restarts: given up"
        delay = min(self.cap_s, self.base_s * 2**restarts)
        return delay, f"{how}: restart {restarts + 1} of {self.limit} in {delay:g} s"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Child:
    """A running child, leader of its own session, so that a terminal's Ctrl-C reaches only the supervisor."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        """Start `command`; its output is appended to `log`. Raises OSError when it cannot be started."""
        with _appending(log) as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status, once it has ended by itself; what it left running is ended then."""
        code = await self._process.wait()
        await self._sweep()
        return code

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds, or as soon as `hurry` is set or this call is cancelled.

        Leaves no process behind, in any case.
        """
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                await self._ended(grace_s, hurry)
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
            await self._sweep()

    async def _ended(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Wait for its end, for `hurry`, or for `grace_s` seconds."""
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(self._process.wait()), group.create_task(hurry.wait())]
            await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _sweep(self) -> None:
        """End what the child started and left: p2pd outlives a daemon that was killed."""
        await asyncio.to_thread(_end_session, self.pid)


def _appending(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _end_session(leader: int) -> None:
    """Kill every process of the session that `leader` opened, by its pid."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.pid != leader:
                process.kill()


def log_tail(path: Path, lines: int = 12) -> str:
    """The last `lines` lines of a log, indented, for an error message."""
    try:
        text = path.read_bytes()[-16_384:].decode(errors="replace")
    except OSError:
        return "    (no log)"
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (the log is empty)"
