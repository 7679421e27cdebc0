"""The lock on a state directory: two daemons never share one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshd.errors import ResourceError
from meshd.state.disk import disk_faults

_LOCK = "lock"


@contextmanager
def lock_state_dir(path: Path) -> Iterator[None]:
    """Hold the state directory (made if need be) for this process alone; the lock ends with the process.

    Raises ResourceError naming the process that holds it, or that the directory cannot be written.
    """
    with disk_faults(path):
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise ResourceError(
                f"{path} is in use by another meshd (process {holder}). "
                f"Fix: stop that one, or give this one another state directory"
            ) from None
        with disk_faults(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        # The file stays: removing it would let a third process lock a new file while a second waits on this one.
        yield
    finally:
        os.close(handle)
