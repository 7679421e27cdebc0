"""What users get wrong, through the real command line: the exit code, one clear message, no traceback.

A process that gets as far as torch takes its time to start: most of these are slow.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemons import Daemon, Finished, Launcher, launcher, meshd, status, until, write_spec

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

RUN_ID = "0123456789abcdef0123456789abcdef01234567"


def altered(change: str) -> tuple[str, ...]:
    """The meshd command in a process where `change`, Python statements, was made first."""
    return sys.executable, "-c", f"{change}\nfrom meshd.cli import main\nmain()"


def refused(done: Finished, code: int, *words: str) -> None:
    """It ended with `code` and one message that has all `words`."""
    message = done.err[done.err.rfind("meshd: ") :]
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert message.startswith("meshd: "), done.err
    for word in words:
        assert word in message, message


@pytest.fixture
def spec(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> Path:
    return write_spec(tmp_path / "run.toml", tiny_model, adapt_text)


def run(spec: Path, *options: str) -> Finished:
    return meshd("run", str(spec), "--role", "seed", "--state-dir", str(spec.parent / "state"), *options)


# ---- the run spec ---------------------------------------------------------------------------------------------------


def test_unknown_field(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> None:
    spec = write_spec(tmp_path / "run.toml", tiny_model, adapt_text, data={"seq_length": 32})
    refused(run(spec), 2, "data.seq_length = 32: unknown field", "did you mean `seq_len`?")


def test_wrong_type(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> None:
    spec = write_spec(tmp_path / "run.toml", tiny_model, adapt_text, data={"seq_len": "32"})
    refused(run(spec), 2, "data.seq_len = '32': wrong type", "tokens per sequence")


@pytest.mark.slow
def test_missing_model_files(tmp_path: Path, adapt_text: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    refused(
        run(write_spec(tmp_path / "run.toml", tmp_path / "model", adapt_text)), 2, str(tmp_path / "model")
    )


@pytest.mark.slow
def test_corpus_shorter_than_one_sequence(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Only {number} words.")
    refused(run(write_spec(tmp_path / "run.toml", tiny_model, tmp_path / "text")), 2, "token", "32")


def test_corpus_with_invalid_utf8(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "bad.txt").write_bytes(b"good words \xff\xfe bad ones " * 100)
    refused(run(write_spec(tmp_path / "run.toml", tiny_model, tmp_path / "text")), 2, "bad.txt", "UTF-8")


@pytest.mark.slow
def test_cut_with_more_stages_than_layers(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> None:
    spec = write_spec(
        tmp_path / "run.toml", tiny_model, adapt_text, model={"stages": 9, "cut": list(range(1, 9))}
    )
    refused(run(spec), 2, "6 layers")


# ---- this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--port", pytest.param("--dht-port", marks=pytest.mark.slow)])
def test_port_in_use(spec: Path, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run(spec, option, str(port)), 3, f"port {port}", "in use", "Fix: ")


@pytest.mark.slow
def test_a_file_in_place_of_the_state_directory(spec: Path) -> None:
    (spec.parent / "state").write_text("")
    refused(run(spec), 3, str(spec.parent / "state"), "a file is where a directory is needed")


def test_no_write_permission(tmp_path: Path) -> None:
    """As another user: tests may run as root, who may write anywhere."""
    user = ("setpriv", "--reuid=65534", "--clear-groups") if os.geteuid() == 0 else ()
    tmp_path.chmod(0o555)
    link = f"meshd:{RUN_ID}@file:/nowhere"
    done = meshd(
        "join", link, "--state-dir", str(tmp_path / "state"), command=(*user, sys.executable, "-m", "meshd")
    )
    refused(done, 3, str(tmp_path), "no permission", "Fix: ")


def test_garbage_links() -> None:
    refused(
        meshd("join", "http://example.org"), 2, "link = 'http://example.org'", "does not begin with `meshd:`"
    )
    refused(meshd("join", "meshd:12@/ip4/1.2.3.4/tcp/1/p2p/x"), 2, "the run id '12' is not 40 hex digits")


@pytest.mark.slow
def test_a_registry_file_that_is_not_there(tmp_path: Path) -> None:
    done = meshd("join", f"meshd:{RUN_ID}@file:{tmp_path}/none.toml", "--state-dir", str(tmp_path / "state"))
    refused(done, 3, f"{tmp_path}/none.toml", "No such file")


# ---- the swarm ------------------------------------------------------------------------------------------------------


@dataclass
class Swarm:
    """A seed that waits for stages. `other`: a link to it with the id of another run."""

    launch: Launcher
    seed: Daemon
    spec: Path
    link: str

    @property
    def other(self) -> str:
        return f"meshd:{RUN_ID}@{self.link.partition('@')[2]}"

    def join(self, command: tuple[str, ...], link: str, name: str) -> Finished:
        return meshd(
            "join", link, "--stage", "0", "--state-dir", str(self.launch.root / name), command=command
        )


@pytest.fixture(scope="module")
def swarm(tiny_model: Path, adapt_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    root = tmp_path_factory.mktemp("bad")
    spec = write_spec(
        root / "run.toml",
        tiny_model,
        adapt_text,
        model={"stages": 1, "cut": []},
        stop={"steps": 100_000},
        snapshot={"every_tokens": 256, "evaluate": False},
    )
    with launcher(root) as launch:
        seed = launch.seed(spec)
        yield Swarm(launch, seed, spec, seed.link())
        seed.leave()
        assert launch.sessions() == []


@pytest.mark.slow
def test_state_directory_in_use(swarm: Swarm) -> None:
    done = meshd("run", str(swarm.spec), "--state-dir", str(swarm.seed.state))
    refused(done, 3, str(swarm.seed.state), f"in use by another meshd (process {swarm.seed.pid})", "Fix: ")


@pytest.mark.slow
def test_a_link_of_another_run(swarm: Swarm) -> None:
    command = altered("import meshd.peer.join as join; join._UNSERVED_S = 1.0")
    refused(swarm.join(command, swarm.other, "other"), 5, f"nobody there is of run {RUN_ID}", "Fix: ")


@pytest.mark.slow
def test_another_protocol_version(swarm: Swarm) -> None:
    command = altered("import meshd; meshd.PROTOCOL_VERSION += 1")
    refused(swarm.join(command, swarm.link, "newer"), 5, "protocol", "update the older meshd")


@pytest.mark.slow
def test_c18_a_stage_that_does_not_fit_says_how_much_it_needs(swarm: Swarm) -> None:
    command = altered(
        "import psutil, types; psutil.virtual_memory = lambda: types.SimpleNamespace(available=1 << 20)"
    )
    refused(swarm.join(command, swarm.link, "small"), 3, "stage 0 needs about", "GiB free", "Fix: ")


@pytest.mark.slow
def test_clock_skew_is_said(swarm: Swarm) -> None:
    command = altered("import time; real = time.time; time.time = lambda: real() + 10")
    peer = swarm.launch.start("ahead", "join", swarm.link, "--role", "seed", command=command)
    peer.wait_log("clock_skew peer=seed seconds=(9|10).*behind this machine's. Fix: synchronise the clocks")
    peer.leave()


@pytest.mark.slow
def test_c29_a_full_disk_does_not_stop_training_and_status_says_so(swarm: Swarm, tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "none", tmp_path], check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        peer = swarm.launch.start("full", "join", swarm.link, "--stage", "0", state=tmp_path / "state")
        peer.wait_log("peer.snapshots: snapshot tokens=")
        _fill(tmp_path / "filler")
        peer.wait_log("snapshot_failed .*no space left on the disk")
        now = status(peer)
        assert "no space left on the disk" in now.self.last_error
        until(lambda: status(peer).global_tokens > now.global_tokens, "training goes on")
        (tmp_path / "filler").unlink()
        peer.wait_log("peer.snapshots: snapshot tokens=")
        until(lambda: not status(peer).self.last_error, "the trouble is over")
        peer.leave()
        journal_damaged(peer, swarm.link)
    finally:
        swarm.launch.sweep("full")
        subprocess.run(["umount", tmp_path], check=True)


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            return


def journal_damaged(peer: Daemon, link: str) -> None:
    """A peer that has left and whose journal was damaged since says which line it cannot read."""
    (journal,) = peer.state.glob("runs/*/journal")
    journal.write_bytes(journal.read_bytes() + b"X 1\n")
    done = meshd("join", link, "--stage", "0", "--state-dir", str(peer.state))
    refused(done, 2, str(journal), "unknown kind 'X'", "Move the file away")


@pytest.mark.slow
def test_a_damaged_run_file_is_asked_for_again(swarm: Swarm) -> None:
    state = swarm.launch.root / "damaged"
    folder = state / "runs" / swarm.link.partition(":")[2][:16]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    peer = swarm.launch.start("damaged", "join", swarm.link, "--stage", "0", state=state)
    try:
        peer.wait_log("run_file_unusable .*is damaged or of another version")
        peer.wait_log("peer.peer: run_known")
        peer.leave()
    finally:
        swarm.launch.sweep("damaged")
