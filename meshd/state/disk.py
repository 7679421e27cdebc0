"""Writes that survive a crash, and disk faults in words (DESIGN section 7; C29). Blocking: run in a thread."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshd.errors import ResourceError

FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_DIRECTORY = {errno.ENOTDIR, errno.EEXIST}


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn a full disk, missing write permission and a file in a directory's place within the block into
    ResourceError; `path` is what was written.

    Other OSErrors pass: they are not a user's doing.
    """
    try:
        yield
    except OSError as fault:
        where = fault.filename or path
        if fault.errno in FULL:
            raise ResourceError(
                f"{where}: no space left on the disk ({fault.strerror}). "
                "Fix: free space there, keep fewer snapshots, or put the state directory on a larger disk"
            ) from fault
        if fault.errno in _REFUSED:
            raise ResourceError(
                f"{where}: no permission ({fault.strerror}). "
                f"Fix: give user id {os.geteuid()} read and write permission there, or choose another state directory"
            ) from fault
        if fault.errno in _NO_DIRECTORY:
            raise ResourceError(
                f"{where}: a file is where a directory is needed. Fix: move it away, or choose another state directory"
            ) from fault
        raise


def sync_file(path: Path) -> None:
    """Force the file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Force the directory's entries (creations, renames) to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a whole new file and force it to the disk. Removes it again when that fails."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
