"""A swarm whose registry is lost trains on with the peers it knows; and what its watchdogs say meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from swarm import Swarm, swarm, tiny_spec

from meshd.config.runspec import RunSpec
from meshd.discovery.records import RecordBook
from meshd.discovery.registry import Registry
from meshd.errors import NetworkError
from meshd.observe.log import fields_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual

# One way, seconds: so long that minutes of virtual time are few microbatches, and a question is answered within 3 s.
DELAY = 0.5


def endless(tiny_model: Path, adapt_text: Path) -> RunSpec:
    tables = {"stop": {"steps": 100_000}, "snapshot": {"evaluate": False}, "pipeline": {"in_flight": 1}}
    return tiny_spec(tiny_model, adapt_text, **tables)


class Lost:
    """A registry that can neither be read nor written: what it knew when it was lost, and what peers say themselves."""

    def __init__(self, before: Registry, me: str, clock: VirtualClock) -> None:
        self._book, self._me, self._clock = RecordBook(), me, clock
        for record in before.peers:
            self._book.add(record, clock.time())

    async def announce(self, record: pb.Record) -> None:
        raise NetworkError("the libp2p daemon is down")

    async def withdraw(self) -> None: ...

    async def refresh(self) -> Sequence[pb.Record]:
        return self.peers

    @property
    def peers(self) -> Sequence[pb.Record]:
        return self._book.live(self._clock.time(), without=self._me)

    def heard(self, record: pb.Record) -> None:
        self._book.add(record, self._clock.time())

    @property
    def problem(self) -> str:
        return "the libp2p daemon is down"

    async def close(self) -> None: ...


def lose_registry(s: Swarm, *names: str) -> dict[str, Registry]:
    """Take the registry from these peers; what they had."""
    had = {}
    for name in names:
        directory = s.peers[name].status.directory
        assert directory is not None
        had[name] = directory.registry
        directory.registry = Lost(directory.registry, name, s.clock)
    return had


def knows(s: Swarm, name: str) -> set[str]:
    directory = s.peers[name].status.directory
    assert directory is not None
    return {record.peer_id for record in directory.peers}


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [fields_of(record) for record in caplog.records if record.getMessage() == event]


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(["a", "b", "c", "seed"], id="everybody's"),
        pytest.param(["b"], id="one peer's", marks=pytest.mark.slow),
    ],
)
def test_c13_training_goes_on_without_the_registry(
    lost: list[str], tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records live for 30 s: long after that the peers know each other still, and one that died is forgotten."""
    spec = endless(tiny_model, adapt_text)

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "a", "b", "c")
            await s.gathered(["a"], ["b", "c"])
            await s.until(lambda: s.tokens("a") > 0)
            had = lose_registry(s, *lost)
            await s.clock.sleep(100.0)
            assert {"b", "c"} <= knows(s, "a")
            assert {"a", "c"} <= knows(s, "b"), "the one whose registry is gone is known, too"
            before = s.tokens("a")
            await s.clock.sleep(10.0)
            assert s.tokens("a") > before
            status = await s.peers["b"].status.answer(pb.StatusRequest())
            assert status.self.last_error == "the libp2p daemon is down"
            await s.kill("c")
            # Until now the other replica may have had it all.
            added = s.counted("microbatches_added", "b")
            await s.clock.sleep(40.0)
            assert s.counted("microbatches_added", "b") > added
            assert s.peers["b"].watchdog.health().ok, "useful work counts, not the registry"
            assert "c" not in knows(s, "a")
            assert "c" not in knows(s, "b")
            for name, registry in had.items():
                directory = s.peers[name].status.directory
                assert directory is not None
                directory.registry = registry
            await s.clock.sleep(10.0)
            assert knows(s, "b") == {"a", "seed"}

    with caplog.at_level(logging.INFO):
        run_virtual(scenario())
    assert len(said(caplog, "announce_failed")) == len(lost), "once for each loss, not at every renewal"
    assert len(said(caplog, "announced_again")) == len(lost) - ("c" in lost)


def test_c15_a_watchdog_tells_idle_from_waiting(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = endless(tiny_model, adapt_text)

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "a", "b")
            s.start("b", 1)
            await s.until(lambda: s.peers["b"].me.state == pb.PEER_STATE_WORKING)
            await s.clock.sleep(90.0)
            alone = s.peers["b"].watchdog.health()
            assert alone.ok
            assert "nobody serves stage 0" in alone.why
            # Somebody serves it now, but nothing comes from there.
            s.cut(["a"], ["b"])
            s.start("a", 0)
            await s.until(lambda: s.peers["a"].me.state == pb.PEER_STATE_WORKING)
            await s.clock.sleep(90.0)
            idle = s.peers["b"].watchdog.health()
            assert not idle.ok
            assert idle.why.startswith("no useful work for 1 min")
            status = await s.peers["b"].status.answer(pb.StatusRequest())
            assert "no useful work" in status.self.last_error
            assert status.self.metrics["healthy"] == 0.0
            assert s.peers["seed"].watchdog.health().ok
            s.network.heal()
            await s.until(lambda: s.peers["b"].watchdog.health().ok)
            await s.until(lambda: s.peers["b"].metrics.value("healthy") == 1.0)
            assert s.counted("microbatches_added", "b") > 0

    with caplog.at_level(logging.INFO):
        run_virtual(scenario())
    assert said(caplog, "unhealthy")
    assert said(caplog, "healthy_again")
