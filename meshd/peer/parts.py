"""What every role of a daemon is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshd.observe.metrics import Metrics
from meshd.observe.trace import Tracer
from meshd.peer.directory import Directory
from meshd.peer.handlers import DaemonHandlers
from meshd.peer.status import StatusBoard
from meshd.transport.base import Transport


@dataclass(frozen=True)
class Parts:
    """folder: where this peer keeps the run's files."""

    folder: Path
    directory: Directory
    transport: Transport
    handlers: DaemonHandlers
    status: StatusBoard
    metrics: Metrics
    tracer: Tracer
