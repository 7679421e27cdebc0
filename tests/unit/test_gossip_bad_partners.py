"""A partner that is bad, silent or another run's is refused and named: nothing moves, and the next can be had."""

from __future__ import annotations

import asyncio

import pytest
import torch
from google.protobuf.message import Message
from gossip_peers import compressed, peers, virtual

from meshd.gossip.coordinates import Coverage
from meshd.gossip.exchange import MOST_STEPS
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex
from meshd.transport.memory import Delivery


@pytest.mark.parametrize(
    "change", [{"steps": 11}, {"stage": 0}, {"without": "a.bias"}], ids=["run", "stage", "size"]
)
def test_a_replica_of_another_run_stage_or_size_is_refused(change: dict[str, object]) -> None:
    """For good: it is not taken for busy and asked again."""

    async def main() -> None:
        async with peers("ab", b=change) as (_, (a, b)):
            before = a.vector, b.vector
            assert not await a.exchange("b")
            assert (a.counted("gossip_busy"), a.counted("gossip_failed")) == (0, 1)
            # Left alone for a while, whatever happens.
            running = asyncio.create_task(a.gossip_service.run())
            a.gossip_service.stepped(8)
            await asyncio.sleep(20)
            running.cancel()
            assert a.counted("gossip_failed") == 1
            assert b.counted("gossip_failed") == 1
            assert torch.equal(a.vector, before[0])
            assert torch.equal(b.vector, before[1])

    virtual(main)


def test_a_partner_that_has_no_stage_yet_or_is_not_there_is_one_failure() -> None:
    async def main() -> None:
        async with peers("a") as (_, (a,)):
            assert not await a.exchange("nobody")
            assert a.counted("gossip_failed") == 1

    virtual(main)


@pytest.mark.parametrize("phase", ["open", "chunk"])
def test_a_partner_that_falls_silent_is_given_up_in_time(phase: str) -> None:
    async def main() -> None:
        async with peers("a") as (net, (a,)):

            class Silent:
                async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
                    async for message in duplex:
                        if phase == "chunk" and message.WhichOneof("body") == "open":
                            await duplex.send(message)

            net.register("b:1", Silent())  # type: ignore[arg-type]
            before = a.vector
            assert not await a.exchange("b")
            assert asyncio.get_running_loop().time() < 10
            assert a.counted("gossip_failed") == 1
            assert torch.equal(a.vector, before)

    virtual(main)


@pytest.mark.parametrize(
    "lie",
    [
        pb.GossipMessage(chunk=pb.GossipChunk(offset=4, data=b"12")),
        pb.GossipMessage(chunk=pb.GossipChunk(offset=0, data=b"")),
        pb.GossipMessage(chunk=pb.GossipChunk(offset=0, data=bytes(2))),
        pb.GossipMessage(chunk=pb.GossipChunk(offset=0, data=bytes(200))),
        pb.GossipMessage(done=pb.GossipDone(segment=0, checksum=1)),
        pb.GossipMessage(),
    ],
    ids=["gap", "empty", "a crumb", "too much", "done before the values", "nothing"],
)
def test_a_partner_that_breaks_the_protocol_moves_nothing(lie: pb.GossipMessage) -> None:
    async def main() -> None:
        async with peers("a") as (net, (a,)):

            class Liar:
                async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
                    messages = aiter(duplex)
                    await duplex.send(await anext(messages))
                    await duplex.send(lie)
                    async for _ in messages:
                        pass

            net.register("b:1", Liar())  # type: ignore[arg-type]
            before = a.vector
            assert not await a.exchange("b")
            assert torch.equal(a.vector, before)
            assert a.counted("gossip_failed") == 1

    virtual(main)


def test_a_wrong_confirmation_moves_nothing() -> None:
    async def main() -> None:
        async with peers("a") as (net, (a,)):

            class Liar:
                async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
                    async for message in duplex:
                        if message.WhichOneof("body") == "done":
                            message.done.checksum ^= 1
                        await duplex.send(message)

            net.register("b:1", Liar())  # type: ignore[arg-type]
            before = a.vector
            assert not await a.exchange("b")
            assert torch.equal(a.vector, before)

    virtual(main)


def test_a_partner_that_answers_although_it_has_opened_itself_gets_one_exchange() -> None:
    """b lets go of its own opening for a's; a, which refuses when it is honest, goes on with both."""

    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            net.set_delay("a:1", "b:1", 2.0)

            async def dishonest() -> None:
                await asyncio.sleep(1.0)
                own, a.gossip_service._turn = a.gossip_service._turn, None
                await asyncio.sleep(2.0)
                a.gossip_service._turn = own

            opened = await asyncio.gather(a.exchange("b"), b.exchange("a"), dishonest())
            assert opened[1] is False
            await asyncio.sleep(30.0)
            assert b.gossip_service._turn is None
            assert b.counted("gossip_exchanges") == 1

    virtual(main)


