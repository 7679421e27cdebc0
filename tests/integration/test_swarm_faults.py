"""Peers that die, leave, come back and come late: nothing is added twice, no data is lost, the run goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from swarm import Additions, Payloads, Swarm, swarm, tiny_spec

from meshd.config.runspec import RunSpec
from meshd.data.stream import TokenStream
from meshd.observe.log import fields_of
from meshd.pipeline.runtime import StageRuntime
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery

# One way, in virtual seconds. A microbatch is away for about four of these, so that there is a "while it is away".
DELAY = 0.2
# The same where the swarm must have time to hear of a newcomer (peers look every 3 s).
SLOW = 0.6


def spec_for(tiny_model: Path, adapt_text: Path, steps: int, **tables: dict[str, Any]) -> RunSpec:
    tables["snapshot"] = {"evaluate": False, **tables.get("snapshot", {})}
    return tiny_spec(tiny_model, adapt_text, stop={"steps": steps}, **tables)


async def stepped(s: Swarm, origin: str, steps: float) -> None:
    await s.until(lambda: s.tokens(origin) >= steps * s.run.spec.batch_tokens)


def test_a_replica_is_killed_while_it_works(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C20, C22."""
    added = Additions(monkeypatch)
    spec = spec_for(
        tiny_model,
        adapt_text,
        10,
        optim={"inner_batch": 8},
        snapshot={"evaluate": True},
        data={"held_out_sequences": 64},
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1", "b1"])
            await stepped(s, "a0", 3)
            s.network.tap = sent = Payloads("a0:1")
            await s.until(lambda: sent.targets["b1:1"] > 0)  # it is on its way
            dead = s.stage_peer("b1")
            await s.kill("b1")
            await s.finished("a0", "a1")
            account = s.account("a0")
            assert account.holds
            assert not account.open
            assert account.tokens >= spec.stop_tokens
            assert s.counted("microbatches_added", "b1") > 0
            # It exchanged after every step: only what it had added since, and had not told, is lost.
            assert s.counted("lost_after_commit", "a0") <= 4 < dead.runtime.keeping.added
            # What was with the dead peer went to the other one, at once, from what its neighbour still had.
            assert 0 < s.replayed() == sent.repeated()
            assert account.dropped == 0
            losses = await s.held_out()
            assert losses[spec.stop_tokens] < losses[0] - 0.02
        added.check()

    run_virtual(main())


def test_the_only_replica_of_a_stage_is_replaced(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer under another name takes the stage over, from the seed's newest snapshot, as nobody has newer."""
    added = Additions(monkeypatch)
    spec = spec_for(tiny_model, adapt_text, 20, snapshot={"every_tokens": 6 * 4 * 32})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1"])
            kept = s.store("seed")
            await s.until(lambda: any(name.startswith("snapshot/1/") for name in kept.names()))
            keeping = s.stage_peer("a1").runtime.keeping
            await s.until(lambda: keeping.added > keeping.kept + 4)
            await s.kill("a1")
            unkept = keeping.added - keeping.kept
            s.start("b1", 1)
            await s.until(lambda: s.peers["b1"].me.state == pb.PEER_STATE_WORKING)
            assert s.peers["b1"].me.weight_version >= 2
            await s.finished("a0", "b1")
            account = s.account("a0")
            assert account.holds
            assert not account.open
            assert account.tokens >= spec.stop_tokens
            # All that died with it but what was on its way back: that was computed again.
            assert unkept - 4 <= s.counted("lost_after_commit", "a0") <= unkept
        added.check()

    run_virtual(main())


def test_a_peer_leaves_in_good_order(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finishes what it holds: nothing is dropped, nothing runs again."""
    added = Additions(monkeypatch)
    spec = spec_for(tiny_model, adapt_text, 8)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1", "b1"])
            await stepped(s, "a0", 3)
            done = s.counted("microbatches_added", "b1")
            assert done > 0
            s.peers["b1"].leave()
            await s.finished("b1")
            assert s.tokens("a0") < spec.stop_tokens  # it did not wait for the end of the run
            await s.finished("a0", "a1")
            account = s.account("a0")
            assert account.holds
            assert (account.open, account.dropped) == ({}, 0)
            assert s.replayed() == 0
            assert "live/1" in s.store("b1").names()
        added.check()

    run_virtual(main())


def test_what_a_leaver_has_learnt_stays(tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    """It exchanges once more before it goes, however long the next exchange would have been off."""
    spec = spec_for(tiny_model, adapt_text, 10, gossip={"every": 1000})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1", "b1"])
            await s.until(lambda: s.version("b1") >= 2)
            runtime = s.stage_peer("b1").runtime
            assert runtime.keeping.kept == 0
            s.peers["b1"].leave()
            await s.finished("b1")
            assert s.counted("gossip_exchanges", "b1") == s.counted("gossip_exchanges", "a1") == 1
            unstepped = runtime.keeping.added - runtime.keeping.stepped
            await s.finished("a0", "a1")
            assert s.counted("lost_after_commit", "a0") == unstepped

    run_virtual(main())


def test_an_injector_leaves_and_its_data_position_is_on_disk(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    spec = spec_for(tiny_model, adapt_text, 8)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "b0", "a1")
            await s.gathered(["a0", "b0"], ["a1"])
            await stepped(s, "a0", 3)
            s.peers["b0"].leave()
            await s.finished("b0")
            left = s.account("b0")
            assert left.committed > 0
            assert left.holds
            assert (left.open, left.dropped) == ({}, 0)
            await s.finished("a0", "a1")
            assert s.account("a0").tokens + left.tokens >= spec.stop_tokens

    run_virtual(main())


def test_an_injector_is_killed_and_started_again(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C25: what was in flight goes out again, once; nothing else does, and nothing is left out."""
    added = Additions(monkeypatch)
    spec = spec_for(tiny_model, adapt_text, 10)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await stepped(s, "a0", 4)
            await s.kill("a0")
            before = s.account("a0")
            assert before.open
            assert before.holds
            s.start("a0", 0)
            await s.finished("a0", "a1")
            after = s.account("a0")
            assert after.holds
            assert not after.open
            # Nothing was kept of its own part since it began: one replica, no snapshot yet.
            assert s.counted("ledger_lost_after_commit", "a0") == before.committed
            # The crash is in the books: what was out counts as dropped, and as added somewhere, for all one knows.
            assert after.dropped - before.dropped >= len(before.open)
            assert after.partial >= len(before.open)
            assert not before.items & after.items, "data was committed twice"
            items = set(before.items | after.items)
            assert items == set(range(len(items))), "data was left out"
            assert after.tokens == len(items) * spec.data.microbatch * spec.data.seq_len
        added.check()

    run_virtual(main())


def test_a_peer_started_again_takes_up_its_own_state(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """Killed, it goes on from the state that it saved at the last watermark, moments and step count included."""
    spec = spec_for(tiny_model, adapt_text, 10, snapshot={"every_tokens": 2 * 4 * 32})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await stepped(s, "a0", 6)
            saved = int(s.store("a1").manifest("live/1").facts["weight_version"])
            reached = s.version("a1")
            assert 2 <= saved <= reached
            await s.kill("a1")
            s.start("a1")  # it knows its stage, too
            await s.until(lambda: s.peers["a1"].me.state == pb.PEER_STATE_WORKING)
            assert s.peers["a1"].me.stage == 1
            assert saved <= s.peers["a1"].me.weight_version <= s.version("a1")
            moments = s.stage_peer("a1").runtime.optimizer.state()
            assert moments["step/model.norm.weight"] >= saved
            await s.finished("a0", "a1")
            assert s.version("a1") > saved

    run_virtual(main())


def test_a_late_replica_takes_the_live_state_and_counts(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    spec = spec_for(tiny_model, adapt_text, 14)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await stepped(s, "a0", 5)
            s.start("b1", 1)
            await s.until(lambda: s.peers["b1"].me.state == pb.PEER_STATE_WORKING)
            assert s.peers["b1"].me.weight_version >= 4
            s.delay(SLOW, "a0", "b1")
            assert s.stage_peer("b1").runtime.optimizer.state()["step/model.norm.weight"] >= 4
            await s.finished("a0", "a1", "b1")
            assert s.counted("microbatches_added", "b1") > 0
            assert s.counted("gossip_exchanges", "b1") > 0
            assert s.counted("gossip_failed") == 0
            other = s.parameters("b1")
            for name, value in s.parameters("a1").items():
                assert torch.equal(value, other[name])
            contributors = s.store("seed").manifest(f"snapshot/1/{spec.stop_tokens}").facts["contributors"]
            assert contributors == ["a1", "b1"]

    run_virtual(main())


@pytest.mark.parametrize("donors", [["a1", "b1"], ["a1"]])
def test_the_donor_dies_while_a_newcomer_takes_its_state(
    donors: list[str], tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """C24: it takes the state from the other replica; where there is none, it begins with the base model."""
    spec = spec_for(tiny_model, adapt_text, 16)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            for name in donors:
                s.delay(SLOW, "a0", name)
            await s.gathered(["a0"], donors)
            await stepped(s, "a0", 4)
            killed: list[str] = []
            dying = asyncio.Event()

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                # Its file has begun to arrive.
                donor = source.partition(":")[0]
                if isinstance(message, pb.FetchChunk) and target == "c1:1" and donor in donors and not killed:
                    killed.append(donor)
                    dying.set()
                return [Delivery(message)]

            s.network.tap = tap
            s.start("c1", 1)
            await dying.wait()
            await s.kill(killed[0])
            alive = [name for name in donors if name not in killed]
            await s.until(lambda: s.peers["c1"].me.state == pb.PEER_STATE_WORKING)
            assert (s.peers["c1"].me.weight_version > 0) == bool(alive)
            await s.finished("a0", "c1", *alive)
            assert s.account("a0").holds
            assert not s.account("a0").open
            assert s.counted("microbatches_added", "c1") > 0

    run_virtual(main())


def test_slow_gradients_are_stale_and_their_data_goes_out_again(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_lag = 0 with four microbatches out and a step every two: what was out during a step is dropped."""
    added = Additions(monkeypatch)
    drawn: list[int] = []
    spec = spec_for(tiny_model, adapt_text, 4, optim={"max_lag": 0})
    following = TokenStream.next

    def watched(stream: TokenStream) -> Any:
        item, batch = following(stream)
        drawn.append(item)
        return item, batch

    monkeypatch.setattr(TokenStream, "next", watched)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.finished("a0", "a1")
            account = s.account("a0")
            assert account.holds
            assert not account.open
            assert account.tokens == spec.stop_tokens
            stale = s.counted("dropped_stale", "a0")
            assert 0 < stale == account.dropped == account.partial
            # What was dropped went out again; the last of it may not have come to it.
            assert set(account.items) <= set(drawn)
            assert len(drawn) - len(set(drawn)) >= account.dropped - 4
        added.check()

    run_virtual(main())


def test_a_peer_that_runs_out_of_memory_loses_the_microbatch_and_nobody_the_run(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One of two replicas always, and the only replica of a stage, in an evaluation and in training, for a while."""
    added = Additions(monkeypatch)
    spec = spec_for(tiny_model, adapt_text, 8, snapshot={"evaluate": True})
    through, frozen = StageRuntime.head, StageRuntime.forward_frozen
    failures: Counter[str] = Counter()

    def exhausted(*_: Any) -> Any:
        return torch.empty(1 << 60, dtype=torch.uint8)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1", "b1")

            def head(runtime: StageRuntime, *rest: Any) -> Any:
                if runtime is s.stage_peer("b1").runtime:
                    failures["head"] += 1
                    exhausted()
                return through(runtime, *rest)

            def forward_frozen(runtime: StageRuntime, *rest: Any) -> Any:
                failures["evaluation"] += 1
                return exhausted() if failures["evaluation"] < 3 else frozen(runtime, *rest)

            monkeypatch.setattr(StageRuntime, "head", head)
            monkeypatch.setattr(StageRuntime, "forward_frozen", forward_frozen)
            await s.gathered(["a0"], ["a1", "b1"])
            step = s.stage_peer("a0").runtime.optimizer._adamw
            await stepped(s, "a0", 3)
            with monkeypatch.context() as patch:
                patch.setattr(step, "step", exhausted)
                await s.until(lambda: s.counted("dropped_failed", "a0") >= 4)
            await s.finished("a0", "a1", "b1")
            account = s.account("a0")
            assert account.holds
            assert not account.open
            assert account.tokens >= spec.stop_tokens
            # Set aside for longer each time: of dozens of microbatches it saw a few.
            assert 0 < failures["head"] == s.counted("dropped_failed", "b1") < account.injected / 2
            assert s.counted("microbatches_added", "b1") == 0
            assert set(await s.held_out()) == {0, spec.stop_tokens}
        added.check()

    with caplog.at_level("ERROR"):
        run_virtual(main())
    lines = [fields_of(record)["reason"] for record in caplog.records if record.msg == "out_of_memory"]
    assert len(lines) >= failures["head"] + 2
    assert all("can't allocate memory" in line and "data.microbatch" in line for line in lines)
