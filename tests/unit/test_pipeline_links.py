"""What a lying neighbour can do over a link, on either end: cost itself its place, never this peer its process or its
memory (C09, C27)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import cache

import pytest
from pipeline_helpers import (
    ROWS,
    TOKENS,
    evil,
    forward,
    head,
    make_batch,
    make_run,
    make_runtimes,
    numbered,
    opening,
    replies,
    taker,
    works,
)

from meshd.errors import MeshdError, MismatchError, ResourceError
from meshd.optim.schedule import TokenCounter
from meshd.pipeline import upstream as upstream_module
from meshd.pipeline.downstream import Cargo, Downstream, Evaluated, Passed
from meshd.pipeline.dropped import Dropped, Refused
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.base import Duplex, LinkLost, NotHere
from meshd.transport.chunks import split
from meshd.transport.memory import MemoryNetwork
from meshd.wire import Frame

RUN = make_run([2], pipeline={"store_mb": 1})
HIDDEN_BYTES = ROWS * TOKENS * 32 * 4


@cache
def there_and_back() -> tuple[pb.Batch, Frame, Frame]:
    """One microbatch: the batch, its hidden state at hop 1, and the gradient with respect to that."""
    first, last = make_runtimes(RUN)
    work = works(make_batch(1), 2)
    work[1].frame = hidden = forward(first, 0, work[0])
    gradient = head(last, 1, work[1])[1].gradient
    assert gradient is not None
    return work[0].wire, hidden, gradient.frame()


def microbatch() -> tuple[pb.Offer, Frame]:
    """A true offer of hop 1, and its payload."""
    batch, frame, _ = there_and_back()
    id = pb.MicrobatchId(origin="origin")
    return pb.Offer(id=id, hop=1, batch=batch, hidden=frame.header), frame


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    run_virtual(run())


# ---- the taking end: Intake -----------------------------------------------------------------------------


async def say(net: MemoryNetwork, messages: Iterable[pb.LinkMessage], listen: bool = False) -> None:
    """Open a link, send it all, and read to the end when `listen`."""
    async with evil(net, RUN) as duplex:
        for message in messages:
            await duplex.send(message)
        while listen:
            await anext(aiter(duplex))


def test_a_true_microbatch_goes_through() -> None:
    """The measure of the tests below: without a lie it works, and nothing stays held."""

    async def main() -> None:
        offer, frame = microbatch()
        offer.committed.append(pb.Count(origin="origin", tokens=64))
        async with taker(RUN) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(pb.LinkMessage(offer=offer))
            for chunk in split(offer.id, 1, frame.payload):
                await duplex.send(pb.LinkMessage(chunk=chunk))
            answer, gradient, _ = await replies(duplex, 3)
            assert answer.answer.verdict == pb.Answer.VERDICT_ACCEPTED
            assert list(gradient.gradient.gradient.shape) == [ROWS, TOKENS, 32]
            assert t.counter.total == 64
            await asyncio.sleep(0.1)
            assert t.intake.held == t.intake._held_bytes == 0
            assert t.runtime.optimizer.tokens == ROWS * TOKENS
            # The same again: a gradient is added at most once.
            await duplex.send(pb.LinkMessage(offer=offer))
            (again,) = await replies(duplex, 1)
            assert (again.answer.verdict, again.answer.reason) == (pb.Answer.VERDICT_DROP, "seen before")

    virtual(main)


def test_one_that_asks_without_reading_the_answers_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are posted without waiting: their number must be bounded here."""
    monkeypatch.setattr(upstream_module, "_MAX_UNREAD", 50)

    async def main() -> None:
        offer, _ = microbatch()
        async with (
            taker(RUN) as (t, _),
            MemoryNetwork(t.intake.pipeline.stage.clock, buffer_bytes=500) as narrow,
        ):
            narrow.register("taker:1", t)  # type: ignore[arg-type]
            many = (numbered(offer, sequence) for sequence in range(5000))
            with pytest.raises((MismatchError, LinkLost)):
                await say(narrow, many)
            assert t.refused == ["50 answers wait unread"]
            await asyncio.sleep(1)
            assert t.intake.held == t.intake._held_bytes == 0

    virtual(main)


