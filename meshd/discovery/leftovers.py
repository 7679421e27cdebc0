"""What a killed daemon leaves running."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_LEFTOVER_S = 3.0


def end_leftovers(identity: Path) -> list[int]:
    """End p2pd processes on this identity that a killed daemon left; their pids. Blocking.

    They would hold its port, and answer in its name. The caller holds the lock on the identity's directory, so that
    no other daemon can be alive there.
    """
    own = {child.pid for child in psutil.Process().children()}
    ended = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["name"] != "p2pd" or process.pid in own or f"-id={identity}" not in words:
            continue
        with contextlib.suppress(psutil.Error):
            process.kill()
            process.wait(_LEFTOVER_S)
            ended.append(process.pid)
        for word in words:
            if word.startswith("-listen=/unix/"):
                Path(word.removeprefix("-listen=/unix")).unlink(missing_ok=True)
    return ended
