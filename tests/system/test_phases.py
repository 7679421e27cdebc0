"""Real processes that are killed or stopped in each phase of a microbatch, one after the other in one run that then
ends by itself: its books balance, and nothing is left of it."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from daemons import LONG_S, Daemon, Launcher, launcher, status, until, write_spec

from meshd.swarm.chaos.evidence import read_journal

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

PHASED = Path(__file__).parent / "phased.py"
# The others notice that a process is stopped within about 5 s.
STOPPED_S = 6.0
STEPS = 180

ORIGIN, REPLICA = "first", "other"
# Who is in it, and what happens to it then: each phase once with real processes, those that leave most behind by a
# kill. All pairs of phase and fault are tried on virtual time (tests/integration/test_swarm_matrix.py).
STRIKES = [
    ("offered", REPLICA, signal.SIGSTOP),
    ("accepted", REPLICA, signal.SIGSTOP),
    ("computing forward", REPLICA, signal.SIGSTOP),
    ("half streamed", REPLICA, signal.SIGKILL),
    # While the replica starts again, the origin is at hand.
    ("sent on", ORIGIN, signal.SIGSTOP),
    ("computing backward", ORIGIN, signal.SIGSTOP),
    ("returned", REPLICA, signal.SIGSTOP),
    ("inner step", REPLICA, signal.SIGSTOP),
    ("backward half streamed", REPLICA, signal.SIGKILL),
    ("waiting", ORIGIN, signal.SIGKILL),
    ("gossip half done", REPLICA, signal.SIGKILL),
    ("committed", ORIGIN, signal.SIGKILL),
    ("snapshot half written", REPLICA, signal.SIGKILL),
]


class Swarm:
    """A seed, `first` on stage 0, `fixed` and `other` on stage 1, all of which obey orders."""

    def __init__(self, launch: Launcher, spec: Path) -> None:
        self.launch, self.orders = launch, launch.root / "orders"
        self.orders.mkdir()
        (self.orders / "slow").touch()
        self.command = (sys.executable, str(PHASED), str(self.orders))
        self.seed = launch.start("seed", "run", str(spec), "--role", "seed", command=self.command)
        self.link = self.seed.link()
        self.stages = {"first": 0, "fixed": 1, "other": 1}
        self.peers: dict[str, Daemon] = {}
        self.starting: set[str] = set()
        for name in self.stages:
            self.start(name)

    def start(self, name: str) -> None:
        """It need not work yet when this returns: that takes long, and others can be struck meanwhile."""
        stage = ("--stage", str(self.stages[name]))
        self.peers[name] = self.launch.start(name, "join", self.link, *stage, command=self.command)
        self.starting.add(name)

    def working(self, *names: str) -> None:
        for name in self.starting.intersection(names):
            self.peers[name].wait_log("stage_ready")
        self.starting.difference_update(names)

    def tokens(self) -> int:
        return status(self.seed).global_tokens

    def trains_on(self) -> None:
        now = self.tokens()
        until(lambda: self.tokens() > now, "training goes on", more=self.said)

    def said(self) -> str:
        return "\n".join(f"--- {name}:\n{peer.text()[-3000:]}" for name, peer in self.peers.items())

    def strike(self, phase: str, name: str, number: signal.Signals) -> None:
        self.working(ORIGIN, name)
        order, peer = self.orders / name, self.peers[name]
        fresh = self.orders / "fresh"
        fresh.write_text(f"{phase.replace(' ', '-')} {number.name}")
        fresh.rename(order)
        until(lambda: not order.exists(), f"{name} comes to {phase!r}", 2 * LONG_S, self.said)
        if number == signal.SIGKILL:
            assert peer.ended() == -signal.SIGKILL
            self.start(name)
            self.working(ORIGIN)
        else:
            until(lambda: psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED, f"{name} is stopped")
            time.sleep(STOPPED_S)
            if name != ORIGIN:
                self.trains_on()
            peer.signal(signal.SIGCONT)
        self.trains_on()


def test_each_phase_with_real_processes(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> None:
    spec = write_spec(
        tmp_path / "run.toml",
        tiny_model,
        adapt_text,
        optim={"inner_batch": 8},
        snapshot={"every_tokens": 2048},
        data={"held_out_sequences": 16},
        stop={"steps": STEPS},
    )
    with launcher(tmp_path) as launch:
        swarm = Swarm(launch, spec)
        swarm.working(*swarm.stages)
        swarm.trains_on()
        for phase, name, number in STRIKES:
            began = time.monotonic()
            swarm.strike(phase, name, number)
            print(
                f"{phase}: {number.name} of {name}, {time.monotonic() - began:.0f} s, {swarm.tokens()} tokens"
            )
        assert swarm.tokens() < STEPS * 8 * 32, "there was training to disturb to the last"
        swarm.working(*swarm.stages)
        (swarm.orders / "slow").unlink()
        for name, peer in swarm.peers.items():
            assert peer.ended(3 * LONG_S) == 0, f"{name}:\n{peer.text()}"
        losses = {point.tokens: point.loss for point in status(swarm.seed).evaluations}
        assert losses[STEPS * 8 * 32] < losses[0] - 0.1
        swarm.seed.leave()
        for daemon in launch.daemons:
            assert "Traceback" not in daemon.text(), daemon.text()
        assert launch.sessions() == []
        assert launch.forgotten() == []
        journals = list(tmp_path.glob("*/runs/*/journal"))
        assert len(journals) == 1
        account = read_journal(journals[0])
        assert account.holds
        kills = sum(name == ORIGIN and number == signal.SIGKILL for _, name, number in STRIKES)
        # Whatever the origin had out when it was killed, and nothing else: what others lost was sent again.
        assert kills <= account.dropped <= 4 * kills
        assert account.partial == account.dropped
        assert account.tokens >= STEPS * 8 * 32
