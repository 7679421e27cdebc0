"""The peer's small state, and the lock on its directory."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.errors import DataError, ResourceError
from meshd.state.peer_state import PeerState, load_peer_state, lock_state_dir, save_peer_state


def state(next_sequence: int) -> PeerState:
    return PeerState(
        run_id="ab" * 20,
        stage=2,
        incarnation=1234567890123,
        next_sequence=next_sequence,
        ledger={"injected": 7, "committed": 5},
        stream={"epoch": 1, "cursor": [3, 9]},
        committed={"peer": 2**60},
    )


def test_round_trip(tmp_path: Path) -> None:
    """C25: the data position is part of the state."""
    assert load_peer_state(tmp_path) is None
    save_peer_state(tmp_path, state(1))
    save_peer_state(tmp_path, state(2))
    assert load_peer_state(tmp_path) == (state(2), False)


@pytest.mark.parametrize("tear", ["truncate", "flip", "empty", "remove"])
def test_torn_file_falls_back_to_the_copy_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tear: str
) -> None:
    save_peer_state(tmp_path, state(1))
    save_peer_state(tmp_path, state(2))
    path = tmp_path / "peer.json"
    text = path.read_text()
    if tear == "remove":  # a crash between the two renames
        path.unlink()
    else:
        path.write_text(
            {"truncate": text[:50], "flip": text.replace('_sequence":2', '_sequence":3'), "empty": ""}[tear]
        )
    with caplog.at_level(logging.WARNING):
        assert load_peer_state(tmp_path) == (state(1), True)
    assert "peer.json" in caplog.text
    # Saving over a torn file must not push the last good copy out.
    save_peer_state(tmp_path, state(4))
    path.write_text("")
    assert load_peer_state(tmp_path) == (state(1), True)


def test_both_torn_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save_peer_state(tmp_path, state(1))
    save_peer_state(tmp_path, state(2))
    (tmp_path / "peer.json").write_text("{}")
    (tmp_path / "peer.previous.json").write_text("[1")
    with pytest.raises(DataError, match=r"neither .* can be read\. Fix:"):
        load_peer_state(tmp_path)


def test_full_disk_keeps_the_former_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C29."""
    save_peer_state(tmp_path, state(1))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="Fix: free space"):
        save_peer_state(tmp_path, state(2))
    monkeypatch.undo()
    assert load_peer_state(tmp_path) == (state(1), False)
    assert [path.name for path in tmp_path.iterdir()] == ["peer.json"]


def test_lock_is_exclusive_and_names_the_holder(tmp_path: Path) -> None:
    with (
        lock_state_dir(tmp_path / "new"),
        pytest.raises(ResourceError, match=rf"process {os.getpid()}\)\. Fix:"),
        lock_state_dir(tmp_path / "new"),
    ):
        pass
    with lock_state_dir(tmp_path / "new"):
        pass


def test_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from meshd.state.peer_state import lock_state_dir\n"
        "with lock_state_dir(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ResourceError, match=rf"process {other.pid}\)"), lock_state_dir(tmp_path):
            pass
        other.kill()
    with lock_state_dir(tmp_path):
        pass


def test_no_permission_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "lock"))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ResourceError, match=r"lock: no permission .*Fix:"), lock_state_dir(tmp_path):
        pass
