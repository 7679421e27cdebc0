"""Bytes that are not what they should be, in either direction and of every codec, are told from the truth or mean
finite numbers: a sender is told, a link goes on, and no gradient of them is added (DESIGN section 3, C09, C27)."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_helpers import (
    CPU,
    ROWS,
    TOKENS,
    Sender,
    Taker,
    backward,
    evil,
    fitted_prior,
    flat,
    head,
    make_batch,
    masked_run,
    replies,
    sender,
    taker,
    there,
    using,
    works,
)

from meshd.config.runspec import ResolvedRun
from meshd.errors import MismatchError
from meshd.pipeline.downstream import Passed
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.runtime import Work
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state.bundle import BundleStore
from meshd.transport.base import Duplex
from meshd.transport.memory import Delivery, MemoryNetwork
from meshd.wire import CodecContext, Frame, checksum_start, decode
from meshd.wire.codec import Direction

HIDDEN = RANK = 32
SPECTRAL = "spectral:bits=2"
CODECS = ["dense", "int8", "int4", "topk:keep=0.5", "random:keep=0.5", "lloyd:bits=2", SPECTRAL]
Way = Literal["down", "back"]


def run_of(way: Way, codec: str) -> ResolvedRun:
    """A run whose frames all name a prior, with the codec on one of the ways."""
    return masked_run(codec, SPECTRAL) if way == "down" else masked_run(SPECTRAL, codec)


def old() -> BoundaryPrior:
    """The prior that frames are written with."""
    return fitted_prior()


def new() -> BoundaryPrior:
    """Another one of the same boundary."""
    return fitted_prior(500)


@dataclass
class Truth:
    """One microbatch: its frames at the boundary, and what the stage before adds of it."""

    work: Work
    hidden: Frame
    gradient: Frame
    added: torch.Tensor
    features: TokenFeatures

    def offer(self, sequence: int) -> pb.Offer:
        id = pb.MicrobatchId(origin="origin", sequence=sequence)
        return pb.Offer(id=id, hop=1, batch=self.work.wire, hidden=self.hidden.header)

    def frame(self, way: Way) -> Frame:
        return self.hidden if way == "down" else self.gradient

    def decoded(self, way: Way, frame: Frame) -> torch.Tensor:
        """Raises MismatchError."""
        direction: Direction = "forward" if way == "down" else "backward"
        context = CodecContext(
            0, direction, self.work.batch.inputs, self.work.seed, self.work.onward, self.features
        )
        return decode(frame, context, CPU)


@cache
def truth(way: Way, codec: str) -> Truth:
    first, last = using(run_of(way, codec), old())
    work = works(make_batch(1), 2)
    there([first, last], work)
    hidden = work[1].frame
    returned = head(last, 1, work[1])[1].gradient
    assert hidden is not None
    assert returned is not None
    gradient = returned.frame()
    backward(first, 0, work[0], gradient)
    assert first.features is not None
    return Truth(work[0], hidden, gradient, flat(first), first.features)


# ---- lies ---------------------------------------------------------------------------------------------------------


@dataclass
class Lie:
    """A frame as it comes. what: in words; pieces: its chunks, (offset, bytes)."""

    what: str
    header: pb.TensorHeader
    pieces: list[tuple[int, bytes]]

    @property
    def payload(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def unfinished(self) -> bool:
        """Whether more bytes are announced than come, so that nothing can be told of it yet."""
        in_order = all(
            offset == len(b"".join(d for _, d in self.pieces[:n]))
            for n, (offset, _) in enumerate(self.pieces)
        )
        return in_order and len(self.payload) < self.header.payload_bytes

    def chunks(self, id: pb.MicrobatchId) -> list[pb.LinkMessage]:
        return [
            pb.LinkMessage(chunk=pb.Chunk(id=id, hop=1, offset=offset, data=data))
            for offset, data in self.pieces
        ]


def lie(what: str, frame: Frame, payload: bytes | None = None, /, **changes: object) -> Lie:
    """A frame with another payload in one chunk, and changes to its header."""
    header = pb.TensorHeader()
    header.CopyFrom(frame.header)
    for name, value in changes.items():
        setattr(header, name, value)
    return Lie(what, header, [(0, frame.payload if payload is None else payload)])


def resized(what: str, frame: Frame, payload: bytes, honest: bool) -> Lie:
    """honest: with the checksum of what it is now."""
    changes = {"payload_bytes": len(payload)}
    sums = {"checksum": zlib.crc32(payload, checksum_start(frame.header))} if honest else {}
    return lie(what, frame, payload, **changes, **sums)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def reordered(frame: Frame) -> Iterator[Lie]:
    third = len(frame.payload) // 3
    a, b, c = frame.payload[:third], frame.payload[third : 2 * third], frame.payload[2 * third :]
    for first, second, third_ in ((b, a, c), (c, a, b), (a, c, b)):
        places = [0, len(first), len(first) + len(second)]
        there = list(zip(places, (first, second, third_), strict=True))
        yield Lie("bytes of chunks in another order", frame.header, there)
    own = [(0, a), (third, b), (2 * third, c)]
    for order in ((1, 0, 2), (0, 2, 1), (0, 0, 1), (0, 2)):
        yield Lie("chunks in another order", frame.header, [own[number] for number in order])


def lies(frame: Frame, every: int = 1, first: int = 0) -> Iterator[Lie]:
    """What may happen to a frame on its way, short of a new checksum for other values. every, first: so many of those
    that no decoder sees."""
    size = len(frame.payload)
    for cut in (1, 4, size // 2, size - 1):
        for honest in (False, True):
            yield resized(f"cut by {cut}, checksum {honest}", frame, frame.payload[:-cut], honest)
    yield lie("cut by 1, size kept", frame, frame.payload[:-1])
    yield resized("longer", frame, frame.payload + bytes(4), honest=True)
    yield from islice(on_the_way(frame), first, None, every)


def on_the_way(frame: Frame) -> Iterator[Lie]:
    yield from reordered(frame)
    size = len(frame.payload)
    for number in range(24):
        bit = number * 8 * size // 24 + number % 8
        yield lie(f"bit {bit} of the payload", frame, flipped(frame.payload, bit))
    yield from other_headers(frame)


def other_headers(frame: Frame) -> Iterator[Lie]:
    header = frame.header
    for name in ("codec", "dtype"):
        text = getattr(header, name).encode()
        for bit in (bit for bit in range(0, 8 * len(text), 3) if bit % 8 < 7):
            yield lie(f"header: bit {bit} of {name}", frame, **{name: flipped(text, bit).decode()})
    for bit in (0, 100, 255):
        yield lie(f"header: bit {bit} of prior", frame, prior=flipped(header.prior, bit))
    for bit in range(0, 31, 6):
        for name in ("payload_bytes", "checksum"):
            yield lie(f"header: bit {bit} of {name}", frame, **{name: getattr(header, name) ^ 1 << bit})
    for place in range(len(header.shape)):
        wrong = lie(f"header: shape {place}", frame)
        wrong.header.shape[place] ^= 1
        yield wrong


@pytest.mark.parametrize("way", ["down", "back"])
def test_the_lies_are_many_and_none_is_the_truth(way: Way) -> None:
    for codec in CODECS:
        frame = truth(way, codec).frame(way)
        found = list(lies(frame))
        assert len(found) > 60
        for each in found:
            assert (each.header, each.pieces) != (frame.header, [(0, frame.payload)]), each.what


def garbled(frame: Frame, seed: int) -> Lie:
    """What a liar may send: other bytes, and the checksum that goes with them."""
    rng = random.Random(seed)
    payload = bytearray(frame.payload)
    match rng.choice(["few", "many", "zeros", "ones", "random", "cut", "longer"]):
        case "few":
            for _ in range(rng.randint(1, 3)):
                payload[rng.randrange(len(payload))] = rng.randrange(256)
        case "many":
            for place in range(len(payload)):
                payload[place] ^= rng.randrange(256) * (rng.random() < 0.2)
        case "zeros":
            payload = bytearray(len(payload))
        case "ones":
            start = rng.randrange(len(payload))
            payload[start:] = b"\xff" * (len(payload) - start)
        case "random":
            payload = bytearray(rng.randbytes(len(payload)))
        case "cut":
            del payload[rng.randrange(1, len(payload)) :]
        case "longer":
            payload += rng.randbytes(rng.randint(1, 8))
    return resized(f"garbled {seed}", frame, bytes(payload), honest=True)


# ---- on the way down ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def asked(run: ResolvedRun, root: Path) -> AsyncIterator[tuple[Taker, Duplex[pb.LinkMessage]]]:
    """A taker that has both priors, and a link to it."""
    async with taker(run, await both(root)) as (t, net), evil(net, run) as duplex:
        yield t, duplex


async def both(root: Path) -> PriorStore:
    store = PriorStore(BundleStore(root / "bundles"), HIDDEN, RANK, 1)
    for prior in (old(), new()):
        await store.put(prior.to_bytes())
    return store


async def answered(duplex: Duplex[pb.LinkMessage]) -> pb.LinkMessage:
    """The next message that is about a microbatch."""
    while True:
        (message,) = await replies(duplex, 1)
        if message.WhichOneof("body") not in ("credit", "prior"):
            return message


async def outcome(duplex: Duplex[pb.LinkMessage], offer: pb.Offer, told: Lie) -> str | Frame:
    """What a lie gets: a word, or the gradient of what was taken for true."""
    offer.hidden.CopyFrom(told.header)
    await duplex.send(pb.LinkMessage(offer=offer))
    answer = (await answered(duplex)).answer
    assert answer.id == offer.id
    if answer.verdict != pb.Answer.VERDICT_ACCEPTED:
        assert answer.reason
        return pb.Answer.Verdict.Name(answer.verdict)
    for chunk in told.chunks(offer.id):
        await duplex.send(chunk)
    if told.unfinished:
        await duplex.send(pb.LinkMessage(cancel=pb.Cancel(id=offer.id, hop=1)))
        return "unfinished"
    reply = await answered(duplex)
    if reply.HasField("drop"):
        assert reply.drop.text
        assert not reply.drop.partial
        return pb.Drop.Reason.Name(reply.drop.reason)
    return Frame(reply.gradient.gradient, (await answered(duplex)).chunk.data)


@pytest.mark.parametrize("codec", CODECS)
def test_a_spoilt_frame_on_the_way_down_is_told_from_a_true_one(codec: str, tmp_path: Path) -> None:
    async def main() -> None:
        true = truth("down", codec)
        found: Counter[str] = Counter()
        async with asked(run_of("down", codec), tmp_path) as (t, duplex):
            for sequence, told in enumerate(lies(true.hidden)):
                result = await outcome(duplex, true.offer(sequence), told)
                if isinstance(result, Frame):
                    assert harmless(true, "down", told), told.what
                    result = "harmless"
                found[result] += 1
            assert found.keys() <= {
                "VERDICT_DROP", "VERDICT_NO_PRIOR", "REASON_CORRUPT", "unfinished", "harmless",
            }  # fmt: skip
            assert found["unfinished"] > 0
            assert found["REASON_CORRUPT"] == t.metrics.value("dropped_corrupt") > 30
            assert found["VERDICT_NO_PRIOR"] == t.metrics.value("offers_no_prior") == 3
            await asyncio.sleep(0.1)
            assert t.intake.held == t.intake._held_bytes == 0
            assert t.runtime.optimizer.tokens == found["harmless"] * ROWS * TOKENS
            # The link goes on, and the truth is taken.
            result = await outcome(duplex, true.offer(9999), lie("none", true.hidden))
            assert isinstance(result, Frame)
            assert result.header.prior == old().name
            assert t.refused == []

    run_virtual(main())


def harmless(true: Truth, way: Way, told: Lie) -> bool:
    """Whether a header says the same in other words: a codec's name with another budget."""
    got = true.decoded(way, Frame(told.header, told.payload))
    return told.what.startswith("header: bit") and torch.equal(got, true.decoded(way, true.frame(way)))


