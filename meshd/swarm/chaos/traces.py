"""The processes that chaos has started, by id and on disk: what a run that was killed itself has left behind is ended
by the next start, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from meshd.state.disk import disk_faults

_NAME = "processes.json"
# psutil's start times are rounded differently from one reading to the next.
_SAME_S = 1.0


@dataclass
class Traces:
    """Sessions started (leader's pid, its start time) and the temporary directory that they share. Every change is on
    disk before the call returns."""

    folder: Path
    temporary: Path | None = None
    leaders: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Traces:
        """What an earlier run noted in `folder`; nothing when there is no file, or it cannot be read."""
        try:
            values = json.loads((folder / _NAME).read_text())
            leaders = {int(pid): float(started) for pid, started in values["leaders"].items()}
            temporary = values["temporary"]
            return cls(folder, Path(temporary) if temporary else None, leaders)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(folder)

    def started(self, pid: int) -> None:
        """Note a process that leads a session of its own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.leaders[pid] = psutil.Process(pid).create_time()
            self.write()

    def write(self) -> None:
        """Raises ResourceError."""
        with disk_faults(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f"{_NAME}.new"
            values = {"temporary": str(self.temporary or ""), "leaders": self.leaders}
            draft.write_text(json.dumps(values))
            draft.replace(self.folder / _NAME)

    def alive(self) -> list[psutil.Process]:
        """Processes of the sessions noted here that still run (zombies do not)."""
        ours = {pid for pid, started in self.leaders.items() if _still(pid, started)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) in ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def clear(self) -> list[int]:
        """End them all, by their ids, and remove their temporary directory and this note; the pids."""
        ended = []
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                ended.append(process.pid)
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        (self.folder / _NAME).unlink(missing_ok=True)
        return ended


def _still(pid: int, started: float) -> bool:
    """Whether a session of this number is still the one whose leader began at `started`. While any process is in it,
    the system does not give its number out again: without a leader it is, with another one it is not."""
    try:
        return abs(psutil.Process(pid).create_time() - started) <= _SAME_S
    except psutil.NoSuchProcess:
        return True
