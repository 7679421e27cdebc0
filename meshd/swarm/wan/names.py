"""Names of what a lab makes on a machine. They tell whose it is: so the next lab clears what a killed one has left, and
nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "mwan"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)(?:-[a-z0-9-]+)?")

# Fields of /proc/PID/stat behind the name of the process: its state, and when it started, in ticks since the boot.
_STATE, _STARTED = 0, 19


@dataclass(frozen=True)
class Owner:
    """A process. started: so that another one with the same pid is not taken for it."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The process that runs under `pid` now; None when there is none, or one that has ended (a zombie)."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[_STATE] in "ZX" else cls(pid, int(fields[_STARTED]))

    @classmethod
    def this(cls) -> Owner:
        owner = cls.of(os.getpid())
        assert owner is not None
        return owner

    @property
    def alive(self) -> bool:
        return Owner.of(self.pid) == self

    def name(self, part: str = "") -> str:
        """Of a namespace or folder of this owner's lab."""
        return f"{PREFIX}-{self.pid}-{self.started}" + (f"-{part}" if part else "")


def owner_of(name: str) -> Owner | None:
    """Whose a thing of this name is; None when it is no lab's."""
    match = _NAME.fullmatch(name)
    return Owner(int(match[1]), int(match[2])) if match else None


def leftovers(names: Iterable[str], alive: Callable[[Owner], bool]) -> list[str]:
    """Those of `names` that labs have left which are no more. Pure."""
    return [name for name in names if (owner := owner_of(name)) is not None and not alive(owner)]
