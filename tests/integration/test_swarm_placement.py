"""Peers that choose their stage, and that go to another one while the swarm trains (C18, C19)."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import pytest
import torch
from swarm import Additions, Swarm, swarm, tiny_spec

from meshd.config.runspec import RunSpec
from meshd.errors import ResourceError
from meshd.model.families import load_config
from meshd.observe.log import fields_of
from meshd.peer import loading, placing
from meshd.peer import stage as stage_module
from meshd.peer.capacity import Capacity
from meshd.peer.directory import Directory
from meshd.peer.loading import stage_memory
from meshd.peer.stage import StagePeer
from meshd.pipeline.worker import BACKWARD, FORWARD, DeviceWorker
from meshd.placement import Rules
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual

T = TypeVar("T")

# Virtual seconds that a pass through a stage takes.
PASS_S = 0.75


class SlowWorker(DeviceWorker):
    """A device that is at work for PASS_S of virtual time over each pass, on one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._worked = 0.0
        super().__init__()

    @property  # type: ignore[override]
    def busy_s(self) -> float:
        return self._worked

    @busy_s.setter
    def busy_s(self, real: float) -> None:
        """The time on this machine is not that of the test."""

    async def run(self, call: Callable[[], T], priority: int = 0) -> T:
        if priority not in (FORWARD, BACKWARD):
            return await super().run(call, priority)
        async with self._turn:
            await asyncio.sleep(PASS_S)
            self._worked += PASS_S
            return await super().run(call, priority)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience: a test need not train for so long."""
    monkeypatch.setattr(placing, "RULES", Rules(quiet_s=15.0, stay_s=60.0))


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stages on which peers of these names begin, although their users do not ask for them."""
    stages: dict[str, int] = {}
    claim = placing.claim_stage

    async def placed(directory: Directory, wanted: int | None, needs: Sequence[int]) -> None:
        await claim(directory, stages.get(directory.me.name, wanted), needs)

    monkeypatch.setattr(stage_module, "claim_stage", placed)
    return stages


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [fields_of(record) for record in caplog.records if record.getMessage() == name]


def stages_of(s: Swarm, names: Sequence[str]) -> dict[str, int]:
    return {name: s.peers[name].me.stage for name in names}


def throughput(s: Swarm, origins: Sequence[str], since: float, until: float) -> float:
    """Tokens per virtual second that came back in a span of time."""
    points = [point for name in origins for point in s.peers[name].status.losses()]
    return sum(p.label_tokens for p in points if since <= p.time < until) / (until - since)


@pytest.mark.slow
def test_a_peer_goes_from_the_fast_stage_to_the_slow_one_while_training_goes_on(
    starting: dict[str, int],
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C19: four and one become three and two, and stay so. With the ring a microbatch is three passes on stage 0 and
    two on stage 1: then both can pass as much."""
    added = Additions(monkeypatch)
    monkeypatch.setattr(stage_module, "DeviceWorker", SlowWorker)
    names = ["a", "b", "c", "d", "e"]
    starting.update(a=0, b=0, c=0, d=0, e=1)
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        model={"tied": "ring"},
        optim={"inner_batch": 8},
        gossip={"every": 4},
        pipeline={"in_flight": 2},
        snapshot={"evaluate": False},
        stop={"steps": 38},
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.01, "seed", *names)
            for name in names:
                s.start(name)
            await s.working(*names)
            assert stages_of(s, names) == starting
            began, incarnation = s.clock.time(), s.peers["a"].me.incarnation
            models = {name: weakref.ref(s.stage_peer(name).runtime.model) for name in names}
            await s.until(lambda: sum(stages_of(s, names).values()) == 2)
            left = s.clock.time()
            (goer,) = (name for name in names[:4] if s.peers[name].me.stage == 1)
            assert s.account(goer).holds
            assert (s.account(goer).open, s.account(goer).dropped) == ({}, 0)
            await s.until(lambda: s.peers[goer].me.state == pb.PEER_STATE_WORKING)
            gc.collect()
            assert models[goer]() is None, "the memory of the old stage is still held"
            assert s.peers[goer].me.incarnation > incarnation
            assert s.version(goer) > 0, "it did not take the state of the stage's other replica"
            works = s.clock.time()
            await s.finished(*names)
            origins = names[:4]
            before = throughput(s, origins, began + 20, left - 40)
            after = throughput(s, origins, works + 10, works + 50)
            assert after > 1.4 * before
            assert stages_of(s, names) == {**starting, goer: 1}
            accounts = [s.account(name) for name in origins]
            assert all(account.holds and not account.open for account in accounts)
            assert sum(account.dropped for account in accounts) == 0
            assert sum(account.tokens for account in accounts) >= spec.stop_tokens
            losses = s.losses(*origins)
            assert mean(losses[-40:]) < mean(losses[:40]) - 0.05
            for name, value in s.parameters("e").items():
                assert torch.equal(value, s.parameters(goer)[name])
        added.check()

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    (line,) = events(caplog, "stage_left")
    assert (line["stage"], line["to"]) == (0, 1)
    # 64 tokens in two passes; and three times 64 in three. Measured, in turns of a second.
    found = re.fullmatch(
        r"stage 1 is the slowest with (\S+) tokens/s, stage 0 keeps (\S+) tokens/s without this peer: .*",
        line["reason"],
    )
    assert found is not None
    assert [float(rate) for rate in found.groups()] == pytest.approx([64 / 1.5, 3 * 64 / 2.25], rel=0.15)
    assert not events(caplog, "drain_cut_short")


def quick(tiny_model: Path, adapt_text: Path, steps: int) -> RunSpec:
    return tiny_spec(
        tiny_model, adapt_text, snapshot={"evaluate": False, "every_tokens": 256}, stop={"steps": steps}
    )


@pytest.mark.slow
def test_a_stage_that_lost_its_last_replica_gets_one_that_another_can_spare(
    starting: dict[str, int],
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the newest snapshot that the seed has; and the peer that its user has pinned stays."""
    added = Additions(monkeypatch)

    def alike(self: Capacity, now: float, microbatches: float, busy_s: float) -> None:
        """As measured here, the slower of two equal peers would go, whichever that is today."""
        self.tokens_per_s = 100.0 if microbatches else 0.0

    monkeypatch.setattr(Capacity, "look", alike)
    names = ["a", "b", "c"]
    starting.update(a=0, b=0)
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        pipeline={"in_flight": 1},
        snapshot={"evaluate": False, "every_tokens": 1536},
        optim={"inner_batch": 6},
        stop={"steps": 40},
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.6, "seed", *names, "z")
            s.start("a")
            s.start("b")
            s.start("c", 0)
            s.start("z", 1)
            await s.working(*names, "z")
            kept = s.store("seed")
            await s.until(lambda: any(name.startswith("snapshot/1/") for name in kept.names()))
            await s.kill("z")
            await s.until(lambda: 1 in stages_of(s, names).values())
            await s.finished(*names)
            # a and b could both go; c is pinned, and so the first of its stage.
            assert stages_of(s, names) == {"a": 0, "b": 1, "c": 0}
            accounts = [s.account(name) for name in names]
            assert all(account.holds and not account.open for account in accounts)
            assert sum(account.tokens for account in accounts) >= spec.stop_tokens
        added.check()

    run_virtual(main())