@pytest.mark.parametrize("codec", [*CODECS, "dense32"])
def test_what_a_liar_sends_down_costs_no_more_than_itself(codec: str, tmp_path: Path) -> None:
    async def main() -> None:
        true = truth("down", codec)
        async with asked(run_of("down", codec), tmp_path) as (t, duplex):
            for sequence in range(20):
                result = await outcome(duplex, true.offer(sequence), garbled(true.hidden, sequence))
                if isinstance(result, str):
                    assert result in ("VERDICT_DROP", "REASON_CORRUPT", "REASON_NONFINITE")
            result = await outcome(duplex, true.offer(9999), lie("none", true.hidden))
            assert isinstance(result, Frame)
            assert t.refused == []
            assert t.intake.held <= 1

    run_virtual(main())


# ---- on the way back ----------------------------------------------------------------------------------------------


@dataclass
class Teller:
    """A replica of the last stage that gives back what it is told to: one lie, then the true gradient. offers: since
    the lie was set."""

    true: Frame
    told: Lie | None = None
    offers: int = 0

    def tell(self, told: Lie) -> None:
        self.told, self.offers = told, 0

    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        async for message in duplex:
            if message.HasField("offer"):
                self.offers += 1
                id = message.offer.id
                told, self.told = self.told or lie("none", self.true), None
                answer = pb.Answer(id=id, hop=1, verdict=pb.Answer.VERDICT_ACCEPTED)
                await duplex.send(pb.LinkMessage(answer=answer))
                header = pb.Gradient(id=id, hop=1, gradient=told.header, loss=2.0)
                for reply in [pb.LinkMessage(gradient=header), *told.chunks(id)]:
                    await duplex.send(reply)


