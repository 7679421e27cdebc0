"""The lock on a peer's state directory."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.errors import ResourceError
from meshd.state.lock import lock_state_dir


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
        "import sys; from pathlib import Path; from meshd.state.lock import lock_state_dir\n"
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
