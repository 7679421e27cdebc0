"""How a peer meets a swarm: by the link alone, with another run's link, another protocol, a wrong clock."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from swarm import swarm, tiny_spec

from meshd import PROTOCOL_VERSION
from meshd.errors import MismatchError, NetworkError
from meshd.peer.resolve import load_run
from meshd.priors.features import FEATURES, RANK, TokenFeatures
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import EPOCH, VirtualClock, run_virtual
from meshd.transport.memory import Delivery


def quick(tiny_model: Path, adapt_text: Path, steps: int = 2) -> Any:
    return tiny_spec(tiny_model, adapt_text, snapshot={"evaluate": False}, stop={"steps": steps})


def said(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    """Fields of the events of this name."""
    return [record.event_fields for record in caplog.records if record.getMessage() == name]  # type: ignore[attr-defined]


def test_the_link_is_all_that_a_joiner_needs(tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    """Run spec, tokenizer, corpus and weights come from peers, byte for byte; a joiner passes them on."""
    wire = {"forward": "spectral", "backward": "spectral"}  # token features are fetched for such codecs only
    spec = tiny_spec(tiny_model, adapt_text, wire=wire, snapshot={"evaluate": False}, stop={"steps": 2})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            await s.until(lambda: s.peers["seed"].me.state == pb.PEER_STATE_WORKING)
            s.delay(0.05, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.finished("a0", "a1")
            run = load_run(s.folder("a0"))
            assert run is not None
            assert run.canonical() == s.run.canonical()
            for name, bundles in {
                "a0": ["run/tokenizer", "run/data", "run/features", "base/0"],
                "a1": ["run/tokenizer", "run/features", "base/1"],
            }.items():
                for bundle in bundles:
                    assert s.store(name).manifest(bundle).sha256 == s.store("seed").manifest(bundle).sha256
            features = s.store("a1").path("run/features", FEATURES)
            resolved = run.resolved
            assert TokenFeatures.load(features, resolved.vocabulary).rank == min(resolved.hidden, RANK)
            # Only the own stage's weights are fetched.
            assert "base/0" not in s.store("a1").names()

    run_virtual(main())


def test_a_link_of_another_run_is_told_so(tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    """The peer ends, and its last words name both runs."""

    async def main() -> None:
        async with swarm(quick(tiny_model, adapt_text), tmp_path) as s:
            await s.until(lambda: s.peers["seed"].me.state == pb.PEER_STATE_WORKING)
            s.start("a0", 0, run_id="0" * 40)
            await s.finished("a0")

    with pytest.raises(ExceptionGroup) as raised:
        run_virtual(main())
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, MismatchError)
    assert re.search(f"seed serves run [0-9a-f]{{40}}, not '{'0' * 40}'", str(error))


def test_a_peer_of_another_protocol_is_left_alone(tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    """Its record is not used, its hello is refused in words that say which of the two must change."""

    async def main() -> None:
        async with swarm(quick(tiny_model, adapt_text), tmp_path) as s:
            await s.until(lambda: s.peers["seed"].me.state == pb.PEER_STATE_WORKING)
            transport = s.network.transport("old:1")
            hello = pb.HelloRequest(run_id=s.run.run_id, protocol=999, name="old")
            with pytest.raises(
                MismatchError,
                match=f"protocol 999 meets protocol {PROTOCOL_VERSION} of seed: update the older meshd",
            ):
                await transport.hello("seed:1", hello)
            record = pb.Record(
                run_id=s.run.run_id,
                peer_id="0old",
                role=pb.ROLE_STAGE,
                stage=1,
                state=pb.PEER_STATE_WORKING,
                address="old:1",
                protocol=999,
                incarnation=1,
                version=1,
                expires=EPOCH + 10_000.0,
            )
            s.registry.book.add(record, s.clock.time())
            # Were it taken for a replica of stage 1, it would be asked, and would lead the stage.
            await s.gathered(["a0"], ["a1"])
            await s.finished("a0", "a1")
            assert s.account("a0").dropped == 0

    run_virtual(main())


def test_a_wrong_clock_is_reported_on_both_sides(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = quick(tiny_model, adapt_text)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            await s.until(lambda: s.peers["seed"].me.state == pb.PEER_STATE_WORKING)
            s.start("a1", 1, clock=VirtualClock(EPOCH + 5.0))
            await s.until(lambda: s.peers["a1"].me.state == pb.PEER_STATE_WORKING)
            reports = {
                (str(f["peer"]), f["seconds"], str(f["problem"]).split(" this ")[0])
                for f in said(caplog, "clock_skew")
            }
            assert reports == {
                ("a1", 5.0, "its clock is ahead of"),
                ("seed", 5.0, "its clock is behind"),
            }

    with caplog.at_level(logging.WARNING):
        run_virtual(main())


def test_status_shows_the_peers_that_answer_and_says_which_does_not(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """C01, C08: after a death, and with a peer that is frozen."""
    spec = quick(tiny_model, adapt_text, steps=50)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.2, "a0", "a1", "b1", "seed")
            await s.gathered(["a0"], ["a1", "b1"])
            await s.kill("b1")
            frozen = {"a1:1"}

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                return [] if source in frozen else [Delivery(message)]

            s.network.tap = tap
            reply = await s.peers["seed"].status.answer(pb.StatusRequest(swarm=True))
            cells = {peer.name: peer for peer in reply.peers}
            assert set(cells) == {"a0", "a1", "b1"}
            assert cells["a0"].metrics
            assert cells["b1"].doing.startswith("does not answer: ")
            assert cells["a1"].doing == "does not answer: a1:1 did not answer"
            assert cells["b1"].stage == cells["a1"].stage == 1

    run_virtual(main())


def test_calls_before_a_peer_is_ready_are_answered_with_its_state(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """C02."""

    async def main() -> None:
        async with swarm(quick(tiny_model, adapt_text), tmp_path) as s:
            s.network.cut("a0:1", "seed:1")
            s.start("a0", 0)
            await s.clock.sleep(5.0)
            transport = s.network.transport("someone:1")
            run_id = s.run.run_id
            with pytest.raises(NetworkError, match="a0 is joining and does not know its run yet"):
                await transport.get_run("a0:1", pb.GetRunRequest(run_id=run_id))
            with pytest.raises(NetworkError, match="a0 is joining and has no state to give yet"):
                await transport.list_bundles("a0:1", pb.ListRequest(run_id=run_id))
            async with transport.link("a0:1") as link:
                with pytest.raises(NetworkError, match="a0 is joining and serves no stage yet"):
                    await anext(aiter(link))
            async with transport.gossip("a0:1") as exchange:
                with pytest.raises(NetworkError, match="a0 is joining and averages no stage yet"):
                    await anext(aiter(exchange))
            status = await transport.status("a0:1", pb.StatusRequest())
            assert status.self.doing == "asking peers for the run spec"

    run_virtual(main())
