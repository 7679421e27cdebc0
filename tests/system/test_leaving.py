"""Peers that leave, are interrupted or killed, and come back, in one swarm of separate processes that trains on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemons import Daemon, Launcher, family, launcher, nothing_left, status, until, write_spec

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Swarm:
    """A seed, stage 0 (once), stage 1 (`fixed` and `other`), of a run without an end in sight."""

    launch: Launcher
    spec: Path
    link: str
    seed: Daemon
    first: Daemon
    fixed: Daemon

    def other(self) -> Daemon:
        """Start the second replica of stage 1; it works when this returns."""
        peer = self.launch.stage(self.link, 1, "other")
        peer.wait_log("stage_ready")
        return peer

    def trains_on(self, daemon: Daemon) -> None:
        """Wait until `daemon` knows of more committed tokens than now."""
        now = self.tokens(daemon)
        until(lambda: self.tokens(daemon) > now, f"training goes on, as {daemon.name} sees it")

    @staticmethod
    def tokens(daemon: Daemon) -> int:
        return status(daemon).global_tokens


@pytest.fixture(scope="module")
def swarm(tiny_model: Path, adapt_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    root = tmp_path_factory.mktemp("leaving")
    spec = write_spec(
        root / "run.toml",
        tiny_model,
        adapt_text,
        stop={"steps": 100_000},
        snapshot={"every_tokens": 10**9, "evaluate": False},
    )
    with launcher(root) as launch:
        seed = launch.seed(spec)
        link = seed.link()
        first, fixed = launch.stage(link, 0, "first"), launch.stage(link, 1, "fixed")
        for daemon in (first, fixed):
            daemon.wait_log("stage_ready")
        yield Swarm(launch, spec, link, seed, first, fixed)
        for daemon in (first, fixed):
            daemon.leave()


def test_c30_sigterm_leaves_in_good_order(swarm: Swarm) -> None:
    peer = swarm.other()
    swarm.seed.wait_log("peer_found peer=other")
    processes = family(peer)
    assert [process.name() for process in processes[1:]] == ["p2pd"]
    peer.signal(signal.SIGTERM)
    assert peer.ended() == 0, peer.text()
    assert "daemon: leaving" in peer.text()
    assert "Traceback" not in peer.text()
    assert nothing_left(processes)
    # Taken back, not expired: a record lives for 30 s.
    swarm.seed.wait_log("peer_gone peer=other", timeout_s=20)
    assert not (peer.state / "daemon.json").exists()
    swarm.trains_on(swarm.first)


def test_c30_ctrl_c_reaches_the_whole_process_group(swarm: Swarm) -> None:
    """As a terminal sends it: p2pd must be there until the record is taken back."""
    peer = swarm.other()
    swarm.seed.wait_log("peer_found peer=other")
    processes = family(peer)
    os.killpg(os.getpgid(peer.pid), signal.SIGINT)
    assert peer.ended() == 0, peer.text()
    assert "libp2p daemon lost" not in peer.text()
    assert nothing_left(processes)
    swarm.seed.wait_log("peer_gone peer=other", timeout_s=20)


def test_c30_a_second_signal_ends_it_at_once(swarm: Swarm) -> None:
    # Stopped meanwhile, so that it finds both when it goes on.
    peer = swarm.other()
    processes = family(peer)
    peer.signal(signal.SIGSTOP)
    peer.signal(signal.SIGTERM)
    peer.signal(signal.SIGINT)
    peer.signal(signal.SIGCONT)
    assert peer.ended() == 130, peer.text()
    assert nothing_left(processes)


def test_a_killed_replica_is_survived_and_goes_on_from_its_state(swarm: Swarm) -> None:
    peer = swarm.other()
    until(lambda: steps(peer) > 0, "the replica steps")
    processes = family(peer)
    peer.signal(signal.SIGKILL)
    assert peer.ended() == -signal.SIGKILL
    swarm.trains_on(swarm.first)
    until(lambda: nothing_left(processes), "p2pd ends with its daemon")
    assert "Traceback" not in swarm.first.text()
    again = swarm.other()
    assert steps(again) > 0
    swarm.trains_on(again)
    again.leave()


def steps(daemon: Daemon) -> int:
    return status(daemon).self.weight_version


def test_a_seed_may_die_and_comes_back_where_it_was(swarm: Swarm) -> None:
    swarm.seed.signal(signal.SIGKILL)
    assert swarm.seed.ended() == -signal.SIGKILL
    swarm.trains_on(swarm.first)
    # A volunteer who comes now waits, is told why, and goes on when the seed is back.
    late = swarm.launch.stage(swarm.link, 1, "late")
    address = swarm.link.partition("@")[2]
    late.wait_log(f"cannot reach bootstrap address {address}: connection refused")
    late.wait_log("no_run_yet")
    swarm.seed = swarm.launch.seed(swarm.spec)
    assert swarm.seed.link() == swarm.link
    swarm.seed.wait_log("peer_found peer=first")
    late.wait_log("stage_ready")
    late.leave()
    swarm.trains_on(swarm.seed)