def test_what_waits_on_links_is_measured_while_nothing_is_taken() -> None:
    async def main() -> None:
        offer, _ = microbatch()
        async with (
            taker(RUN) as (t, _),
            MemoryNetwork(t.intake.pipeline.stage.clock, buffer_bytes=500) as narrow,
            asyncio.TaskGroup() as tasks,
        ):
            narrow.register("taker:1", t)  # type: ignore[arg-type]
            looking = tasks.create_task(t.intake.pipeline.run())
            async with evil(narrow, RUN) as duplex:
                for sequence in range(500):
                    await duplex.send(numbered(offer, sequence))
                await asyncio.sleep(2)
                assert t.metrics.value("upstream_queued_bytes") > 1000
                await replies(duplex, 500)
                await asyncio.sleep(2)
                assert t.metrics.value("upstream_queued_bytes") == 0
            looking.cancel()

    virtual(main)


def test_places_are_bounded_by_bytes_and_freed_when_the_link_ends() -> None:
    async def main() -> None:
        offer, _ = microbatch()
        async with taker(RUN) as (t, net):
            async with evil(net, RUN) as duplex:
                for sequence in range(500):
                    await duplex.send(numbered(offer, sequence))
                verdicts = [m.answer.verdict for m in await replies(duplex, 500)]
                places = 2**20 // HIDDEN_BYTES
                assert verdicts.count(pb.Answer.VERDICT_ACCEPTED) == places == t.intake.held
                assert verdicts.count(pb.Answer.VERDICT_BUSY) == 500 - places
                # Each cancel frees its place, once.
                for _ in range(3):
                    await duplex.send(pb.LinkMessage(cancel=pb.Cancel(id=offer.id, hop=1)))
                await asyncio.sleep(0.1)
                assert t.intake.held == places - 1
            await asyncio.sleep(0.1)
            assert t.intake.held == t.intake._held_bytes == 0

    virtual(main)


def test_bytes_beyond_the_announced_ones_stop_the_work_that_began() -> None:
    """The place is given up, so the work must end: else a neighbour makes this peer hold more than its budget."""

    async def main() -> None:
        offer, frame = microbatch()
        async with taker(RUN) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(pb.LinkMessage(offer=offer))
            chunks = list(split(offer.id, 1, frame.payload))
            more = pb.Chunk(id=offer.id, hop=1, offset=len(frame.payload), data=b"more")
            for chunk in [*chunks, more]:
                await duplex.send(pb.LinkMessage(chunk=chunk))
            answer, drop = await replies(duplex, 2)
            assert answer.answer.verdict == pb.Answer.VERDICT_ACCEPTED
            assert drop.drop.reason == pb.Drop.REASON_CORRUPT
            await asyncio.sleep(0.5)
            assert t.intake.held == t.intake._held_bytes == 0
            assert t.runtime.optimizer.tokens in (0, ROWS * TOKENS)  # what runs already runs to its end
            await duplex.send(numbered(offer, 1))
            (answer,) = await replies(duplex, 1)  # and no gradient came in between
            assert answer.answer.verdict == pb.Answer.VERDICT_ACCEPTED

    virtual(main)


@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (lambda offer: setattr(offer, "hop", 0), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer, "hop", -1), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer, "hop", 7), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer.hidden, "payload_bytes", 2**40), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer.hidden, "payload_bytes", 0), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer.hidden, "codec", "zip" * 10**5), pb.Answer.VERDICT_DROP),
        (lambda offer: offer.hidden.shape.append(1), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer.batch, "label_tokens", 0), pb.Answer.VERDICT_DROP),
        (lambda offer: setattr(offer.batch, "ids", b"\xff" * len(offer.batch.ids)), pb.Answer.VERDICT_DROP),
    ],
)
def test_a_false_offer_is_refused_and_the_link_goes_on(
    spoil: Callable[[pb.Offer], None], verdict: pb.Answer.Verdict
) -> None:
    async def main() -> None:
        good, _ = microbatch()
        bad = pb.Offer()
        bad.CopyFrom(good)
        spoil(bad)
        async with taker(RUN) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(pb.LinkMessage(offer=bad))
            await duplex.send(pb.LinkMessage(offer=good))
            first, second = await replies(duplex, 2)
            assert first.answer.verdict == verdict
            assert 0 < len(first.answer.reason) < 1000
            assert second.answer.verdict == pb.Answer.VERDICT_ACCEPTED
            assert t.intake.held == 1

    virtual(main)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.LinkMessage(answer=pb.Answer()), "answer does not belong"),
        (pb.LinkMessage(gradient=pb.Gradient()), "gradient does not belong"),
        (pb.LinkMessage(), "None does not belong"),
        (opening(RUN.run_id), "open does not belong"),
        # Its answer would be too large to send.
        (pb.LinkMessage(offer=pb.Offer(id=pb.MicrobatchId(origin="x" * 4_194_000))), "origin of 4194000"),
    ],
)
def test_what_no_peer_sends_ends_the_link_with_a_reason(message: pb.LinkMessage, reason: str) -> None:
    async def main() -> None:
        async with taker(RUN) as (t, net):
            with pytest.raises(MismatchError, match=reason):
                await say(net, [message], listen=True)
            assert len(t.refused) == 1
            # Others are served.
            offer, _ = microbatch()
            async with evil(net, RUN) as duplex:
                await duplex.send(pb.LinkMessage(offer=offer))
                assert (await replies(duplex, 1))[0].answer.verdict == pb.Answer.VERDICT_ACCEPTED

    virtual(main)


