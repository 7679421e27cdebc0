"""Who comes to a stage at work listens before it counts: with weight 0, until it has what a working replica has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from swarm import Swarm, swarm, tiny_spec

from meshd.observe.log import fields_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.state.bundle import BundleStore
from meshd.transport.memory import Delivery

# One way, virtual seconds: so that the swarm is still training when a newcomer has come.
SLOW = 0.6


def spec_for(tiny_model: Path, adapt_text: Path, steps: int, **tables: dict[str, Any]) -> Any:
    tables["snapshot"] = {"evaluate": False, **tables.get("snapshot", {})}
    return tiny_spec(tiny_model, adapt_text, stop={"steps": steps}, **tables)


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [fields_of(record) for record in caplog.records if record.getMessage() == event]


def apart(s: Swarm, a: str, b: str) -> float:
    """Largest difference of two replicas' parameters."""
    other = s.parameters(b)
    return max((value - other[name]).abs().max().item() for name, value in s.parameters(a).items())


def moved(s: Swarm, name: str, before: dict[str, torch.Tensor]) -> float:
    return max((value - before[key]).abs().max().item() for key, value in s.parameters(name).items())


async def old_bundle(s: Swarm, donor: str, stage: int) -> int:
    """Have a donor write its live state now, as if for another newcomer. Its weight version."""
    bundle = f"live/{stage}"
    request = pb.ManifestRequest(run_id=s.run.run_id, bundle=bundle)
    await s.network.transport("another:1").manifest(f"{donor}:1", request)
    return s.store(donor).manifest(bundle).count("weight_version")


def test_a_newcomer_with_an_old_state_counts_only_when_it_is_current(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its donor's bundle is kept for all who ask within a minute. While it listens nobody reckons with it."""
    spec = spec_for(tiny_model, adapt_text, 1000, gossip={"timeout_s": 2.0})
    held = True

    def tap(source: str, target: str, message: Message) -> list[Delivery]:
        away = held and "b1:1" in (source, target) and isinstance(message, pb.GossipMessage)
        return [] if away else [Delivery(message)]

    async def main() -> None:
        nonlocal held
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1", "b1")
            s.network.tap = tap
            await s.gathered(["a0"], ["a1"])
            old = await old_bundle(s, "a1", 1)
            start = s.parameters("a1")
            await s.until(lambda: s.version("a1") >= old + 4)
            s.cut(["a0"], ["a1"])  # training pauses: loading takes real time
            s.start("b1", 1)
            peer = s.peers["b1"]
            await s.until(lambda: peer.status.doing().startswith("listening"))
            assert s.store("b1").manifest("live/1").count("weight_version") == old
            assert moved(s, "b1", start) == 0
            status = await peer.status.answer(pb.StatusRequest())
            assert status.self.doing == "listening: following a working replica of stage 1 before it counts"
            s.network.heal()
            steps = s.version("a1")
            await s.until(lambda: s.version("a1") > steps, 10.0)
            assert peer.me.state == pb.PEER_STATE_SYNCING
            around = s.peers["a1"].status.directory
            assert around is not None
            assert around.live_replicas() == 1
            assert s.counted("microbatches_added", "b1") == 0
            s.cut(["a0"], ["a1"])  # so that it is compared with what it followed
            held = False
            await s.until(lambda: peer.me.state == pb.PEER_STATE_WORKING)
            assert peer.me.weight_version >= steps
            assert 2 * apart(s, "a1", "b1") < moved(s, "b1", start)
            # Its moments are the donor's of then.
            optimizer = s.stage_peer("b1").runtime.optimizer.state()
            assert optimizer.get("step/model.norm.weight", 0) == old
            s.network.heal()
            await s.until(lambda: s.counted("microbatches_added", "b1") > 0)
            await s.until(lambda: s.counted("gossip_exchanges", "b1") > 0)
            assert s.account("a0").holds

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert len(said(caplog, "not_followed")) == 1, "one line, however often it tries"
    (line,) = said(caplog, "caught_up")
    assert line["peer"] == "a1"


def _trained(store: BundleStore) -> bool:
    return "live/1" in store.names() and store.manifest("live/1").count("weight_version") > 0


@pytest.mark.slow
def test_replicas_that_start_together_on_old_states_do_not_wait_for_each_other(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of a stage were killed. Whoever is first counts; nobody gives up a newer state for an older one."""
    spec = spec_for(tiny_model, adapt_text, 1000, snapshot={"every_tokens": 3 * 4 * 32})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1", "b1"])
            stores = [s.stage_peer(name)._supply.store for name in ("a1", "b1")]
            await s.until(lambda: all(_trained(store) for store in stores))
            for name in ("a1", "b1"):
                await s.kill(name)
            await s.clock.sleep(40.0)
            kept = [s.store(name).manifest("live/1").count("weight_version") for name in ("a1", "b1")]
            assert min(kept) > 0
            s.start("a1")
            s.start("b1")
            names = {"a1", "b1"}
            await s.until(lambda: all(s.peers[n].me.state == pb.PEER_STATE_WORKING for n in names))
            assert max(s.peers[n].me.weight_version for n in names) >= max(kept)
            added = s.counted("microbatches_added", "a1", "b1")
            await s.until(lambda: s.counted("microbatches_added", "a1", "b1") > added)
            assert s.account("a0").holds

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert not said(caplog, "not_caught_up")


@pytest.mark.slow
def test_who_leaves_and_comes_back_is_the_same_and_goes_on_where_it_was(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """Its stage, its place in its data and its books; its weights are the others' of now."""
    spec = spec_for(tiny_model, adapt_text, 1000)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "b0", "a1")
            await s.gathered(["a0", "b0"], ["a1"])
            await s.until(lambda: s.account("b0").committed >= 3)
            s.peers["b0"].leave()
            await s.finished("b0")
            left, version = s.account("b0"), s.version("b0")
            await s.until(lambda: s.version("a0") >= version + 3)
            s.start("b0")
            await s.until(lambda: s.peers["b0"].me.state == pb.PEER_STATE_WORKING)
            assert s.peers["b0"].me.stage == 0
            assert s.peers["b0"].me.weight_version >= version + 3
            assert s.counted("gossip_followed", "b0") == 1
            await s.until(lambda: s.account("b0").committed >= left.committed + 3)
            s.peers["b0"].leave()
            await s.finished("b0")
            account = s.account("b0")
            assert account.holds
            assert not account.open
            assert not left.items & account.items, "data was committed twice"
            items = set(left.items | account.items)
            assert items == set(range(len(items))), "data was left out"

    run_virtual(main())