# ---- values that are not finite ----------------------------------------------------------------------


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_partner_with_values_that_are_not_finite_is_refused_and_named(who: str) -> None:
    """C27. On both sides, whichever opened; nothing is moved, and nobody's process ends."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            bad, good = (a, b) if who == "a" else (b, a)
            with torch.no_grad():
                bad.parameters["b.weight"][2, 2] = torch.nan
            before = good.vector
            assert not await a.exchange("b")
            await asyncio.sleep(1)
            assert torch.equal(good.vector, before)
            assert good.counted("gossip_failed") == bad.counted("gossip_failed") == 1
            # It is free for the next.
            with torch.no_grad():
                bad.parameters["b.weight"][2, 2] = 0.0
            assert await a.exchange("b")

    virtual(main)


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_of_its_own_that_are_not_finite_end_a_compressed_exchange(who: str, value: float) -> None:
    """C27: of every coordinate, in the sample or not. Residues could not show it."""

    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (_, (a, b)):
            bad, good = (a, b) if who == "a" else (b, a)
            kept = {name: parameter.detach().clone() for name, parameter in bad.parameters.items()}
            with torch.no_grad():
                for parameter in bad.parameters.values():
                    parameter.fill_(value)
            before = good.vector
            assert not await a.exchange("b")
            await asyncio.sleep(10)
            assert torch.equal(good.vector, before)
            assert good.counted("gossip_failed") == bad.counted("gossip_failed") == 1
            with torch.no_grad():
                for name, parameter in bad.parameters.items():
                    parameter.copy_(kept[name])
            assert await a.exchange("b")

    virtual(main)


# ---- wrong openings and samples ----------------------------------------------------------------------


def sample(message: pb.GossipMessage, values: bytes | None = None, steps: bytes | None = None) -> None:
    """Spoil a sample."""
    if message.WhichOneof("body") == "sample":
        message.sample.values = message.sample.values if values is None else values
        if message.sample.steps and steps is not None:
            message.sample.steps = steps


def spoilt(what: str, message: pb.GossipMessage) -> None:
    """Change a message in place, if it is one that this spoils."""
    kind = message.WhichOneof("body")
    values = message.sample.values
    if what == "sample short":
        sample(message, values[:-4])
    elif what == "sample long":
        sample(message, values + bytes(4))
    elif what == "sample empty":
        sample(message, b"")
    elif what in ("nan", "inf"):
        number = torch.tensor([float(what)]).numpy().tobytes()
        sample(message, number + values[4:])
    elif what == "no steps":
        sample(message, steps=b"")
    elif what == "too many steps":
        sample(message, steps=message.sample.steps + b"\0")
    elif what == "stretched":
        # One code off may be rounding; two are 41 %.
        sample(
            message, steps=bytes([message.sample.steps[0] + 2]) + message.sample.steps[1:] if values else None
        )
    elif what == "shrunk":
        sample(
            message,
            steps=message.sample.steps[:-1] + bytes([message.sample.steps[-1] - 2]) if values else None,
        )
    elif what == "short residues" and kind == "chunk":
        message.chunk.data = message.chunk.data[:-1]
    elif what.startswith("open ") and kind == "open":
        _, field, number = what.split()
        setattr(message.open, field, float(number) if field == "usual" else int(number))


# A sample for which only the opener's steps can be wrong has no steps from the other side.
EITHER = ["sample short", "sample long", "sample empty", "nan", "inf", "short residues"]
BY_OPENER = ["no steps", "too many steps", "stretched", "shrunk"]
OPENINGS = [
    *("open bits 5", "open bits 0", "open bits 1", "open subset 0", "open subset 4097", "open offset 4"),
    f"open weight_version {MOST_STEPS + 1}",
    *("open usual nan", "open usual inf", "open usual -1"),
]


def refused_and_free(what: str, liar: str) -> None:
    """What `liar` sends is spoilt on its way: the other refuses it, nothing moves, and the next exchange is done."""

    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
            good = b if liar == "a" else a
            touched = 0

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal touched
                if source == f"{liar}:1" and isinstance(passing, pb.GossipMessage):
                    whole = passing.SerializeToString()
                    spoilt(what, passing)
                    touched += whole != passing.SerializeToString()
                return [Delivery(passing)]

            net.tap = tap
            before = a.vector, b.vector
            assert not await a.exchange("b")
            await asyncio.sleep(10)
            assert touched
            assert good.counted("gossip_failed") == 1
            assert a.counted("gossip_failed") == 1
            assert torch.equal(a.vector, before[0])
            assert torch.equal(b.vector, before[1])
            assert a.gossip_service._turn is b.gossip_service._turn is None
            net.tap = None
            assert await a.exchange("b")
            await asyncio.sleep(0.1)
            assert not torch.equal(b.vector, before[1])

    virtual(main)


@pytest.mark.parametrize("liar", ["a", "b"])
@pytest.mark.parametrize("what", [*EITHER, *OPENINGS])
def test_a_wrong_sample_or_opening_is_refused_and_moves_nothing(what: str, liar: str) -> None:
    refused_and_free(what, liar)


@pytest.mark.parametrize("what", BY_OPENER)
def test_an_opener_whose_steps_are_not_those_of_the_samples_is_refused(what: str) -> None:
    refused_and_free(what, "a")


@pytest.mark.parametrize("what", ["open subset 5", "open bits 4", "open offset 9", "open exchange 7"])
def test_an_answer_that_does_not_repeat_the_openers_choice_is_refused(what: str) -> None:
    refused_and_free(what, "b")


@pytest.mark.parametrize(("subset", "bits"), [(4, 8), (1, 3), (1, 8), (3, 3)])
def test_an_opener_that_wants_more_than_the_run_exchanges_is_refused(subset: int, bits: int) -> None:
    """Residues take memory for all their values at once."""

    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (_, (a, b)):
            greedy = a.gossip_service  # of the same run, which it does not keep to
            greedy._spec = greedy._spec.model_copy(update={"bits": bits, "subset": subset})
            greedy._coverage = Coverage(subset, 0)
            before = b.vector
            assert not await a.exchange("b")
            assert b.counted("gossip_failed") == 1
            assert torch.equal(b.vector, before)
            # All values in bf16, a segment at a time, anybody may ask for.
            assert await a.exchange("b", whole=True)
            await asyncio.sleep(0.1)
            assert not torch.equal(b.vector, before)

    virtual(main)