def test_chunks_and_cancels_of_what_was_never_offered_are_ignored() -> None:
    async def main() -> None:
        offer, _ = microbatch()
        unknown = pb.MicrobatchId(origin="nobody", sequence=9)
        async with taker(RUN) as (t, net), evil(net, RUN) as duplex:
            for _ in range(100):
                await duplex.send(pb.LinkMessage(chunk=pb.Chunk(id=unknown, offset=3, data=bytes(1000))))
                await duplex.send(pb.LinkMessage(cancel=pb.Cancel(id=unknown)))
            await duplex.send(pb.LinkMessage(offer=offer))
            assert (await replies(duplex, 1))[0].answer.verdict == pb.Answer.VERDICT_ACCEPTED
            assert t.intake.held == 1

    virtual(main)


def test_an_evaluation_of_a_snapshot_that_is_not_here_is_dropped_and_nothing_is_trained() -> None:
    async def main() -> None:
        offer, frame = microbatch()
        offer.evaluate = 2**64 - 1
        async with taker(RUN) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(pb.LinkMessage(offer=offer))
            for chunk in split(offer.id, 1, frame.payload):
                await duplex.send(pb.LinkMessage(chunk=chunk))
            _, drop = await replies(duplex, 2)
            assert drop.drop.reason == pb.Drop.REASON_NO_SNAPSHOT
            assert t.runtime.optimizer.tokens == 0

    virtual(main)


def test_absurd_progress_is_bounded() -> None:
    """A lie within the bounds still counts: only signed counts could tell (a matter of trust, DESIGN section 8)."""

    async def main() -> None:
        lies = [pb.Count(origin="x" * 10_000, tokens=1), pb.Count(origin="y", tokens=2**64 - 1)]
        lies += [pb.Count(origin=f"p{i}", tokens=1) for i in range(1000)]
        offer, _ = microbatch()
        async with taker(RUN) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(pb.LinkMessage(progress=pb.Progress(committed=lies)))
            await duplex.send(pb.LinkMessage(offer=offer))
            await replies(duplex, 1)
            assert t.counter.total == TokenCounter.MAX_ORIGINS

    virtual(main)


# ---- the sending end: Downstream --------------------------------------------------------------------------


Script = Callable[[pb.Offer], Iterable[pb.LinkMessage]]


async def carried(script: Script, evaluate: int = 0) -> object:
    """What `carry` gives for a replica that answers an offer by `script`: a result, or the error."""
    offer, frame = microbatch()
    offer.evaluate = evaluate
    counts: list[pb.Count] = []

    class Replica:
        async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
            async for message in duplex:
                if message.WhichOneof("body") == "offer":
                    for reply in script(message.offer):
                        await duplex.send(reply)

    async with MemoryNetwork(VirtualClock()) as net, asyncio.TaskGroup() as tasks:
        net.register("replica:1", Replica())  # type: ignore[arg-type]
        down = Downstream(
            opening(RUN.run_id).open, "replica:1", lambda: None, counts.extend, lambda kept: None
        )
        running = tasks.create_task(down.run(net.transport("me:1")))
        try:
            async with asyncio.timeout(3600):
                return await down.carry(offer, Cargo(frame))
        except MeshdError as error:
            return error
        finally:
            running.cancel()