@asynccontextmanager
async def told_lies(run: ResolvedRun, true: Truth) -> AsyncIterator[tuple[Sender, Teller]]:
    async with MemoryNetwork(VirtualClock()) as net:
        teller = Teller(true.gradient)
        net.register("taker:1", teller)  # type: ignore[arg-type]
        async with sender(run, net, old()) as s:
            yield s, teller


@pytest.mark.parametrize("codec", CODECS)
def test_a_spoilt_gradient_is_told_from_a_true_one(codec: str) -> None:
    async def main() -> None:
        true = truth("back", codec)
        found: Counter[str] = Counter()
        passed = 0
        async with told_lies(run_of("back", codec), true) as (s, teller):
            for told in lies(true.gradient, every=6, first=CODECS.index(codec) % 6):
                before = s.corrupt
                teller.tell(told)
                result = await s.send()
                passed += isinstance(result, Passed)
                if isinstance(result, Dropped):
                    assert result.reason == pb.Drop.REASON_CORRUPT, told.what
                    assert result.partial
                if told.unfinished and s.corrupt == before:
                    found["unfinished"] += 1
                    assert teller.offers == 2  # given up after a quarter of an hour, and sent again
                elif s.corrupt == before:
                    found["harmless"] += 1
                    assert harmless(true, "back", told), told.what
                else:
                    found["corrupt"] += 1
                    assert s.corrupt == before + 1, told.what
                    # Told by the link: sent again. By the decoder: elsewhere, with other data.
                    assert teller.offers == 1 + isinstance(result, Passed)
            assert found["corrupt"] > 15
            assert found["unfinished"] > 0
            assert s.tokens == passed * ROWS * TOKENS
            torch.testing.assert_close(flat(s.stage.runtime), passed * true.added, rtol=1e-3, atol=1e-4)
            assert isinstance(await s.send(), Passed)

    run_virtual(main())


