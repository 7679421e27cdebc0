"""How much memory the control groups of this process leave it: what containers and services are limited by, and what
the machine's own figures do not show (Linux: cgroups(7), Documentation/admin-guide/cgroup-v1/memory and cgroup-v2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class _Files:
    """Names of one version's files, and of the fields of memory.stat that count file cache, descendants included."""

    limit: str
    usage: str
    cache: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


@dataclass(frozen=True)
class Room:
    """free: bytes below `limit` (bytes), set by the file `path`; file cache counts as free: the kernel drops it."""

    free: int
    limit: int
    path: Path

    def __str__(self) -> str:
        return f"the memory limit of {self.limit / 2**30:.1f} GiB in {self.path}"


def cgroup_room(root: Path = Path("/")) -> Room | None:
    """The tightest limit of this process's groups and all above them; None without limits, or without cgroups.

    root: what `proc/self/cgroup` and `sys/fs/cgroup` are looked for in.
    """
    rooms = [_room(folder, files) for folder, files in _groups(root)]
    return min((room for room in rooms if room is not None), key=lambda room: room.free, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Folders of the memory controller, from this process's group up to the mount's top.

    A container may see its own group mounted as the top, but its path as the host's: what is not there is passed over.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # Of a group above a namespace's own, the path begins with `..`: it cannot be seen from here.
        inside = [] if ".." in group.parts else [group, *group.parents]
        for each in dict.fromkeys([*inside, PurePosixPath()]):
            yield mount / each, files


def _room(folder: Path, files: _Files) -> Room | None:
    """Of one group; None when it has no limit, or does not say (the top group has no such files in version 2)."""
    try:
        limit = int((folder / files.limit).read_text())  # `max`, which is no number, for none
        usage = int((folder / files.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(name, 0)) for name in files.cache)
    except (OSError, ValueError):
        return None
    return Room(max(0, limit - max(0, usage - cache)), limit, folder / files.limit)