def accept(offer: pb.Offer) -> pb.LinkMessage:
    return pb.LinkMessage(answer=pb.Answer(id=offer.id, hop=1, verdict=pb.Answer.VERDICT_ACCEPTED))


def gradient(offer: pb.Offer, loss: float = 2.0, **changes: object) -> list[pb.LinkMessage]:
    """A true gradient, header and chunks; changes: to its tensor header."""
    _, _, frame = there_and_back()
    header = pb.Gradient(id=offer.id, hop=1, gradient=frame.header, loss=loss)
    for field, value in changes.items():
        setattr(header.gradient, field, value)
    chunks = [pb.LinkMessage(chunk=chunk) for chunk in split(offer.id, 1, frame.payload)]
    return [pb.LinkMessage(gradient=header), *chunks]


def score(offer: pb.Offer, loss: float = 3.0, tokens: int = ROWS * TOKENS) -> pb.LinkMessage:
    result = pb.EvalResult(id=offer.id, hop=1, loss_sum=loss, label_tokens=tokens)
    return pb.LinkMessage(eval_result=result)


def test_true_answers_are_taken() -> None:
    async def main() -> None:
        passed = await carried(lambda offer: [accept(offer), *gradient(offer)])
        assert isinstance(passed, Passed)
        assert passed.loss == 2.0
        assert await carried(lambda offer: [accept(offer), score(offer)], evaluate=1) == Evaluated(
            3.0, ROWS * TOKENS
        )
        # Answers twice: the first counts.
        twice = await carried(
            lambda offer: [accept(offer), accept(offer), *gradient(offer), *gradient(offer)]
        )
        assert isinstance(twice, Passed)

    virtual(main)


@pytest.mark.parametrize(
    ("script", "evaluate", "reason"),
    [
        (lambda o: [score(o)], 0, "an evaluation's result where a gradient"),
        (lambda o: gradient(o), 1, "a gradient where an evaluation's result"),
        (lambda o: [gradient(o)[0], *gradient(o)], 0, "a second gradient"),
        (lambda o: gradient(o)[1:], 0, "before its gradient's header"),
        (lambda o: gradient(o, loss=float("nan")), 0, "a loss of nan"),
        (lambda o: gradient(o, payload_bytes=2**40), 0, "payload of"),
        (lambda o: gradient(o, payload_bytes=0), 0, "payload of 0"),
        (lambda o: gradient(o, codec="zip"), 0, "codec = 'zip'"),
        (lambda o: gradient(o, checksum=7), 0, "checksum"),
        (lambda o: [score(o, loss=float("inf"))], 1, "a loss of inf"),
        (lambda o: [score(o, tokens=0)], 1, "over 0 label tokens"),
    ],
)
def test_a_false_result_costs_one_microbatch(script: Script, evaluate: int, reason: str) -> None:
    """It is dropped as corrupt, to be sent elsewhere: neither the process nor the other microbatches pay for it."""

    async def main() -> None:
        error = await carried(lambda offer: [accept(offer), *script(offer)], evaluate)
        assert isinstance(error, Dropped)
        assert error.reason == pb.Drop.REASON_CORRUPT
        assert error.retriable
        assert reason in error.text

    virtual(main)


def test_a_drop_for_a_reason_that_is_not_known_here_is_final_and_its_text_is_cut() -> None:
    async def main() -> None:
        def script(offer: pb.Offer) -> list[pb.LinkMessage]:
            return [accept(offer), pb.LinkMessage(drop=pb.Drop(id=offer.id, reason=99, text="x" * 10**6))]

        error = await carried(script)
        assert isinstance(error, Dropped)
        assert error.reason == pb.Drop.REASON_UNSPECIFIED
        assert not error.retriable
        assert len(str(error)) < 400

    virtual(main)


def test_a_refusal_of_any_size_and_an_unknown_verdict_are_refusals() -> None:
    async def main() -> None:
        # Nor can a prior be missing of a frame that names none: it would be made anew for ever.
        for verdict in (pb.Answer.VERDICT_DROP, 0, 55, pb.Answer.VERDICT_NO_PRIOR):
            answer = {"verdict": verdict, "reason": "y" * 10**6}
            error = await carried(lambda o, a=answer: [pb.LinkMessage(answer=pb.Answer(id=o.id, **a))])  # type: ignore[misc]
            assert isinstance(error, Refused)
            assert len(str(error)) < 400

    virtual(main)