@pytest.mark.slow
def test_a_peer_comes_back_when_the_stage_it_went_to_does_not_fit(
    starting: dict[str, int],
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory that was free when they came is taken by others meanwhile. Each tries once."""
    spec = quick(tiny_model, adapt_text, 20)
    starting.update(a=0, b=0)
    check, refused = loading.check_memory, Counter[int]()
    full = asyncio.Event()

    def checked(needed: int, parts: str, device: torch.device, stage: int) -> None:
        if full.is_set() and stage == 1:
            refused[stage] += 1
            raise ResourceError("stage 1 needs more than there is")
        check(needed, parts, device, stage)

    monkeypatch.setattr(loading, "check_memory", checked)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.2, "seed", "a", "b", "z")
            s.start("a")
            s.start("b")
            s.start("z", 1)
            await s.working("a", "b", "z")
            await s.until(lambda: s.version("b") > 0)
            full.set()
            await s.kill("z")
            await s.until(lambda: refused[1] > 0)
            await s.until(lambda: s.peers["b"].me.state == pb.PEER_STATE_WORKING)
            assert s.peers["b"].me.stage == 0
            assert s.version("b") > 0
            await s.clock.sleep(600.0)
            assert refused[1] == 2
            assert stages_of(s, ["a", "b"]) == {"a": 0, "b": 0}
            full.clear()
            s.start("z", 1)
            await s.finished("a", "b", "z")
            accounts = [s.account(name) for name in ("a", "b")]
            assert all(account.holds and not account.open for account in accounts)

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    for line in events(caplog, "move_failed"):
        assert (line["stage"], line["back_to"], line["reason"]) == (1, 0, "stage 1 needs more than there is")


def test_an_origin_that_leaves_takes_its_own_back_over_the_ring(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """Of what it has in flight, the last pass is its own to make: nobody else can."""
    spec = tiny_spec(
        tiny_model, adapt_text, model={"tied": "ring"}, snapshot={"evaluate": False}, stop={"steps": 12}
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.4, "seed", "a0", "b0", "a1")
            await s.gathered(["a0", "b0"], ["a1"])
            await s.until(lambda: s.account("b0").committed >= 4)
            s.peers["b0"].leave()
            await s.finished("b0")
            left = s.account("b0")
            assert left.holds
            assert (left.open, left.dropped) == ({}, 0)
            await s.finished("a0", "a1")

    run_virtual(main())


def needs_of(s: Swarm) -> list[int]:
    """Bytes that each stage takes."""
    config = load_config(s.store("seed").path("run/tokenizer", "config.json").parent)
    return [stage_memory(s.run, config, stage).total for stage in range(s.run.stages)]


def test_newcomers_with_too_little_memory_for_one_stage_take_the_other(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = quick(tiny_model, adapt_text, 4)
    memory: dict[str, int] = {}
    monkeypatch.setattr(StagePeer, "_memory", lambda self: memory[self._config.name])

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            small, large = sorted(needs_of(s))
            names = ["large1", "large2", "small1", "small2", "small3"]
            memory.update({name: small if name.startswith("small") else large for name in names})
            s.delay(0.5, "seed", *names)
            for name in names:
                s.start(name)
            await s.working(*names)
            roomy = needs_of(s).index(large)
            stages = stages_of(s, names)
            assert {stages[name] for name in names[2:]} == {1 - roomy}
            # At least one of those who can has taken the other.
            assert roomy in {stages[name] for name in names[:2]}
            await s.finished(*names)

    run_virtual(main())


def test_a_newcomer_that_no_stage_fits_says_what_is_needed_and_what_there_is(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18; and the stage that its user wants is not second-guessed, but refused before it is loaded."""
    monkeypatch.setattr(StagePeer, "_memory", lambda self: 1 << 20)

    async def main() -> None:
        async with swarm(quick(tiny_model, adapt_text, 2), tmp_path) as s:
            s.start("a")
            await s.finished("a")

    with pytest.raises(ExceptionGroup) as raised:
        run_virtual(main())
    assert raised.group_contains(
        ResourceError, match=r"the smallest, stage \d, needs about 0\.\d+ GiB, and 0\.00 GiB are free\. Fix: "
    )
