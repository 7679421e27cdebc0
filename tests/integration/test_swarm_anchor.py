"""Anchors in whole runs: they follow all stages, measure them on clean passes, publish, and hold nobody up (issue 6,
points 1 and 4)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen import Freezer, run_freezing
from google.protobuf.message import Message
from swarm import SERVING, Additions, Swarm, swarm, tiny_spec

from meshd.anchor.passes import CleanPasses
from meshd.anchor.refresh import Refresher
from meshd.anchor.spreading import Publisher
from meshd.config.runspec import RunSpec
from meshd.model.stage import StageModel
from meshd.observe.log import fields_of
from meshd.optim.corrector import decoder_matrix
from meshd.peer import anchor as anchor_module
from meshd.priors import weight_file
from meshd.priors.boundary import BoundaryPrior
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery

# One way, virtual seconds: so that a run lasts, and refreshes fall into it.
SLOW = 0.3
ANCHORS = {"refresh_steps": 3, "passes": 2, "rank": 4}


def spec_for(weights: Path, text: Path, steps: int, **tables: dict[str, Any]) -> RunSpec:
    values: dict[str, Any] = {"anchors": ANCHORS, "snapshot": {"evaluate": False}, "stop": {"steps": steps}}
    return tiny_spec(weights, text, **{**values, **tables})


@dataclass
class Watch:
    """What anchors of this process publish, and their copies of the model."""

    published: list[tuple[int, int, bytes, dict[str, int]]] = field(default_factory=list)
    refreshers: list[Refresher] = field(default_factory=list)

    @property
    def stages(self) -> list[StageModel]:
        return self.refreshers[-1]._passes._model.stages

    def distance(self, s: Swarm, name: str, stage: int) -> float:
        """Root mean square difference of the newest anchor's copy to a replica's parameters."""
        theirs, mine = s.parameters(name), self.stages[stage].named()
        gaps = [(mine[key].detach() - value).flatten() for key, value in theirs.items()]
        return float(torch.cat(gaps).square().mean().sqrt())

    def of(self, kind: int) -> list[tuple[int, bytes, dict[str, int]]]:
        return [(number, data, facts) for k, number, data, facts in self.published if k == kind]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    seen = Watch()
    publish = Publisher.publish

    async def noted(self: Publisher, kind: pb.PriorKind, number: int, data: bytes, **facts: int) -> None:
        seen.published.append((kind, number, data, facts))
        await publish(self, kind, number, data, **facts)

    class Noted(Refresher):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            seen.refreshers.append(self)

    monkeypatch.setattr(Publisher, "publish", noted)
    monkeypatch.setattr(anchor_module, "Refresher", Noted)
    return seen


def moved(s: Swarm, name: str, start: dict[str, torch.Tensor]) -> float:
    """How far a replica has come, root mean square."""
    gaps = [(value - start[key]).flatten() for key, value in s.parameters(name).items()]
    return float(torch.cat(gaps).square().mean().sqrt())


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_anchor_follows_all_stages_measures_them_and_publishes(
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    offload: bool,
) -> None:
    added = Additions(monkeypatch)
    spec = spec_for(
        tiny_model,
        adapt_text,
        20,
        wire={"forward": "spectral:bits=2", "backward": "spectral:bits=1", "prior_tokens": 256},
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1")
            s.start("anchor", role="anchor", offload=offload)
            await s.gathered(["a0"], ["a1"])
            starts = [s.parameters(name) for name in ("a0", "a1")]
            await s.until(lambda: s.counted("anchor_refreshes", "anchor") >= 3)
            assert s.peers["anchor"].me.state in SERVING
            last = watch.published[-1][3]["weight_version"]
            assert last >= 2 * ANCHORS["refresh_steps"]
            for stage, name in enumerate(("a0", "a1")):
                assert watch.distance(s, name, stage) < 0.7 * moved(s, name, starts[stage])
            await s.finished("a0", "a1", "anchor")  # it leaves when the run has its tokens
            assert s.account("a0").holds
            check_published(s, watch, spec)
            # Its own counts are nobody's: it is no replica.
            assert s.counted("microbatches_added", "anchor") == 0

    def check_published(s: Swarm, watch: Watch, spec: RunSpec) -> None:
        refreshes = s.counted("anchor_refreshes", "anchor")
        boundaries, weights = watch.of(pb.PRIOR_KIND_BOUNDARY), watch.of(pb.PRIOR_KIND_WEIGHTS)
        assert 1 <= len(boundaries) <= refreshes + 1
        assert {number for number, _, _ in weights} == {0, 1}
        rank = watch.refreshers[0]._passes.boundaries[0].now.features.rank
        for _, data, facts in boundaries:
            prior = BoundaryPrior.from_bytes(data, s.run.resolved.hidden, rank)
            assert prior.boundary == 0
            assert prior.measured == facts["measured"]
            assert prior.tokens >= 256
        for number, data, facts in weights:
            model = watch.stages[number]
            shapes = {
                name: p.shape
                for name, p in model.named().items()
                if decoder_matrix(name, p.shape, model.family)
            }
            for prior in weight_file.from_bytes(data, number, shapes, spec.anchors.rank).values():
                assert prior.norm > 0
            assert facts["tokens"] == ANCHORS["passes"] * 2 * 32
        versions = [facts["weight_version"] for number, _, facts in weights if number == 1]
        assert versions == sorted(versions)

    run_virtual(main())
    added.check()


def test_with_compressed_gossip_a_refresh_follows_in_few_bytes_and_moves_nobody(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, watch: Watch
) -> None:
    spec = spec_for(tiny_model, adapt_text, 300, gossip={"every": 10, "subset": 4, "bits": 3})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            asked: list[pb.GossipOpen] = []

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                if (
                    source == "anchor:1"
                    and isinstance(message, pb.GossipMessage)
                    and message.HasField("open")
                ):
                    asked.append(message.open)
                return [Delivery(message)]

            s.network.tap = tap
            s.delay(SLOW, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            s.start("anchor", role="anchor")
            await s.until(lambda: s.counted("anchor_refreshes", "anchor") >= 1)
            first, refreshes = s.counted("anchor_follow_bytes"), s.counted("anchor_refreshes")
            values = sum(p.numel() for p in s.parameters("a1").values())
            values += sum(p.numel() for p in s.parameters("a0").values())
            assert first >= 2 * values  # bf16, once
            await s.until(lambda: s.counted("anchor_refreshes", "anchor") >= refreshes + 3)
            a_refresh = (s.counted("anchor_follow_bytes") - first) / 3
            # 3 bits of a quarter of the values; of so small a model samples are as much again.
            assert a_refresh < values * 3 / 8 / 4 * 1.1 + 2 * 4 * 16 * 60
            assert {(o.bits, o.subset, o.listening) for o in asked} == {(16, 1, True), (3, 4, True)}
            assert s.counted("gossip_exchanges") == 0
            for name in ("a0", "a1"):
                keeping = s.stage_peer(name).runtime.keeping
                assert keeping.kept == 0, "an anchor keeps nothing for anybody"
            s.peers["anchor"].leave()
            await s.finished("anchor")

    run_virtual(main())


def test_an_anchor_that_dies_in_a_pass_is_missed_by_nobody_and_comes_back(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    spec = spec_for(tiny_model, adapt_text, 40)
    runs = 0
    run = CleanPasses.run
    reached: list[Callable[[], object]] = []

    def counted(self: CleanPasses, batch: Any) -> int:
        nonlocal runs
        runs += 1
        if runs == 3:  # in the middle of its second refresh
            reached.pop()()
            time.sleep(0.3)
        return run(self, batch)

    monkeypatch.setattr(CleanPasses, "run", counted)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            dying = asyncio.Event()
            reached.append(partial(asyncio.get_running_loop().call_soon_threadsafe, dying.set))
            s.start("anchor", role="anchor")
            await dying.wait()
            await s.kill("anchor")
            assert runs == 3
            version = s.version("a1")
            await s.until(lambda: s.version("a1") >= version + 4)
            s.start("anchor", role="anchor")
            await s.until(lambda: s.counted("anchor_refreshes", "anchor") >= 1)
            await s.finished("a0", "a1", "anchor")
            account = s.account("a0")
            assert account.holds
            assert (account.dropped, account.partial) == (0, 0)

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    losses = [fields_of(r) for r in caplog.records if r.getMessage() == "peers_lost"]
    assert len({str(line["peers"]) for line in losses}) <= 1


def test_an_anchor_waits_for_stages_that_nobody_serves_and_counts_as_none_of_them(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, watch: Watch
) -> None:
    spec = spec_for(tiny_model, adapt_text, 8)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1")
            anchor = s.start("anchor", role="anchor")
            await s.until(lambda: "waiting for a working replica" in anchor.status.doing())
            assert anchor.status.doing() == "waiting for a working replica of stage 0, 1"
            s.start("a0")  # whichever needs it most: an anchor serves none
            await s.until(lambda: s.peers["a0"].me.state in SERVING)
            s.start("a1")
            await s.until(lambda: s.peers["a1"].me.state in SERVING)
            assert {s.peers[name].me.stage for name in ("a0", "a1")} == {0, 1}
            for name in ("a0", "a1"):
                around = s.peers[name].status.directory
                assert around is not None
                assert around.live_replicas() == 1
            await s.until(lambda: s.counted("anchor_refreshes", "anchor") >= 1)
            status = await s.peers["seed"].status.answer(pb.StatusRequest(swarm=True))
            shown = {peer.name: (peer.role, peer.stage) for peer in status.peers}
            assert shown["anchor"] == (pb.ROLE_ANCHOR, -1)
            await s.finished("a0", "a1", "anchor")

    run_virtual(main())


@pytest.mark.slow
def test_whatever_becomes_of_an_anchor_the_run_takes_as_long_as_without(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual time, in which computing takes none: what is compared is all waiting for one another. Compressed DP
    between two replicas goes on meanwhile."""
    freezer = Freezer(monkeypatch)
    spec = spec_for(tiny_model, adapt_text, 24, gossip={"every": 3, "subset": 2, "bits": 4, "timeout_s": 5.0})

    async def main(folder: Path, fate: str) -> float:
        async with swarm(spec, folder) as s:
            s.delay(SLOW, "a0", "a1", "b1")
            if fate != "none":
                s.start("anchor", role="anchor")
            await s.gathered(["a0"], ["a1", "b1"])
            began, ended = s.clock.monotonic(), 0.0

            async def end() -> None:
                nonlocal ended
                await s.until(lambda: s.tokens("a0") >= spec.stop_tokens)
                ended = s.clock.monotonic()

            ending = s.tasks.create_task(end())
            if fate in ("killed", "frozen"):
                # In the middle of an exchange that it has opened.
                listened, half_way = 0, asyncio.Event()

                def tap(source: str, target: str, message: Message) -> list[Delivery]:
                    nonlocal listened
                    if source == "anchor:1" and isinstance(message, pb.GossipMessage):
                        listened += message.HasField("sample")
                        if listened == 3:
                            half_way.set()
                    return [Delivery(message)]

                s.network.tap = tap
                await half_way.wait()
                assert not ended
                if fate == "killed":
                    await s.kill("anchor")
                else:
                    await freezer.freeze(s, "anchor", 9.6)
            await ending
            assert s.account("a0").holds
            assert s.account("a0").dropped == 0
            assert s.counted("gossip_exchanges", "a1", "b1") > 0
            return ended - began

    took = {}
    for fate in ("none", "there", "killed", "frozen"):
        took[fate] = run_freezing(main(tmp_path / fate, fate))
    # Routes are drawn: about two ways there and back, where a freeze lasts four times as long.
    assert max(took.values()) < took["none"] + 2 * 4 * SLOW, took


