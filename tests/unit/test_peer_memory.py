"""A stage that does not fit is refused before it is loaded, whatever it is that limits memory (C18)."""

from __future__ import annotations

import types
from pathlib import Path

import psutil
import pytest
import torch

from meshd.errors import ResourceError
from meshd.peer.cgroup import cgroup_room
from meshd.peer.loading import check_memory

GIB = 2**30
CPU = torch.device("cpu")


def plant(root: Path, cgroup: str, **files: dict[str, str]) -> Path:
    """A tree as the kernel shows it. Keys of `files`: a folder under sys/fs/cgroup, `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, contents in files.items():
        where = root / "sys/fs/cgroup" / folder.replace("__", "/").removeprefix("top")
        where.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (where / f"memory.{name}").write_text(text)
    return root


def v2(limit: str, used: float, cache: float = 0.0) -> dict[str, str]:
    """GiB; half of the cache active, and shared memory beside it, which is not dropped."""
    half, shared = int(cache * GIB / 2), int(used * GIB)
    stat = f"anon 1\nfile {shared}\nshmem {shared}\nactive_file {half}\ninactive_file {half}\n"
    return {"max": f"{limit}\n", "current": f"{int(used * GIB)}\n", "stat": stat}


def v1(limit: int, used: float, cache: float = 0.0) -> dict[str, str]:
    stat = f"cache 5\nactive_file 0\ntotal_active_file 0\ntotal_inactive_file {int(cache * GIB)}\n"
    return {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{int(used * GIB)}\n", "stat": stat}


def free(root: Path) -> float | None:
    room = cgroup_room(root)
    return None if room is None else room.free / GIB


def test_version_2_counts_cache_as_free(tmp_path: Path) -> None:
    plant(tmp_path, "0::/a/b\n", a__b=v2(str(4 * GIB), used=3, cache=2))
    room = cgroup_room(tmp_path)
    assert room is not None
    assert (room.free, room.limit) == (3 * GIB, 4 * GIB)
    assert str(room) == f"the memory limit of 4.0 GiB in {tmp_path}/sys/fs/cgroup/a/b/memory.max"


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    """A service's own group has no limit, its slice has; or a wider one is fuller."""
    groups = {"a": v2(str(8 * GIB), used=7), "a__b": v2("max", used=1), "a__b__c": v2(str(4 * GIB), used=1)}
    plant(tmp_path, "0::/a/b/c\n", **groups)
    assert free(tmp_path) == 1.0


def test_version_1_beside_other_controllers(tmp_path: Path) -> None:
    cgroup = "9:name=systemd:/x\n5:cpu,memory:/x/y\n0::/z\n"
    unlimited = v1(9223372036854771712, used=1)
    plant(tmp_path, cgroup, memory=unlimited, memory__x=v1(2 * GIB, 1.5, cache=0.5), memory__x__y=unlimited)
    assert free(tmp_path) == 1.0


@pytest.mark.parametrize("path", ["/docker/0123", "/", "/../outside"])
def test_a_container_whose_group_is_mounted_as_the_top(tmp_path: Path, path: str) -> None:
    plant(tmp_path, f"3:memory:{path}\n", memory=v1(2 * GIB, used=1))
    assert free(tmp_path) == 1.0
    plant(tmp_path / "two", f"0::{path}\n", top=v2(str(2 * GIB), used=0.5))
    assert free(tmp_path / "two") == 1.5


def test_a_full_group_has_nothing_left_and_never_less(tmp_path: Path) -> None:
    plant(tmp_path, "0::/a\n", a=v2(str(GIB), used=2))
    assert free(tmp_path) == 0.0


@pytest.mark.parametrize("cgroup", ["", "garbage\n", "0::/\n", "0::/a\n", "2:cpu:/\n"])
def test_without_limits_there_is_no_room_to_speak_of(tmp_path: Path, cgroup: str) -> None:
    assert cgroup_room(tmp_path) is None
    plant(tmp_path, cgroup, a={"max": "max\n"})
    assert cgroup_room(tmp_path) is None


@pytest.mark.parametrize(("machine", "binds"), [(16, "limit"), (2, "machine")])
def test_what_binds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: int, binds: str
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=machine * GIB))
    plant(tmp_path, "0::/a\n", a=v2(str(4 * GIB), used=1))
    check_memory(int(1.9 * GIB), "parts", CPU, 2, tmp_path)
    with pytest.raises(ResourceError, match=r"stage 2 needs about 3\.5 GiB \(parts\), cpu has") as caught:
        check_memory(int(3.5 * GIB), "parts", CPU, 2, tmp_path)
    text = str(caught.value)
    if binds == "limit":
        assert (
            f"3.0 GiB free under the memory limit of 4.0 GiB in {tmp_path}/sys/fs/cgroup/a/memory.max."
            in text
        )
    else:
        assert "2.0 GiB free. Fix" in text
    assert ("or a higher limit" in text) == (binds == "limit")
