"""The last replica of a stage dies: the swarm pauses, says so, keeps what it has, and goes on from the newest snapshot
that anybody holds."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from google.protobuf.message import Message
from swarm import Additions, Swarm, swarm, tiny_spec

from meshd.observe.log import fields_of
from meshd.peer.resolve import BUNDLES
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery

# One way, virtual seconds: the seed looks for snapshots every few seconds.
SLOW = 1.0
STEP_TOKENS = 4 * 32
EVERY = 4  # steps between snapshots


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [fields_of(record) for record in caplog.records if record.getMessage() == event]


def kept_by(s: Swarm, name: str, stage: int) -> list[int]:
    """Watermarks of a stage's snapshots on a peer's disk, read without opening its store."""
    folder = s.folder(name) / BUNDLES / "snapshot" / str(stage)
    found = folder.iterdir() if folder.is_dir() else []
    return sorted(int(path.name) for path in found)


@pytest.mark.parametrize("holder", ["seed", pytest.param("a0", marks=pytest.mark.slow)])
def test_the_swarm_pauses_and_goes_on_from_the_newest_snapshot_of_any_peer(
    holder: str,
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the seed; or, should it be gone, of any other peer."""
    added = Additions(monkeypatch)
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        stop={"steps": 1000},
        snapshot={"evaluate": False, "every_tokens": EVERY * STEP_TOKENS},
        pipeline={"in_flight": 2},
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: len(kept_by(s, "seed", 1)) >= 2)
            newest = kept_by(s, "seed", 1)[-1]
            if holder == "a0":
                for bundle in ("base/1", f"snapshot/1/{newest}"):
                    shutil.copytree(s.folder("seed") / BUNDLES / bundle, s.folder("a0") / BUNDLES / bundle)
                await s.kill("seed")
            died = s.version("a1")
            await s.kill("a1")
            await s.until(lambda: s.peers["a0"].status.waits() != "", 60.0)
            assert s.peers["a0"].status.waits() == (
                "nobody serves stage 1: the swarm pauses until somebody does"
            )
            await s.clock.sleep(5.0)
            status = await s.peers["a0"].status.answer(pb.StatusRequest(swarm=True))
            assert status.self.doing == "waiting for a replica of stage 1"
            assert "a1" in {peer.name for peer in status.peers if peer.doing.startswith("lost: ")}
            paused, version = s.account("a0"), s.version("a0")
            await s.clock.sleep(70.0)
            assert s.peers["a0"].watchdog.health().ok
            assert s.account("a0").committed == paused.committed
            assert s.version("a0") == version, "what it has it keeps"

            s.start("b1", 1)
            await s.until(lambda: s.peers["b1"].me.state == pb.PEER_STATE_WORKING)
            assert 0 <= died - s.peers["b1"].me.weight_version <= EVERY
            await s.until(lambda: s.account("a0").committed >= paused.committed + 6)
            assert s.account("a0").holds
            assert s.counted("lost_after_commit", "a0") > 0
        added.check()
        assert {line["tokens"] for line in said(caplog, "state_from_snapshot")} == {newest}

    with caplog.at_level(logging.INFO):
        run_virtual(main())


@pytest.mark.slow
def test_a_newest_snapshot_that_does_not_come_is_not_the_end_the_one_before_is_used(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        stop={"steps": 1000},
        snapshot={"evaluate": False, "every_tokens": EVERY * STEP_TOKENS},
        pipeline={"in_flight": 2},
    )
    spoiled: set[str] = set()

    def tap(source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.ManifestReply) and target == "b1:1" and message.bundle in spoiled:
            message.bundle = "snapshot/0/1"
        return [Delivery(message)]

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(SLOW, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: len(kept_by(s, "seed", 1)) >= 2)
            before, newest = kept_by(s, "seed", 1)[-2:]
            spoiled.add(f"snapshot/1/{newest}")
            s.network.tap = tap
            await s.kill("a1")
            await s.clock.sleep(31.0)
            s.start("b1", 1)
            await s.until(lambda: s.peers["b1"].me.state == pb.PEER_STATE_WORKING)
            assert [line["tokens"] for line in said(caplog, "state_from_snapshot")] == [before]
            assert [line["tokens"] for line in said(caplog, "no_snapshot")] == [newest]
            assert s.peers["b1"].me.weight_version > 0

    with caplog.at_level(logging.INFO):
        run_virtual(main())
