"""Codecs with priors in the pipeline: measured, fitted and used by runtimes; asked for, fetched and kept by links,
whatever a neighbour says (DESIGN section 3, C09, C27)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from google.protobuf.message import Message
from pipeline_helpers import (
    PRIOR_TOKENS,
    ROWS,
    TOKENS,
    back,
    backward,
    chunks_of,
    evil,
    fitted_prior,
    flat,
    forward,
    gradients,
    head,
    make_batch,
    make_runtimes,
    masked_run,
    numbered,
    replies,
    sender,
    taker,
    there,
    train,
    using,
    works,
)

from meshd.config.runspec import ResolvedRun
from meshd.errors import MeshdError, MismatchError, NetworkError
from meshd.model.loss import token_loss
from meshd.pipeline.downstream import Passed
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.runtime import Returned, Work
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats
from meshd.priors.store import PRIOR, PriorStore, bundle_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state.bundle import BundleStore
from meshd.transport.base import Duplex, LinkLost
from meshd.transport.memory import Delivery, MemoryNetwork
from meshd.wire import CodecContext, Frame, codec_named
from meshd.wire.autograd import Boundary

HIDDEN = RANK = 32
SPECTRAL = "spectral:bits=4"
RUN = masked_run(SPECTRAL, SPECTRAL)


def sent(returned: Returned) -> Frame:
    assert returned.gradient is not None
    return returned.gradient.frame()


def said(frame: Frame | None) -> tuple[str, bytes]:
    assert frame is not None
    return frame.header.codec, frame.header.prior


# ---- runtimes -----------------------------------------------------------------------------------------------------


def test_a_prior_is_fitted_from_what_crossed_safely_and_named_by_frames_both_ways() -> None:
    runtimes = make_runtimes(RUN)
    found: list[BoundaryStats | None] = []
    for number in range(25):
        work = works(make_batch(number), 2)
        there(runtimes, work)
        assert said(work[1].frame) == ("int8", b"")
        _, (last, origin) = back(runtimes, work)
        assert said(sent(last)) == ("int8", b"")
        assert last.measured is None  # only the upper end measures
        found.append(origin.measured)
    (stats,) = [each for each in found if each is not None]
    assert found.index(stats) == -(-PRIOR_TOKENS // (ROWS * TOKENS)) - 1
    assert stats.tokens == (found.index(stats) + 1) * ROWS * TOKENS
    assert stats.graded == stats.tokens

    prior = fit(stats, 0, measured=7)
    runtimes[0].crossings[0].use(prior)
    for number in range(3):
        work = works(make_batch(number), 2)
        there(runtimes, work)
        assert said(work[1].frame) == (SPECTRAL, prior.name)
        loss, (last, origin) = back(runtimes, work)
        assert loss > 0
        assert said(sent(last)) == (SPECTRAL, prior.name)
        assert origin.measured is None


def test_every_boundary_measures_for_itself() -> None:
    run = masked_run(SPECTRAL, SPECTRAL, (1, 3), prior_tokens=48, boundary={0: {"forward": "dense"}})
    runtimes = make_runtimes(run)
    measured = [[each.measured for each in train(runtimes, make_batch(n))[1]] for n in range(2)]
    assert measured[0] == [None] * 3
    last, middle, origin = measured[1]
    assert (last, origin) == (None, None)
    assert middle is not None
    prior = fit(middle, 1)
    assert prior.boundary == 1
    runtimes[1].crossings[1].use(prior)
    work = works(make_batch(1), 3)
    there(runtimes, work)
    assert [said(each.frame) for each in work[1:]] == [("dense", b""), (SPECTRAL, prior.name)]


@pytest.mark.parametrize("family", ["spectral", "lloyd"])
def test_gradients_are_near_the_uncompressed_ones_and_less_so_with_fewer_bits(family: str) -> None:
    def trained(there: str, back: str, prior: BoundaryPrior | None) -> list[torch.Tensor]:
        runtimes = using(masked_run(there, back), prior)
        for number in range(4):
            train(runtimes, make_batch(1000 + number), seed=number)
        return [flat(runtime) for runtime in runtimes]

    true = trained("dense32", "dense32", None)
    cosines = []
    for bits in (4, 2, 1, 0.5):
        codec = f"{family}:bits={bits}"
        found = trained(codec, codec, fitted_prior())
        cosines.append(
            [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(found, true, strict=True)]
        )
    assert min(cosines[0]) > 0.99
    for more, fewer in pairwise(cosines):
        assert all(a > b for a, b in zip(more, fewer, strict=True))
    assert cosines[-1][0] < 0.8
    assert cosines[-1][0] < cosines[-1][1]  # the early stage is behind the boundary both ways


def test_told_to_be_safe_a_runtime_does_without_its_prior_both_ways() -> None:
    runtimes = using(RUN, fitted_prior())
    work = works(make_batch(1), 2)
    work[1].frame = forward(runtimes[0], 0, work[0], safe=True)
    assert work[0].onward is None
    assert said(work[1].frame) == ("int8", b"")
    _, (last, origin) = back(runtimes, work)
    assert said(sent(last)) == ("int8", b"")
    assert origin.measured is None  # it has a prior, and needs no other
    there(runtimes, work)
    assert said(work[1].frame) == (SPECTRAL, fitted_prior().name)


def test_what_went_out_under_one_prior_comes_back_under_it_after_a_change() -> None:
    old, new = fitted_prior(), fitted_prior(500)
    assert old.name != new.name
    results = []
    for changes in (False, True):
        runtimes = using(RUN, old)
        work, other = works(make_batch(1), 2), works(make_batch(2), 2)
        there(runtimes, work)
        if changes:
            runtimes[0].crossings[0].use(new)
            there(runtimes, other)
            assert said(other[1].frame) == (SPECTRAL, new.name)
        _, (last, _) = back(runtimes, work)
        assert said(sent(last)) == (SPECTRAL, old.name)
        results.append(gradients(runtimes))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_a_forward_pass_that_is_done_again_after_a_change_goes_by_the_new_prior() -> None:
    """It is sent elsewhere: the gradient of the first attempt would be refused, were it still to come."""
    old, new = fitted_prior(), fitted_prior(500)
    runtimes = using(RUN, old)
    work = works(make_batch(1), 2)
    there(runtimes, work)
    _, first = head(runtimes[1], 1, work[1])
    runtimes[0].crossings[0].use(new)
    there(runtimes, work)
    assert work[0].onward is new
    assert said(work[1].frame) == (SPECTRAL, new.name)
    with pytest.raises(MismatchError, match="which is not here"):
        backward(runtimes[0], 0, work[0], sent(first))
    assert gradients(runtimes[:1]) == {}
    _, again = head(runtimes[1], 1, work[1])
    backward(runtimes[0], 0, work[0], sent(again))
    assert runtimes[0].optimizer.tokens == ROWS * TOKENS


def in_one_process(run: ResolvedRun, prior: BoundaryPrior, work: Work, exact: bool) -> list[torch.Tensor]:
    """Gradients, as sums over label tokens, of the same microbatch with the boundary in one autograd graph."""
    first, last = make_runtimes(run)
    wire, batch = run.spec.wire, work.batch
    boundary = Boundary(codec_named(wire.forward), codec_named(wire.backward), exact_adjoint=exact)
    context = CodecContext(0, "forward", batch.inputs, work.seed, prior, first.features)
    crossed = boundary(first.model(0, batch.inputs, None), context)
    logits = last.model(1, crossed, None)
    (token_loss(logits, batch.labels, batch.label_mask) / batch.label_tokens).backward()
    return [flat(runtime) * batch.label_tokens for runtime in (first, last)]


@pytest.mark.parametrize("codec", ["random:keep=0.5", "spectral:bits=1", "leading:keep=0.25"])
def test_gradients_are_multiplied_by_the_adjoint_when_the_run_says_so(codec: str) -> None:
    found: dict[bool, list[torch.Tensor]] = {}
    for exact in (False, True):
        run = masked_run(codec, "dense32", exact_adjoint=exact, boundary={})
        runtimes = using(run, fitted_prior())
        work = works(make_batch(1, labels=0.7), 2)
        there(runtimes, work)
        back(runtimes, work)
        found[exact] = [flat(runtime) for runtime in runtimes]
        expected = in_one_process(run, fitted_prior(), work[0], exact)
        for got, want in zip(found[exact], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    # Behind the boundary nothing is masked; before it the two differ much.
    assert torch.equal(found[False][1], found[True][1])
    assert float((found[False][0] - found[True][0]).norm() / found[True][0].norm()) > 0.05


# ---- the taking end of a link -------------------------------------------------------------------------------------


@dataclass
class Source:
    """A peer's priors, and where it fetches others: `others` by name, each after `delay_s`."""

    root: Path
    boundaries: int = 1
    keep: int = 3
    delay_s: float = 1.0
    others: dict[bytes, bytes] = field(default_factory=dict)
    asked: list[tuple[int, str, bytes]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self._bundles = BundleStore(self.root / "bundles")
        self.store = PriorStore(self._bundles, HIDDEN, RANK, self.boundaries, self.keep)

    def offer(self, *priors: BoundaryPrior) -> None:
        """Let them be fetched."""
        self.others |= {prior.name: prior.to_bytes() for prior in priors}

    async def fetch(self, stage: int, peer: str, name: bytes) -> BoundaryPrior:
        self.asked.append((stage, peer, name))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            if name not in self.others:
                raise NetworkError("nobody has it")
            data = self.others[name]
            await asyncio.to_thread(self._bundles.write, bundle_of(name), {PRIOR: data}, {})
            return await self.store.take(name, stage)
        finally:
            self.running -= 1

    @property
    def held(self) -> list[bytes]:
        return sorted(self.store._held.elements())


def another(number: int, boundary: int = 0) -> BoundaryPrior:
    """The same prior under another name."""
    return replace(fitted_prior(), measured=number, boundary=boundary, name=b"").sealed()


@cache
def microbatch(named: bool = True) -> tuple[pb.Offer, bytes]:
    """A true offer of hop 1, and its payload. named: under the prior; else it fits any run."""
    first = using(RUN, fitted_prior() if named else None)[0]
    work = works(make_batch(1), 1)[0]
    frame = forward(first, 0, work)
    id = pb.MicrobatchId(origin="origin")
    return pb.Offer(id=id, hop=1, batch=work.wire, hidden=frame.header), frame.payload


def naming(name: bytes, sequence: int = 0) -> pb.LinkMessage:
    """An offer of a microbatch that names some prior."""
    message = numbered(microbatch()[0], sequence)
    message.offer.hidden.prior = name
    return message


async def ended(net: MemoryNetwork, run: ResolvedRun, message: pb.LinkMessage) -> None:
    """Send what ends a link."""
    async with evil(net, run) as duplex:
        await duplex.send(message)
        await replies(duplex, 1)


def notice(name: bytes) -> pb.LinkMessage:
    return pb.LinkMessage(prior=pb.PriorNotice(boundary=0, prior=name))


def kinds(messages: list[pb.LinkMessage]) -> list[str | None]:
    return [message.WhichOneof("body") for message in messages]


NO_PRIOR, DROP, ACCEPTED = pb.Answer.VERDICT_NO_PRIOR, pb.Answer.VERDICT_DROP, pb.Answer.VERDICT_ACCEPTED


def test_a_microbatch_whose_prior_is_not_here_is_taken_once_it_was_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        source, name = Source(tmp_path), fitted_prior().name
        source.offer(fitted_prior())
        _, payload = microbatch()
        async with taker(RUN, source.store, source.fetch) as (t, net), evil(net, RUN) as duplex:
            for sequence in range(3):
                await duplex.send(naming(name, sequence))
            answers = await replies(duplex, 3)
            assert [m.answer.verdict for m in answers] == [NO_PRIOR] * 3
            assert VirtualClock().monotonic() == 0  # the fetch is not waited for
            assert t.intake.held == 0
            told, credit = await replies(duplex, 2)
            assert told.prior == pb.PriorNotice(boundary=0, prior=name)
            assert credit.HasField("credit")
            assert VirtualClock().monotonic() == pytest.approx(source.delay_s)
            assert source.asked == [(0, "evil", name)]
            assert (t.metrics.value("offers_no_prior"), t.metrics.value("priors_fetched")) == (3, 1)
            # One that was sent away may come again as it was, or under a new id.
            for sequence in (0, 9):
                offer = naming(name, sequence)
                for message in [offer, *chunks_of(offer.offer.id, payload)]:
                    await duplex.send(message)
                answer, gradient, chunk = await replies(duplex, 3)
                assert answer.answer.verdict == ACCEPTED
                assert said(Frame(gradient.gradient.gradient, chunk.chunk.data)) == (SPECTRAL, name)
            assert t.runtime.optimizer.tokens == 2 * ROWS * TOKENS
            assert len(source.asked) == 1

    run_virtual(main())


def test_a_notice_of_a_prior_that_is_here_is_answered_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        await source.store.put(fitted_prior().to_bytes())
        async with taker(RUN, source.store, source.fetch) as (_, net), evil(net, RUN) as duplex:
            for _ in range(3):
                await duplex.send(notice(fitted_prior().name))
            assert [m.prior.prior for m in await replies(duplex, 3)] == [fitted_prior().name] * 3
            assert source.asked == []
            assert source.held == [fitted_prior().name]

    run_virtual(main())


@pytest.mark.parametrize("how", ["of another boundary", "too short", "too long", "where none are taken"])
def test_a_prior_that_frames_cannot_name_is_refused(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        run = masked_run("int8", "int8") if how == "where none are taken" else RUN
        source = Source(tmp_path, boundaries=2)
        elsewhere = another(0, boundary=1)
        await source.store.put(elsewhere.to_bytes())
        name = {
            "of another boundary": elsewhere.name,
            "too short": bytes(31),
            "too long": bytes(10**6),
            "where none are taken": bytes(32),
        }[how]
        good, payload = microbatch(named=False)
        async with taker(run, source.store, source.fetch) as (t, net):
            async with evil(net, run) as duplex:
                bad = numbered(good, 0)
                bad.offer.hidden.prior = name
                await duplex.send(bad)
                (answer,) = await replies(duplex, 1)
                assert answer.answer.verdict == DROP
                assert "prior" in answer.answer.reason
                assert len(answer.answer.reason) < 300
                assert t.metrics.value("offers_refused") == 1
                # The link goes on.
                for message in [numbered(good, 1), *chunks_of(numbered(good, 1).offer.id, payload)]:
                    await duplex.send(message)
                assert kinds(await replies(duplex, 3)) == ["answer", "gradient", "chunk"]
            with pytest.raises((MismatchError, LinkLost), match="prior"):
                await ended(net, run, notice(name))
            assert len(t.refused) == 1
            assert "prior" in t.refused[0]
            assert source.asked == source.held == []

    run_virtual(main())


def test_a_fetched_prior_of_another_boundary_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        source, elsewhere = Source(tmp_path, boundaries=2), another(0, boundary=1)
        source.offer(elsewhere)
        async with taker(RUN, source.store, source.fetch) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(naming(elsewhere.name))
            assert (await replies(duplex, 1))[0].answer.verdict == NO_PRIOR
            with pytest.raises(TimeoutError):
                await replies(duplex, 1)
            assert source.held == []
            assert t.metrics.value("priors_fetched") == 0
            assert len(source.store) == 0
            await duplex.send(naming(elsewhere.name, 1))
            assert (await replies(duplex, 1))[0].answer.verdict == NO_PRIOR

    run_virtual(main())
    (record,) = (each for each in caplog.records if each.getMessage() == "prior_not_fetched")
    assert record.levelno == logging.WARNING


def test_a_fetch_that_failed_is_not_repeated_for_10_s_however_many_offers_come(tmp_path: Path) -> None:
    async def main() -> None:
        source = Source(tmp_path, delay_s=0.0)
        clock = VirtualClock()
        async with taker(RUN, source.store, source.fetch) as (t, net), evil(net, RUN) as duplex:
            for second in range(10):
                for number in range(50):
                    await duplex.send(naming(bytes([second] * 32), 100 * second + number))
                    await duplex.send(notice(bytes([number] * 32)))
                answers = await replies(duplex, 50)
                assert {m.answer.verdict for m in answers} == {NO_PRIOR}
                await clock.sleep(0.99)
            assert len(source.asked) == 1
            assert t.intake.held == 0
            await clock.sleep(0.2)
            source.offer(fitted_prior())
            await duplex.send(naming(fitted_prior().name, 5000))
            assert kinds(await replies(duplex, 3)) == ["answer", "prior", "credit"]
            assert len(source.asked) == 2

    run_virtual(main())


def test_a_neighbour_that_names_ever_more_priors_has_two_of_them_kept_and_one_fetched_at_a_time(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        source = Source(tmp_path, keep=1)
        priors = [another(number) for number in range(8)]
        source.offer(*priors)
        async with taker(RUN, source.store, source.fetch) as (_, net):
            async with evil(net, RUN) as duplex:
                # A thousand at once: the first, and what was named last.
                await duplex.send(notice(priors[0].name))
                for number in range(1000):
                    await duplex.send(notice(number.to_bytes(32, "big")))
                await duplex.send(notice(priors[1].name))
                told = await replies(duplex, 2)
                assert [m.prior.prior for m in told] == [priors[0].name, priors[1].name]
                assert [name for _, _, name in source.asked] == [priors[0].name, priors[1].name]
                # One after the other.
                for prior in priors[2:]:
                    await duplex.send(notice(prior.name))
                    assert (await replies(duplex, 1))[0].prior.prior == prior.name
                    assert len(source.held) == 2
                    assert len(source.store) == 2
                assert source.held == sorted(prior.name for prior in priors[-2:])
                assert source.most == 1
            await asyncio.sleep(0.1)
            assert source.held == []

    run_virtual(main())


@pytest.mark.parametrize("how", ["closed", "refused", "cut"])
def test_priors_are_let_go_when_the_link_ends_and_a_fetch_under_way_with_them(
    tmp_path: Path, how: str
) -> None:
    async def main() -> None:
        source = Source(tmp_path)
        source.offer(fitted_prior(), fitted_prior(500))
        async with taker(RUN, source.store, source.fetch) as (_, net):
            try:
                async with evil(net, RUN) as duplex:
                    await duplex.send(notice(fitted_prior().name))
                    await replies(duplex, 1)
                    assert source.held == [fitted_prior().name]
                    source.delay_s = 1000.0
                    await duplex.send(notice(fitted_prior(500).name))
                    await asyncio.sleep(0.1)
                    assert source.running == 1
                    if how == "refused":
                        await duplex.send(pb.LinkMessage())
                        await replies(duplex, 1)
                    elif how == "cut":
                        net.cut("evil:1", "taker:1")
            except MeshdError:
                assert how != "closed"
            await asyncio.sleep(0.1)
            assert source.held == []
            assert source.running == 0

    run_virtual(main())


def test_a_microbatch_that_is_under_way_keeps_its_prior_whatever_is_named_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        source, name = Source(tmp_path, keep=1), fitted_prior().name
        later = [another(number) for number in (5, 6, 7)]
        source.offer(fitted_prior(), *later)
        offer, payload = microbatch()
        async with taker(RUN, source.store, source.fetch) as (t, net), evil(net, RUN) as duplex:
            await duplex.send(notice(name))
            await duplex.send(pb.LinkMessage(offer=offer))
            await replies(duplex, 3)
            await duplex.send(numbered(offer, 1))
            assert (await replies(duplex, 1))[0].answer.verdict == ACCEPTED
            for prior in later:
                await duplex.send(notice(prior.name))
                await replies(duplex, 1)
            assert source.store.get(name) is None
            for message in chunks_of(numbered(offer, 1).offer.id, payload):
                await duplex.send(message)
            gradient, _ = await replies(duplex, 2)
            assert gradient.gradient.gradient.prior == name
            assert t.runtime.optimizer.tokens == ROWS * TOKENS

    run_virtual(main())


# ---- the sending end ----------------------------------------------------------------------------------------------


def test_a_replica_that_cannot_get_the_prior_gets_a_safe_frame_after_10_s(tmp_path: Path) -> None:
    async def main() -> None:
        source, clock = Source(tmp_path, delay_s=0.0), VirtualClock()
        async with (
            taker(RUN, source.store, source.fetch) as (t, net),
            sender(RUN, net, fitted_prior()) as s,
        ):
            net.tap = frames = Headers()
            assert isinstance(await s.send(), Passed)
            assert 10 <= clock.monotonic() < 15
            assert frames.named[:-1] == [(SPECTRAL, fitted_prior().name)] * (len(frames.named) - 1)
            assert frames.named[-1] == ("int8", b"")
            assert s.stage.metrics.value("microbatches_safe") == 1
            assert t.runtime.optimizer.tokens == s.tokens == ROWS * TOKENS
            # It got the prior meanwhile: the first try of the next one is what has it fetched.
            source.offer(fitted_prior())
            await clock.sleep(10)
            assert isinstance(await s.send(), Passed)
            assert frames.named[-1] == (SPECTRAL, fitted_prior().name)
            assert s.stage.metrics.value("microbatches_safe") == 1
            assert s.corrupt == t.metrics.value("dropped_corrupt") == 0

    run_virtual(main())


@dataclass
class Headers:
    """A tap that notes what offers say of their frames."""

    named: list[tuple[str, bytes]] = field(default_factory=list)

    def __call__(self, source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.LinkMessage) and message.HasField("offer"):
            self.named.append((message.offer.hidden.codec, message.offer.hidden.prior))
        return [Delivery(message)]


def test_one_that_says_that_a_safe_frame_lacks_a_prior_is_left_alone(tmp_path: Path) -> None:
    """A microbatch must not be made anew for it for ever, however often it says that there is room."""

    class Liar:
        offers = 0

        async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
            async for message in duplex:
                if message.HasField("offer"):
                    self.offers += 1
                    answer = pb.Answer(id=message.offer.id, hop=1, verdict=NO_PRIOR)
                    await duplex.send(pb.LinkMessage(answer=answer))
                    await duplex.send(pb.LinkMessage(credit=pb.Credit(places=1)))

    async def main() -> None:
        async with MemoryNetwork(VirtualClock()) as net:
            liar = Liar()
            net.register("taker:1", liar)  # type: ignore[arg-type]
            net.set_delay("first:1", "taker:1", 0.1)
            async with sender(RUN, net, fitted_prior()) as s:
                result = await s.send()
                assert isinstance(result, Dropped)
                assert result.reason == pb.Drop.REASON_NO_ROUTE
                assert VirtualClock().monotonic() < 90
                assert s.stage.metrics.value("microbatches_safe") < 3
                assert liar.offers < 200

    run_virtual(main())
