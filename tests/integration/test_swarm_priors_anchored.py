"""Priors from outside in whole runs: published by one, spread among the replicas, used by their steps and frames."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from swarm import Additions, Swarm, swarm, tiny_spec
from test_swarm_priors import BACKWARD, FORWARD, Frames, named

from meshd import PROTOCOL_VERSION
from meshd.anchor.spreading import Publisher
from meshd.config.runspec import RunSpec
from meshd.identity import Identity
from meshd.observe.metrics import Metrics
from meshd.peer.stage import StagePeer
from meshd.priors.weight import WeightStats
from meshd.priors.weight_file import to_bytes
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.state.bundle import BundleStore
from meshd.state.donor import Donor
from meshd.transport.memory import Delivery

STALE = 6
WEIGHTS, BOUNDARY = pb.PRIOR_KIND_WEIGHTS, pb.PRIOR_KIND_BOUNDARY


def spec_of(weights: Path, text: Path, /, steps: int, **tables: dict[str, Any]) -> RunSpec:
    anchors = {"corrector": "inject:lambda=0.3", "max_staleness_steps": STALE, "rank": 4}
    values: dict[str, Any] = {"anchors": anchors, "snapshot": {"evaluate": False}, "stop": {"steps": steps}}
    return tiny_spec(weights, text, **{**values, **tables})


class Served:
    """What others may ask of an anchor."""

    def __init__(self, donor: Donor) -> None:
        self.manifest, self.fetch = donor.manifest, donor.fetch

    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return pb.StatusReply()


@dataclass
class Anchor:
    """As much of an anchor as publishes. Its priors are of gradients at random."""

    swarm: Swarm
    publisher: Publisher
    metrics: Metrics
    number: int = 0

    async def weights(self, stage: int, like: str, size: float = 1.0) -> None:
        """Publish priors of a stage that a peer holds, dated as of now, by the replica that is furthest: others may be
        many steps behind."""
        runtime = self.swarm.stage_peer(like).runtime
        replicas = [
            p.role.runtime.version for p in self.swarm.peers.values() if isinstance(p.role, StagePeer)
        ]
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        priors = {}
        for name, shape in runtime.corrected_weights().items():
            stats = WeightStats(shape)
            common = torch.randn(shape, generator=generator) * size
            for _ in range(3):
                stats.add(common + 0.3 * size * torch.randn(shape, generator=generator))
            priors[name] = stats.prior(runtime.run.spec.anchors.rank, generator)
        await self.publisher.publish(
            WEIGHTS, stage, to_bytes(stage, priors), weight_version=max(replicas),
            measured=self.swarm.tokens(like), tokens=100,
        )  # fmt: skip


@asynccontextmanager
async def anchor(s: Swarm, name: str = "anchor") -> AsyncIterator[Anchor]:
    store = BundleStore(s.root / name / "bundles")
    identity, _ = Identity.load_or_create(s.root / name / "identity")
    metrics, address = Metrics(s.clock), f"{name}:1"
    directory = s.peers["seed"].status.directory
    assert directory is not None
    publisher = Publisher(
        identity, s.run, store, s.network.transport(address), directory.replicas, s.clock, metrics,
        random.Random(name),
    )  # fmt: skip
    s.network.register(address, Served(Donor(store, s.run.run_id, clock=s.clock)))  # type: ignore[arg-type]
    record = pb.Record(
        run_id=s.run.run_id, peer_id=identity.peer_id, name=name, role=pb.ROLE_ANCHOR, stage=-1,
        state=pb.PEER_STATE_WORKING, address=address, protocol=PROTOCOL_VERSION, incarnation=1, version=1,
        expires=s.clock.time() + 100_000.0,
    )  # fmt: skip
    s.registry.book.add(record, s.clock.time())
    directories = [peer.status.directory for peer in s.peers.values()]
    await s.until(lambda: all(each is not None and each.address(identity.peer_id) for each in directories))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(publisher.run())
        yield Anchor(s, publisher, metrics)
        running.cancel()


def test_weight_priors_reach_all_replicas_correct_their_steps_and_end_with_their_age(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    spec = spec_of(tiny_model, adapt_text, 60)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            names = ["a0", "b0", "c0", "a1"]
            s.delay(0.1, "seed", *names)
            fetched: list[tuple[str, str]] = []

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                if isinstance(message, pb.FetchRequest) and message.bundle.startswith("weights/"):
                    fetched.append((source, message.bundle))
                return [Delivery(message)]

            s.network.tap = tap
            await s.gathered(["a0", "b0", "c0"], ["a1"])
            async with anchor(s) as it:
                # Priors are merged in threads: on a busy machine many steps could go by meanwhile.
                s.cut(["a0", "b0", "c0"], ["a1"])
                await it.weights(0, "a0")
                await s.until(lambda: all(s.counted("priors_used", name) == 1 for name in ("a0", "b0", "c0")))
                assert s.counted("priors_used", "a1") == 0
                s.network.heal()
                await s.until(lambda: s.counted("steps_corrected", "a0", "b0", "c0") > 2)
                await s.finished(*names)
                assert len(fetched) == len(set(fetched)) == 3
                assert s.counted("priors_refused") == 0
                for name in ("a0", "b0", "c0"):
                    # Fresh for so many steps or less, of those that followed.
                    assert s.counted("steps_corrected", name) <= STALE + 1 < s.counted("steps", name)
                    assert s.peers[name].metrics.value("prior_age_steps") > STALE
                    assert s.stage_peer(name).runtime.correction is None
                assert s.counted("steps_corrected", "a1") == 0
                assert all(s.account(name).holds for name in ("a0", "b0", "c0"))
        added.check()

    run_virtual(main())


def test_a_run_goes_on_with_anchors_that_lie_die_and_come_back(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tiny_model, adapt_text, 40)
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.1, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            async with anchor(s) as it, anchor(s, "other") as other:
                await it.publisher.publish(WEIGHTS, 0, b"garbage", weight_version=0, measured=0, tokens=1)
                await it.publisher.publish(BOUNDARY, 0, b"garbage", weight_version=0, measured=0, tokens=1)
                await s.until(lambda: s.counted("priors_refused", "a0") == 1)
                await it.weights(0, "a1")  # another stage's
                await s.until(lambda: s.counted("priors_refused", "a0") == 2)
                await it.weights(1, "a1", size=float("1e9"))
                await other.weights(0, "a0")
                await s.until(lambda: s.counted("steps_corrected", "a0") > 1)
                s.network.mute("other:1", "a0:1")
                await other.weights(0, "a0")
                s.network.kill("anchor:1")
                await s.finished("a0", "a1")
                assert s.counted("steps_skipped_nonfinite") == 0
                assert s.account("a0").holds
                assert max(s.losses("a0")[-5:]) < 10
        said = [record for record in caplog.records if record.getMessage() == "prior_refused"]
        assert 1 <= len(said) <= 2

    run_virtual(main())


@pytest.mark.slow
def test_a_sender_changes_to_an_anchors_codec_prior_without_a_safe_frame_between(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    wire = {"forward": FORWARD, "backward": BACKWARD, "prior_tokens": 1024}
    spec = spec_of(tiny_model, adapt_text, 160, wire=wire)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = frames = Frames()
            names = ["a0", "b0", "a1"]
            s.delay(0.05, "seed", *names)
            await s.gathered(["a0", "b0"], ["a1"])
            await s.until(lambda: len(named(frames.back)) == 2)
            prior = s.stage_peer("a0").runtime.crossings[0].prior
            assert prior is not None
            measured = s.tokens("a0") + 500
            data = replace(prior, measured=measured, name=b"").to_bytes()
            later, fetched = Frames(), Counter[str]()

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                if isinstance(message, pb.FetchRequest) and message.bundle.startswith("prior/"):
                    fetched[source] += 1
                return later(source, target, message)

            async with anchor(s) as it:
                s.network.tap = tap
                await it.publisher.publish(BOUNDARY, 0, data, weight_version=1, measured=measured, tokens=100)
                await s.until(lambda: s.counted("priors_used", "a0", "b0") == 2)
                await s.finished(*names)
            # Both senders end with one prior, which the receiver has fetched once.
            assert len({prior for _, prior, _ in later.there[-8:]}) == 1
            assert all(codec == FORWARD for codec, _, _ in later.there)
            assert fetched == {"a0:1": 1, "b0:1": 1, "a1:1": 1}
            assert s.counted("dropped_corrupt") == 0
        added.check()

    run_virtual(main())


def test_a_real_anchors_priors_are_used_by_all_stages(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """Nothing here is made up: what the anchor role publishes passes the stages' checks."""
    anchors = {"refresh_steps": 3, "passes": 2, "rank": 4, "corrector": "inject:lambda=0.1"}
    wire = {"forward": FORWARD, "backward": BACKWARD, "prior_tokens": 256}
    spec = spec_of(tiny_model, adapt_text, 24, anchors=anchors, wire=wire)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.3, "a0", "b0", "a1")
            s.start("anchor", role="anchor")
            await s.gathered(["a0", "b0"], ["a1"])
            await s.finished("a0", "b0", "a1", "anchor")
            for name in ("a0", "b0", "a1"):
                assert s.counted("steps_corrected", name) > 5
            assert s.counted("priors_used", "a0") > 3
            assert s.counted("priors_refused") == 0
            assert s.counted("prior_bytes_received") > 0
            assert s.account("a0").holds

    run_virtual(main())


def test_a_stage_peers_part_is_over_with_its_work(tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(spec_of(tiny_model, adapt_text, 6), tmp_path) as s:
            await s.gathered(["a0"], ["a1"])
            assert isinstance(s.peers["a0"].role, StagePeer)
            assert s.peers["a0"].handlers.serve_offer is not None
            await s.finished("a0", "a1")
            assert s.peers["a0"].handlers.serve_offer is None

    run_virtual(main())
