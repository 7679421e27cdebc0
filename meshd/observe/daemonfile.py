"""`STATE_DIR/daemon.json`: how commands on this machine find the daemon that uses a state directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

NAME = "daemon.json"


@dataclass(frozen=True)
class DaemonFile:
    """A running daemon. address: host:port of its gRPC server; link: the swarm link that leads to it; health: URL of
    its `/healthz`, empty when it serves none."""

    address: str
    pid: int
    run_id: str
    link: str
    health: str = ""

    def write(self, state_dir: Path) -> None:
        """Write it whole or not at all. Raises OSError."""
        draft = state_dir / f"{NAME}.{os.getpid()}"
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(state_dir / NAME)

    @classmethod
    def read(cls, state_dir: Path) -> DaemonFile | None:
        """The daemon that wrote last; None when there is no file, or not one of ours."""
        try:
            values = json.loads((state_dir / NAME).read_text())
            return cls(
                str(values["address"]),
                int(values["pid"]),
                str(values["run_id"]),
                str(values["link"]),
                str(values.get("health", "")),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def remove(state_dir: Path) -> None:
        """Take the file away when the daemon stops."""
        (state_dir / NAME).unlink(missing_ok=True)

    def alive(self) -> bool:
        """Whether a process with this pid runs (it may be another one, after a reboot)."""
        return psutil.pid_exists(self.pid)
