"""What the network, a full neighbour or a broken one does to a swarm: counted, contained, survived."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from swarm import Additions, Payloads, Swarm, swarm, tiny_spec

from meshd.pipeline.upstream import Intake
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery, Tap
from meshd.wire import checksum_start

DELAY = 0.2
NAMES = ["a0", "a1", "b1"]


def quiet(tiny_model: Path, adapt_text: Path, steps: int, **tables: dict[str, Any]) -> Any:
    tables.setdefault("snapshot", {"evaluate": False})
    return tiny_spec(tiny_model, adapt_text, stop={"steps": steps}, **tables)


def of_links(kinds: set[str], fault: Callable[[pb.LinkMessage], list[Delivery]], rng: random.Random) -> Tap:
    """A tap that lets `fault` decide about every tenth link message of these kinds."""

    def tap(source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.LinkMessage) and message.WhichOneof("body") in kinds and rng.random() < 0.1:
            return fault(message)
        return [Delivery(message)]

    return tap


def flipped(message: pb.LinkMessage) -> list[Delivery]:
    data = bytearray(message.chunk.data)
    data[len(data) // 2] ^= 0x10
    message.chunk.data = bytes(data)
    return [Delivery(message)]


FAULTS: dict[str, tuple[set[str], Callable[[pb.LinkMessage], list[Delivery]]]] = {
    "offers and answers lost": ({"offer", "answer"}, lambda message: []),
    "payloads and results lost": ({"chunk", "gradient"}, lambda message: []),
    "anything lost": ({"offer", "answer", "chunk", "gradient"}, lambda message: []),
    "all doubled": (
        {"offer", "answer", "chunk", "gradient", "drop", "credit", "cancel", "progress"},
        lambda message: [Delivery(message), Delivery(message)],
    ),
    "all delayed": (
        {"offer", "answer", "chunk", "gradient"},
        lambda message: [Delivery(message, delay_s=3.0)],
    ),
    "payloads damaged": ({"chunk"}, flipped),
}


def all_sound(s: Swarm, names: list[str]) -> bool:
    return all(bool(torch.isfinite(p).all()) for name in names for p in s.parameters(name).values())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_network_that_harms_messages_costs_time_only(
    fault: str, tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    spec = quiet(tiny_model, adapt_text, 8)
    kinds, harm = FAULTS[fault]

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", *NAMES)
            await s.gathered(["a0"], ["a1", "b1"])
            harmed: list[str] = []

            def counted(message: pb.LinkMessage) -> list[Delivery]:
                harmed.append(message.WhichOneof("body") or "")
                return harm(message)

            s.network.tap = sent = Payloads("a0:1", of_links(kinds, counted, random.Random(1)))
            await s.finished(*NAMES)
            assert harmed
            account = s.account("a0")
            assert account.holds
            # A result that was lost is waited for long; the run does not wait for it.
            assert len(account.open) <= 4 * ("chunk" in kinds)
            assert account.tokens >= spec.stop_tokens
            assert s.replayed() == sent.repeated()
            if fault in ("offers and answers lost", "all delayed"):
                assert s.replayed() == 0  # nothing that had been sent was lost
            elif fault != "all doubled":
                assert s.replayed() > 0
            assert all_sound(s, NAMES)
        added.check()

    run_virtual(main())


def test_two_neighbours_are_cut_off_and_meet_again(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    spec = quiet(tiny_model, adapt_text, 8)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: s.tokens("a0") >= 3 * spec.batch_tokens)
            # A gradient is on its way: what was cut off had been sent whole.
            await s.until(
                lambda: s.counted("microbatches_added", "a1") > s.counted("microbatches_added", "a0")
            )
            s.cut(["a0"], ["a1"])
            before = s.tokens("a0")
            await s.clock.sleep(20.0)
            assert s.tokens("a0") == before
            reply = await s.peers["a0"].status.answer(pb.StatusRequest())
            assert reply.self.doing == "waiting for a replica of stage 1"
            s.network.heal()
            await s.finished("a0", "a1")
            account = s.account("a0")
            assert account.holds
            assert not account.open
            assert s.replayed() > 0
        added.check()

    run_virtual(main())


def test_a_full_neighbour_says_busy_and_memory_stays_bounded(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C09, over three stages: back-pressure reaches the injector, nothing stands still for ever."""
    added = Additions(monkeypatch)
    spec = quiet(tiny_model, adapt_text, 8, model={"stages": 3, "cut": [2, 4]}, pipeline={"in_flight": 10})
    # bf16 hidden states of two microbatches; the first of all is taken whatever its size.
    budget = 2 * spec.data.microbatch * spec.data.seq_len * 128 * 2
    held: dict[str, int] = {}
    begin, verdict = Intake.__init__, Intake.verdict

    def small(intake: Intake, *rest: Any) -> None:
        begin(intake, *rest)
        intake._budget = budget

    def watched(intake: Intake, offer: pb.Offer) -> Any:
        answer = verdict(intake, offer)
        name = intake.pipeline.stage.name
        held[name] = max(held.get(name, 0), intake._held_bytes)
        return answer

    monkeypatch.setattr(Intake, "__init__", small)
    monkeypatch.setattr(Intake, "verdict", watched)
    names = ["a0", "a1", "a2"]

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", *names)
            await s.gathered(["a0"], ["a1"], ["a2"])
            await s.finished(*names)
            assert s.counted("offers_busy", "a1") > 0
            assert held["a1"] == budget
            assert held["a2"] <= budget
            account = s.account("a0")
            assert account.holds
            assert (account.open, account.dropped) == ({}, 0)
            assert account.tokens >= spec.stop_tokens
            assert s.replayed() == 0
        added.check()

    run_virtual(main())


def test_a_peer_that_sends_nan_spoils_nobody(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C27: gradients of bf16 NaN, with a right checksum: refused where they arrive, counted, run again elsewhere."""
    added = Additions(monkeypatch)
    spec = quiet(tiny_model, adapt_text, 8)
    size = spec.data.microbatch * spec.data.seq_len * 128 * 2
    poison = b"\xff" * size

    def tap(source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.LinkMessage) and source == "b1:1":
            if message.WhichOneof("body") == "gradient":
                header = message.gradient.gradient
                header.checksum = zlib.crc32(poison, checksum_start(header))
            elif message.WhichOneof("body") == "chunk":
                message.chunk.data = poison
        return [Delivery(message)]

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", *NAMES)
            await s.gathered(["a0"], ["a1", "b1"])
            s.network.tap = tap
            await s.finished(*NAMES)
            account = s.account("a0")
            assert account.holds
            assert not account.open
            assert s.counted("dropped_corrupt", "a0") + s.counted("dropped_nonfinite", "a0") > 0
            assert all_sound(s, NAMES)
        added.check()

    run_virtual(main())