def test_an_answer_that_may_have_meant_yes_is_taken_back() -> None:
    """The replica must not keep a place for what never comes."""

    async def main() -> None:
        heard: list[str] = []

        class Unclear:
            async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
                async for message in duplex:
                    heard.append(message.WhichOneof("body") or "")
                    if message.HasField("offer"):
                        answer = pb.Answer(id=message.offer.id, verdict=64)  # type: ignore[arg-type]
                        await duplex.send(pb.LinkMessage(answer=answer))

        offer, frame = microbatch()
        async with MemoryNetwork(VirtualClock()) as net, asyncio.TaskGroup() as tasks:
            net.register("replica:1", Unclear())  # type: ignore[arg-type]
            down = Downstream(
                opening(RUN.run_id).open, "replica:1", lambda: None, lambda counts: None, lambda kept: None
            )
            running = tasks.create_task(down.run(net.transport("me:1")))
            with pytest.raises(Refused):
                await down.carry(offer, Cargo(frame))
            await asyncio.sleep(0.1)
            assert heard == ["open", "offer", "cancel"]
            running.cancel()

    virtual(main)


def test_a_replica_that_never_answers_is_given_up_and_told_so() -> None:
    """Should it accept later, it must not keep a place for what never comes."""

    async def main() -> None:
        heard: list[str] = []

        class Silent:
            async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
                async for message in duplex:
                    heard.append(message.WhichOneof("body") or "")

        offer, frame = microbatch()
        async with MemoryNetwork(VirtualClock()) as net, asyncio.TaskGroup() as tasks:
            net.register("replica:1", Silent())  # type: ignore[arg-type]
            down = Downstream(
                opening(RUN.run_id).open, "replica:1", lambda: None, lambda counts: None, lambda kept: None
            )
            running = tasks.create_task(down.run(net.transport("me:1")))
            with pytest.raises(LinkLost, match="did not answer an offer in 15 s"):
                await down.carry(offer, Cargo(frame))
            await asyncio.sleep(0.1)
            assert heard == ["open", "offer", "cancel"]
            assert down.lost is None
            running.cancel()

    virtual(main)


@pytest.mark.parametrize("refusal", [MismatchError("m"), ResourceError("r"), NotHere("n"), LinkLost("l")])
def test_whatever_a_replica_refuses_a_link_with_is_one_lost_link(refusal: MeshdError) -> None:
    async def main() -> None:
        class Refusing:
            async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
                raise refusal

        offer, frame = microbatch()
        async with MemoryNetwork(VirtualClock()) as net:
            net.register("replica:1", Refusing())  # type: ignore[arg-type]
            down = Downstream(
                opening(RUN.run_id).open, "replica:1", lambda: None, lambda counts: None, lambda kept: None
            )
            await down.run(net.transport("me:1"))  # does not raise
            with pytest.raises(LinkLost):
                await down.carry(offer, Cargo(frame))

    virtual(main)


def test_progress_waits_for_nobody_and_stops_at_a_link_that_is_behind() -> None:
    async def main() -> None:
        class Stuck:
            async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
                await asyncio.Event().wait()

        async with MemoryNetwork(VirtualClock(), buffer_bytes=1000) as net, asyncio.TaskGroup() as tasks:
            net.register("replica:1", Stuck())  # type: ignore[arg-type]
            down = Downstream(
                opening(RUN.run_id).open, "replica:1", lambda: None, lambda counts: None, lambda kept: None
            )
            down.progress([])  # not open yet
            running = tasks.create_task(down.run(net.transport("me:1")))
            await asyncio.sleep(1)
            counts = [pb.Count(origin="o" * 100, tokens=i) for i in range(256)]
            for _ in range(1000):
                down.progress(counts)
            sender = down._ready.result()
            assert (1 << 20) <= sender.queued_bytes < (1 << 20) + 40_000
            net.cut("me:1", "replica:1")
            await running
            down.progress(counts)  # lost: nobody to tell

    virtual(main)
