"""Bundles on disk: whole or not at all, and no name leads outside."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from meshd.errors import DataError, ResourceError
from meshd.state import disk
from meshd.state.bundle import BundleStore
from meshd.state.manifest import FileEntry, Manifest, check_bundle_name, check_file_name
from meshd.transport.base import CHUNK_BYTES, NotHere


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "bundles")


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def flip(path: Path, position: int, *, keep_times: bool) -> None:
    """Change one byte of a file."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    if keep_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


HOSTILE = [
    "",
    ".",
    "..",
    "/",
    "a/b",
    "../a",
    "a\\b",
    ".manifest.json",
    "a\0b",
    "a\nb",
    "-rf",
    "ä",
    "a" * 129,
    "a ",
]


@pytest.mark.parametrize("name", [*HOSTILE, "b\n", "C:x", "~", "%2e%2e"])
def test_hostile_file_names_are_refused(name: str, store: BundleStore) -> None:
    with pytest.raises(DataError, match="plain file name"):
        check_file_name(name)
    with pytest.raises(DataError, match="plain file name"):
        store.write("base/0", {name: b"x"}, {})
    assert tree(store.root) == set()


@pytest.mark.parametrize(
    "name",
    [
        *HOSTILE,
        "base",
        "base/",
        "base/-1",
        "base/01",
        "base/0/",
        "base/0\n",
        "base/٣",
        "live/../x",
        "run/x",
        "run/data/..",
        "snapshot/1",
        "snapshot/1/2/3",
        "/base/0",
        "base//0",
        "snapshot/0/" + "9" * 30,
        ".new/x",
        "base/1e3",
        "prior/0",
        "prior/" + "A" * 64,
        "prior/" + "0" * 64 + "/0",
    ],
)
def test_hostile_bundle_names_are_refused(name: str, store: BundleStore) -> None:
    with pytest.raises(DataError, match="no bundle name"):
        check_bundle_name(name)
    for use in (store.manifest, store.verify, store.delete, lambda n: store.path(n, "f")):
        with pytest.raises(DataError, match="no bundle name"):
            use(name)
    with pytest.raises(DataError, match="no bundle name"):
        store.write(name, {"f": b"x"}, {})


@pytest.mark.parametrize(
    "name",
    [
        "run/tokenizer",
        "run/data",
        "run/features",
        "base/0",
        "live/17",
        "snapshot/3/1000000",
        "prior/" + "0123456789abcdef" * 4,
    ],
)
def test_known_names_are_taken(name: str, store: BundleStore) -> None:
    store.write(name, {"f.bin": b"x"}, {})
    assert store.names() == [name]


def test_write_and_read_back(store: BundleStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * CHUNK_BYTES + 5))
    manifest = store.write("base/0", {"b.bin": source, "a.txt": b"text", "empty": b""}, {"tokens": 7})
    assert [(e.name, e.size, len(e.sha256)) for e in manifest.files] == [
        ("a.txt", 4, 1),
        ("b.bin", 2 * CHUNK_BYTES + 5, 3),
        ("empty", 0, 0),
    ]
    assert manifest.size == 2 * CHUNK_BYTES + 9
    assert store.path("base/0", "b.bin").read_bytes() == source.read_bytes()
    # A fresh store on the same directory finds the same.
    again = BundleStore(store.root)
    assert again.verify("base/0") == manifest
    assert again.manifest("base/0").facts == {"tokens": 7}
    with pytest.raises(NotHere):
        again.path("base/0", "c")
    with pytest.raises(NotHere):
        again.manifest("base/1")


def test_digest_names_the_content_alone(store: BundleStore) -> None:
    one = store.write("base/0", {"f": b"x", "g": b"y"}, {"host": "a"})
    other = store.write("snapshot/0/5", {"g": b"y", "f": b"x"}, {"host": "b"})
    assert one.sha256 == other.sha256
    assert one.sha256 != store.write("base/1", {"f": b"x", "g": b"z"}, {}).sha256
    assert one.sha256 != store.write("base/2", {"f": b"x", "h": b"y"}, {}).sha256


def test_replacing_shows_old_or_new_never_a_mixture(store: BundleStore) -> None:
    store.write("live/0", {"a": b"old", "gone": b"old"}, {})
    file, before = store.open("live/0", "a")
    with file:
        after = store.write("live/0", {"a": b"newer"}, {})
        assert file.read() == b"old"  # a reader keeps what it opened
    assert before.sha256 != after.sha256
    assert store.manifest("live/0") == after
    assert tree(store.root) == {"live/0/a", "live/0/.manifest.json"}


