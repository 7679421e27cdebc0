"""What a user does wrong is said before the seconds that torch and transformers take to load."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.config.peer import PeerConfig
from meshd.errors import ResourceError
from meshd.ground import hold_ground
from meshd.identity import Identity
from meshd.state.lock import lock_state_dir

LINK = "meshd:0123456789abcdef0123456789abcdef01234567@file:/nowhere"
HEAVY = ("torch", "transformers", "hivemind", "grpc", "datasets")

# Runs command lines one after another in one process. What is loaded stays, so a heavy module shows at the first that
# loads it.
DRIVER = f"""
import contextlib, io, json, sys
from meshd.cli import main
out = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["meshd", *arguments]
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    out.append([code, said.getvalue(), [name for name in {HEAVY!r} if name in sys.modules]])
print(json.dumps(out))
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_faults_of_the_user_are_said_before_anything_heavy_is_loaded(tmp_path: Path, taken: int) -> None:
    """C12."""
    spec, broken, unknown = tmp_path / "run.toml", tmp_path / "broken.toml", tmp_path / "unknown.toml"
    tables = '[model]\nsource = "nowhere"\nstages = 1\n[data]\nsources = ["nowhere"]\nseq_len = 8\n[stop]\nsteps = 1\n'
    spec.write_text(f'name = "t"\n{tables}')
    broken.write_text("x")
    unknown.write_text(spec.read_text() + "step = 1\n")
    plain, locked, foreign = tmp_path / "plain", tmp_path / "locked", tmp_path / "foreign"
    plain.write_text("")
    foreign.mkdir()
    (foreign / "identity.key").write_text("rubbish")
    free = ["--state-dir", str(tmp_path / "state")]
    cases = [
        (["run", str(broken)], 2, "not valid TOML"),
        (["run", str(unknown)], 2, "stop.step = 1: unknown field"),
        (["join", "http://example.org"], 2, "does not begin with `meshd:`"),
        (["join", LINK, "--state-dir", str(plain)], 3, "a file is where a directory is needed"),
        (["join", LINK, "--state-dir", str(locked)], 3, "in use by another meshd"),
        (["run", str(spec), "--state-dir", str(foreign)], 3, "is not a meshd identity"),
        (["run", str(spec), *free, "--port", str(taken)], 3, f"port {taken} (port): Address already in use"),
        (["join", LINK, *free, "--dht-port", str(taken)], 3, f"port {taken} (dht_port): Address already in"),
        (["join", LINK, *free, "--listen", "203.0.113.7"], 3, "cannot listen on 203.0.113.7"),
    ]  # fmt: skip
    with lock_state_dir(locked):
        command = [sys.executable, "-c", DRIVER, json.dumps([arguments for arguments, _, _ in cases])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for (arguments, code, words), (ended, said, heavy) in zip(cases, json.loads(done.stdout), strict=True):
        assert (ended, heavy) == (code, []), (arguments, said)
        assert "meshd: " in said, arguments
        assert "Traceback" not in said, arguments
        assert words in said, arguments


def test_the_ground_is_held_and_named_while_the_block_lasts(tmp_path: Path) -> None:
    config = PeerConfig(state_dir=tmp_path / "state")
    with hold_ground(config) as ground:
        assert ground.state_dir == tmp_path / "state"
        known = Identity.load_or_create(tmp_path / "state" / "identity.key")
        assert known[0].peer_id == ground.identity.peer_id
        assert known[1] is False
        with pytest.raises(ResourceError, match="in use by another meshd"), hold_ground(config):
            pass
    with hold_ground(config) as again:
        assert again.identity.peer_id == ground.identity.peer_id
