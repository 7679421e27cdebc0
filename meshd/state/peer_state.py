"""The small state of a peer in its state directory, and the lock on that directory (C16, C25).

Blocking: call with `asyncio.to_thread` once the daemon runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from meshd.errors import DataError, ResourceError
from meshd.state.disk import disk_faults, sync_directory, write_synced
from meshd.state.manifest import canonical_json

log = logging.getLogger(__name__)

_CURRENT, _PREVIOUS, _DRAFT, _LOCK = "peer.json", "peer.previous.json", "peer.json.new", "lock"


@dataclass(frozen=True)
class PeerState:
    """What a restarted daemon needs besides its weights.

    run_id: 40 hex digits; stage: -1 for none; incarnation: of the daemon that wrote it. next_sequence: no microbatch
    of this origin has had this number or a higher one when the file was written. ledger: counts by name (injected,
    committed, ...). stream: the token stream's position, in the stream's own words. committed: label tokens by origin,
    the grow-only counter.
    """

    run_id: str
    stage: int = -1
    incarnation: int = 0
    next_sequence: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)


class Loaded(NamedTuple):
    """A state read back. `older`: the newest copy was torn, so sequence numbers beyond next_sequence may be used up."""

    state: PeerState
    older: bool


def save_peer_state(directory: Path, state: PeerState) -> None:
    """Write `state`, keeping the copy before it. Whenever this is interrupted, one of the two can be read.

    Raises ResourceError when the disk is full or not writable; then the former state still stands.
    """
    body = asdict(state)
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    draft, current = directory / _DRAFT, directory / _CURRENT
    with disk_faults(current):
        write_synced(draft, canonical_json({"sha256": digest, "state": body}))
        # A torn current copy must not displace a good previous one.
        if _read(current) is not None:
            os.replace(current, directory / _PREVIOUS)
        os.replace(draft, current)
        sync_directory(directory)


def load_peer_state(directory: Path) -> Loaded | None:
    """The newest readable copy; None in a fresh directory. Raises DataError when copies exist and none is readable."""
    state = _read(directory / _CURRENT)
    if state is not None:
        return Loaded(state, older=False)
    torn = (directory / _CURRENT).exists()
    state = _read(directory / _PREVIOUS)
    if state is not None:
        log.warning(
            "%s is %s; going on from the copy before it", directory / _CURRENT, "torn" if torn else "missing"
        )
        return Loaded(state, older=True)
    if torn or (directory / _PREVIOUS).exists():
        raise DataError(
            f"{directory}: neither {_CURRENT} nor {_PREVIOUS} can be read. Fix: move both away; the peer then starts "
            "with a fresh ledger and data position (keep the identity file only if it has not injected in this run)"
        )
    return None


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


def _read(path: Path) -> PeerState | None:
    """None when the file is absent, torn, or not of this form."""
    try:
        data = json.loads(path.read_bytes())
        body = data["state"]
        if data["sha256"] != hashlib.sha256(canonical_json(body)).hexdigest():
            return None
        return PeerState(**{known.name: body[known.name] for known in fields(PeerState)})
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None