def test_block_that_raises_leaves_the_former_bundle(store: BundleStore) -> None:
    before = store.write("live/0", {"a": b"old"}, {})
    with pytest.raises(ZeroDivisionError), store.writing("live/0", {}) as directory:
        (directory / "b").write_bytes(bytes((directory / "a").write_bytes(b"half") // 0))
    assert store.verify("live/0") == before
    assert tree(store.root) == {"live/0/a", "live/0/.manifest.json"}


def test_facts_added_in_the_block_are_kept(store: BundleStore) -> None:
    facts: dict[str, int] = {}
    with store.writing("live/0", facts) as directory:
        (directory / "a").write_bytes(b"x")
        facts["tokens"] = 3
    assert store.manifest("live/0").facts == {"tokens": 3}


@pytest.mark.parametrize("point", ["write", "sync", "manifest"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_full_or_read_only_disk_leaves_nothing_half_written(
    store: BundleStore, monkeypatch: pytest.MonkeyPatch, point: str, number: int
) -> None:
    """C29: the error names path and fix, the former bundle stands, no rubbish is left."""
    before = store.write("live/0", {"a": b"old"}, {})
    kept = tree(store.root)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    if point == "write":
        monkeypatch.setattr(Path, "write_bytes", fail)
    elif point == "sync":
        monkeypatch.setattr("meshd.state.bundle.sync_file", fail)
    else:
        monkeypatch.setattr("meshd.state.bundle.write_synced", fail)
    with pytest.raises(ResourceError, match=r"live|bundles") as caught:
        store.write("live/0", {"a": b"new"}, {})
    assert "Fix:" in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    monkeypatch.undo()
    assert tree(store.root) == kept
    assert store.verify("live/0") == before


def test_other_disk_faults_are_not_dressed_up() -> None:
    with pytest.raises(OSError, match="Input/output"), disk.disk_faults(Path("x")):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_too_little_space_is_said_beforehand(store: BundleStore) -> None:
    with pytest.raises(ResourceError, match=r"are free .*Fix:"):
        store.check_space(1 << 62)


def test_torn_file_is_found_by_its_size(store: BundleStore) -> None:
    store.write("base/0", {"f": b"0123456789"}, {})
    path = store.path("base/0", "f")
    with path.open("r+b") as file:
        file.truncate(4)
    with pytest.raises(DataError, match=r"f has 4 bytes instead of 10.*Fix: delete"):
        store.manifest("base/0")


def test_changed_file_is_found_by_its_time(store: BundleStore) -> None:
    store.write("base/0", {"f": b"0123456789"}, {})
    path = store.path("base/0", "f")
    flip(path, 3, keep_times=False)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="f has changed"):
        store.manifest("base/0")
    with pytest.raises(DataError, match="f has changed"):
        BundleStore(store.root).manifest("base/0")


def test_silent_change_is_found_by_verify(store: BundleStore) -> None:
    store.write("base/0", {"f": os.urandom(CHUNK_BYTES + 10)}, {})
    flip(store.path("base/0", "f"), CHUNK_BYTES + 3, keep_times=True)
    store.manifest("base/0")
    with pytest.raises(DataError, match="f: chunk 1 has changed"):
        store.verify("base/0")


def test_missing_file_and_torn_manifest_are_found(store: BundleStore) -> None:
    store.write("base/0", {"f": b"x"}, {})
    store.write("base/1", {"f": b"x"}, {})
    store.path("base/0", "f").unlink()
    with pytest.raises(DataError, match="f is missing"):
        store.manifest("base/0")
    manifest = store.root / "base/1/.manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:40])
    with pytest.raises(DataError, match="damaged"):
        BundleStore(store.root).manifest("base/1")


@pytest.mark.parametrize("hurt", ["file", "facts", "hash", "manifest"])
def test_c22_damaged_bundles_are_dropped_at_the_start_and_the_others_stay(
    hurt: str, store: BundleStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a manifest of which one digit has changed: the hashes in it vouch for the files, nothing else for it."""
    for name in ("live/0", "snapshot/0/4"):
        store.write(name, {"f": b"x" * 100}, {"weight_version": 7})
    manifest = store.root / "live/0/.manifest.json"
    content = manifest.read_text()
    match hurt:
        case "file":
            store.path("live/0", "f").write_bytes(b"x" * 50)
        case "facts":
            manifest.write_text(content.replace('"weight_version":7', '"weight_version":8'))
        case "hash":
            digest = store.manifest("live/0").files[0].sha256[0].hex()
            manifest.write_text(content.replace(digest, digest[::-1]))
        case "manifest":
            manifest.write_text("")
    again = BundleStore(store.root)
    assert again.drop_damaged() == ["live/0"]
    assert again.names() == ["snapshot/0/4"]
    assert not (store.root / "live/0").exists()
    (record,) = caplog.records
    assert "bundle live/0" in record.getMessage()
    assert "is damaged" in record.getMessage()
    assert "Deleted" in record.getMessage()
    assert again.drop_damaged() == []


def fail_with(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("where", ["stat", "manifest", "file"])
def test_c22_what_the_disk_does_not_give_counts_as_damaged(
    where: str, store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.write("live/0", {"f": b"x"}, {})
    os.utime(store.path("live/0", "f"), ns=(1, 1))
    again = BundleStore(store.root)
    names = {"stat": "meshd.state.bundle._stamp", "file": "meshd.state.bundle.hash_file"}
    with monkeypatch.context() as patch:
        if where == "manifest":
            patch.setattr(Path, "read_bytes", fail_with(errno.EIO))
        else:
            patch.setattr(names[where], fail_with(errno.EIO))
        with pytest.raises(DataError, match=f"cannot be read: .*{os.strerror(errno.EIO)}.*Fix: delete"):
            again.manifest("live/0")
        assert not again.has("live/0", manifest.sha256)
        assert again.drop_damaged() == ["live/0"]
    assert again.names() == []


def test_c22_a_directory_in_a_manifests_place_counts_as_damaged(store: BundleStore) -> None:
    store.write("live/0", {"f": b"x"}, {})
    (store.root / "live/0/.manifest.json").unlink()
    (store.root / "live/0/.manifest.json").mkdir()
    assert BundleStore(store.root).drop_damaged() == ["live/0"]


def test_a_file_that_cannot_be_opened_or_hashed_counts_as_damaged(
    store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("live/0", {"f": b"x"}, {})
    with monkeypatch.context() as patch:
        patch.setattr("meshd.state.bundle.hash_file", fail_with(errno.EIO))
        with pytest.raises(DataError, match="cannot be read"):
            store.verify("live/0")
    monkeypatch.setattr(Path, "open", fail_with(errno.EIO))
    with pytest.raises(DataError, match="cannot be read"):
        store.open("live/0", "f")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_process_that_is_out_of_files_or_not_their_owner_deletes_nothing(
    number: int, store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("live/0", {"f": b"x"}, {})
    again = BundleStore(store.root)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail_with(number))
        with pytest.raises(ResourceError, match=rf"bundle live/0 .*{os.strerror(number)}.*Fix:"):
            again.drop_damaged()
    assert again.drop_damaged() == []
    assert again.names() == ["live/0"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_c29_a_disk_that_takes_no_new_file_times_stops_nobody(
    number: int, store: BundleStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = store.write("live/0", {"f": b"x"}, {})
    os.utime(store.path("live/0", "f"), ns=(1, 1))
    again = BundleStore(store.root)
    monkeypatch.setattr("meshd.state.bundle.write_synced", fail_with(number))
    assert again.drop_damaged() == []
    assert [os.strerror(number) in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr("meshd.state.bundle.hash_file", lambda *_: pytest.fail("hashed again"))
    assert again.manifest("live/0") == manifest


def test_a_manifest_of_an_earlier_version_counts(store: BundleStore) -> None:
    store.write("base/0", {"f": b"x"}, {})
    path = store.root / "base/0/.manifest.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    path.write_text(json.dumps(data))
    assert BundleStore(store.root).drop_damaged() == []


def test_c29_downloads_that_nobody_goes_on_with_are_bounded(store: BundleStore) -> None:
    """Each is of a snapshot that is older than the next; those under way stay, however long nothing has come."""
    lock = store.fetch_lock("snapshot/0/0")
    for watermark in range(20):
        directory = store.partial_directory(Manifest(f"snapshot/0/{watermark}", (entry(),)))
        (directory / "f").write_bytes(b"x")
        os.utime(directory, (watermark, watermark))
        os.utime(directory / "f", (watermark, watermark))
    left = sorted(int(path.name.split("~")[2]) for path in (store.root / ".partial").iterdir())
    assert left == [0, *range(11, 20)]
    del lock
    store.partial_directory(Manifest("base/0", (entry(),)))
    assert not list((store.root / ".partial").glob("snapshot~0~0~*"))


def test_locks_of_downloads_go_with_them(store: BundleStore) -> None:
    lock = store.fetch_lock("base/0")
    assert store.fetch_lock("base/0") is lock
    del lock
    assert len(store._fetching) == 0


def test_copied_directory_is_hashed_once_and_taken(
    store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state directory copied without its times is good; it must not be hashed at every look."""
    manifest = store.write("base/0", {"f": b"x" * 100}, {})
    shutil.copytree(store.root, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy/base/0/f", ns=(1, 1))
    copy = BundleStore(tmp_path / "copy")
    assert copy.manifest("base/0") == manifest
    monkeypatch.setattr("meshd.state.bundle.hash_file", lambda *_: pytest.fail("hashed again"))
    assert copy.manifest("base/0") == manifest
    assert BundleStore(tmp_path / "copy").manifest("base/0") == manifest


def test_crash_in_the_middle_of_a_replacement(store: BundleStore) -> None:
    manifest = store.write("snapshot/0/4", {"f": b"x"}, {})
    (store.root / "snapshot/0/4").rename(store.root / ".old/snapshot~0~4")
    (store.root / ".new/abc").mkdir()
    (store.root / ".new/abc/f").write_bytes(b"half")
    again = BundleStore(store.root)
    assert again.verify("snapshot/0/4") == manifest
    assert tree(store.root) == {"snapshot/0/4/f", "snapshot/0/4/.manifest.json"}


def test_crash_after_a_replacement_keeps_the_new(store: BundleStore) -> None:
    store.write("live/0", {"f": b"old"}, {})
    shutil.copytree(store.root / "live/0", store.root / ".old/live~0")
    new = store.write("live/0", {"f": b"new!"}, {})
    shutil.copytree(store.root / "live/0", store.root / ".old/live~0")
    assert BundleStore(store.root).verify("live/0") == new
    assert list((store.root / ".old").iterdir()) == []


def test_prune_keeps_the_newest_by_number(store: BundleStore) -> None:
    """C29: depth. 10 is newer than 9, and another stage's snapshots are left alone."""
    for watermark in (8, 9, 10, 100):
        store.write(f"snapshot/0/{watermark}", {"f": b"x"}, {})
    store.write("snapshot/1/1", {"f": b"x"}, {})
    store.write("base/0", {"f": b"x"}, {})
    assert store.prune("snapshot/0", keep=2) == ["snapshot/0/9", "snapshot/0/8"]
    assert store.names() == ["base/0", "snapshot/0/10", "snapshot/0/100", "snapshot/1/1"]


def test_prune_by_bytes(store: BundleStore) -> None:
    """C29: bytes. The newest stays even when it alone is too large."""
    for watermark in (1, 2, 3):
        store.write(f"snapshot/0/{watermark}", {"f": b"x" * 1000}, {})
    assert store.prune("snapshot/0", keep=9, max_bytes=3000) == ["snapshot/0/1"]
    assert store.prune("snapshot/0", keep=9, max_bytes=10) == ["snapshot/0/2"]
    assert store.prune("snapshot/0", keep=0) == ["snapshot/0/3"]


def test_delete_is_idempotent(store: BundleStore) -> None:
    store.write("base/0", {"f": b"x"}, {})
    store.delete("base/0")
    store.delete("base/0")
    assert store.names() == []
    assert tree(store.root) == set()


def test_manifest_survives_the_wire(store: BundleStore) -> None:
    manifest = store.write("base/0", {"f": os.urandom(CHUNK_BYTES + 1), "g": b""}, {"n": [1, "ä"]})
    back = Manifest.from_proto(manifest.to_proto())
    assert back == manifest
    assert back.sha256 == manifest.sha256


def entry(**change: object) -> FileEntry:
    return FileEntry(**({"name": "f", "size": 10, "chunk_bytes": 4, "sha256": (b"h" * 32,) * 3} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ([entry(name="../f")], {}),
        ([entry(chunk_bytes=0)], {}),
        ([entry(chunk_bytes=CHUNK_BYTES + 1)], {}),
        ([entry(size=13)], {}),
        ([entry(size=1 << 60)], {}),
        ([entry(sha256=(b"h" * 32, b"h" * 32, b"h"))], {}),
        ([entry(), entry()], {}),
        ([entry(name="b"), entry(name="a")], {}),
        ([entry(name=f"f{i:05}") for i in range(1025)], {}),
        ([], {"x": "y" * 70000}),
    ],
)
def test_manifests_out_of_bounds_are_refused(files: list[FileEntry], facts: dict[str, str]) -> None:
    with pytest.raises(DataError):
        Manifest.from_proto(Manifest("base/0", tuple(files), facts).to_proto())


@pytest.mark.parametrize("facts", ["[]", "{", "1", '{"a": NaN}', "[" * 20000])
def test_facts_that_are_no_object_are_refused(facts: str) -> None:
    reply = Manifest("base/0", (), {}).to_proto()
    reply.facts = facts
    with pytest.raises(DataError, match="facts"):
        Manifest.from_proto(reply)