@pytest.mark.parametrize("doing", ["waiting", "following", "passing"])
def test_an_anchor_leaves_when_the_run_has_its_tokens_whatever_it_is_doing(
    doing: str,
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_for(tiny_model, adapt_text, 1000)
    run = CleanPasses.run
    reached: list[Callable[[], object]] = []

    def told(self: CleanPasses, batch: Any) -> int:
        reached[0]()
        return run(self, batch)

    monkeypatch.setattr(CleanPasses, "run", told)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            there = asyncio.Event()
            reached.append(partial(asyncio.get_running_loop().call_soon_threadsafe, there.set))

            def stuck(source: str, target: str, message: Message) -> list[Delivery]:
                """Nothing comes of what the anchor listens to."""
                if isinstance(message, pb.GossipMessage) and "anchor:1" in (source, target):
                    there.set()
                    return []
                return [Delivery(message)]

            s.delay(SLOW, "a0", "a1")
            if doing == "following":
                s.network.tap = stuck
            if doing != "waiting":
                await s.gathered(["a0"], ["a1"])
            anchor = s.start("anchor", role="anchor")
            if doing == "waiting":
                await s.until(lambda: "waiting for a working replica" in anchor.status.doing())
            else:
                await there.wait()
            assert anchor.status.directory is not None
            anchor.status.directory.counter.advance("origin", spec.stop_tokens)
            async with asyncio.timeout(30):
                await s.finished("anchor")

    run_virtual(main())