@pytest.mark.parametrize("codec", [*CODECS, "dense32"])
def test_what_a_liar_gives_back_costs_no_more_than_its_microbatch(codec: str) -> None:
    async def main() -> None:
        true = truth("back", codec)
        async with told_lies(run_of("back", codec), true) as (s, teller):
            for seed in range(15):
                teller.tell(garbled(true.gradient, seed))
                result = await s.send()
                if isinstance(result, Dropped):
                    assert result.reason in (pb.Drop.REASON_CORRUPT, pb.Drop.REASON_NONFINITE)
            assert isinstance(await s.send(), Passed)

    run_virtual(main())


# ---- another prior's name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_that_names_another_prior_than_it_was_written_with_teaches_nobody(
    codec: str, tmp_path: Path
) -> None:
    """Both priors are there, so the bytes would decode to something else. The checksum covers the name."""

    def renamed(source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.LinkMessage) and message.HasField("offer") and not message.offer.id.attempt:
            assert message.offer.hidden.prior == old().name
            message.offer.hidden.prior = new().name
        return [Delivery(message)]

    async def main() -> None:
        run, true = run_of("down", codec), truth("down", codec)
        async with taker(run, await both(tmp_path)) as (t, net), sender(run, net, old()) as s:
            net.tap = renamed
            result = await s.send()
            assert isinstance(result, Passed)  # told, and sent as it was the second time
            assert (t.metrics.value("dropped_corrupt"), s.corrupt) == (1, 0)
            assert t.runtime.optimizer.tokens == s.tokens == ROWS * TOKENS
            # Encoded again, at the rate that is due then: nearly the same.
            alike = torch.nn.functional.cosine_similarity(flat(s.stage.runtime), true.added, dim=0)
            assert alike > 0.95
            net.tap = None
            assert isinstance(await s.send(), Passed)

    run_virtual(main())


@pytest.mark.parametrize("codec", CODECS)
def test_a_gradient_that_names_another_prior_is_refused_and_asked_for_again(codec: str) -> None:
    async def main() -> None:
        true = truth("back", codec)
        async with told_lies(run_of("back", codec), true) as (s, teller):
            teller.tell(lie("renamed", true.gradient, prior=new().name))
            assert isinstance(await s.send(), Passed)
            assert s.corrupt == 1
            torch.testing.assert_close(flat(s.stage.runtime), true.added)

    run_virtual(main())


# ---- decoders -----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(codec=st.sampled_from(CODECS), way=st.sampled_from(["down", "back"]), seed=st.integers(0, 2**32))
def test_garbled_bytes_with_a_true_checksum_are_refused_or_finite(codec: str, way: Way, seed: int) -> None:
    true = truth(way, codec)
    told = garbled(true.frame(way), seed)
    try:
        found = true.decoded(way, Frame(told.header, told.payload))
    except MismatchError:
        return
    assert found.shape == (ROWS, TOKENS, HIDDEN)
    assert found.dtype == torch.float32
    assert bool(torch.isfinite(found).all())
