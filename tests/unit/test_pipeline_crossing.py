"""What a peer sends over one boundary: which codec, when it measures, when a prior is worn, and how a new one reaches
the neighbours before it is used (DESIGN section 3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_helpers import make_run, opening
from priors_helpers import FEATURES, HIDDEN, RANK, boundary_stats, boundary_tokens, made_prior

from meshd.config.runspec import BoundarySpec, WireSpec
from meshd.errors import ResourceError
from meshd.observe.metrics import Metrics
from meshd.pipeline import author as author_module
from meshd.pipeline.author import Author
from meshd.pipeline.crossing import Crossing, Wear, needs_priors
from meshd.pipeline.downstream import Downstream
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state.bundle import BundleStore
from meshd.transport.base import Duplex
from meshd.transport.memory import MemoryNetwork
from meshd.wire import CodecContext, Draft
from meshd.wire.codec import Direction

FORWARD, BACKWARD = "spectral:bits=2", "spectral:bits=1"
PRIOR = made_prior(boundary=1)


def crossing_of(boundary: int = 1, **wire: Any) -> Crossing:
    values = {"forward": FORWARD, "backward": BACKWARD, "prior_tokens": 100, **wire}
    return Crossing(boundary, WireSpec(**values), FEATURES, HIDDEN)


def context_of(
    ids: torch.Tensor, prior: BoundaryPrior | None, direction: Direction = "forward"
) -> CodecContext:
    return CodecContext(1, direction, ids, 7, prior, FEATURES)


def codecs(crossing: Crossing) -> tuple[str, str]:
    """What a crossing writes there and back, with the prior that it has."""
    h, g, ids = (each[None] for each in boundary_tokens(8, seed=1))
    frames = [
        crossing.draft(tensor, context_of(ids, crossing.prior, direction)).frame().header
        for tensor, direction in ((h, "forward"), (g, "backward"))
    ]
    named = b"" if crossing.prior is None else crossing.prior.name
    assert [frame.prior for frame in frames] == [named, named]
    return frames[0].codec, frames[1].codec


def learn(crossing: Crossing, count: int, seed: int = 0, outliers: int = 0) -> Any:
    return crossing.learn(*boundary_tokens(count, seed, outliers))


# ---- which codec --------------------------------------------------------------------------------------------------


def test_codecs_that_need_no_prior_are_used_and_nothing_is_measured() -> None:
    wire = {"forward": "int4", "backward": "random:keep=0.5"}
    crossing = crossing_of(**wire, safe="dense32", prior_tokens=1)
    assert not crossing.adapts
    assert not needs_priors(WireSpec(**wire))
    for _ in range(2):
        assert codecs(crossing) == ("int4", "random:keep=0.5")
        assert learn(crossing, 1000) is None
        crossing.measure()


@pytest.mark.parametrize("needy", ["forward", "backward", "both"])
def test_until_there_is_a_prior_both_directions_use_the_safe_codec(needy: str) -> None:
    wire = {
        "forward": "dense" if needy == "backward" else FORWARD,
        "backward": "dense" if needy == "forward" else BACKWARD,
    }
    crossing = crossing_of(**wire, safe="int4")
    assert needs_priors(WireSpec(**wire))
    assert codecs(crossing) == ("int4", "int4")
    crossing.use(PRIOR)
    assert codecs(crossing) == (wire["forward"], wire["backward"])
    crossing.measure()
    assert codecs(crossing) == ("int4", "int4")


def test_a_boundary_may_have_codecs_of_its_own() -> None:
    masked = WireSpec(
        forward=FORWARD,
        backward=BACKWARD,
        boundary={0: BoundarySpec(forward="dense", backward="int8"), 2: BoundarySpec(forward="lloyd")},
    )
    plain = WireSpec(forward="int8", backward="int8", boundary={1: BoundarySpec(forward=FORWARD)})
    assert needs_priors(masked)
    assert needs_priors(plain)
    found = {
        (name, number): Crossing(number, wire, FEATURES, HIDDEN)
        for name, wire in (("masked", masked), ("plain", plain))
        for number in range(3)
    }
    adapting = {key for key, crossing in found.items() if crossing.adapts}
    assert adapting == {("masked", 1), ("masked", 2), ("plain", 1)}
    assert codecs(found["masked", 0]) == ("dense", "int8")
    assert codecs(found["plain", 1]) == ("int8", "int8")
    for key in adapting:
        found[key].use(PRIOR)
    assert codecs(found["masked", 1]) == (FORWARD, BACKWARD)
    assert codecs(found["masked", 2]) == ("lloyd", "dense")
    assert codecs(found["plain", 1]) == (FORWARD, "dense")


# ---- what is measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prior_tokens", "wanted"), [(100, 100), (1, HIDDEN)])
def test_statistics_come_once_when_they_are_enough(prior_tokens: int, wanted: int) -> None:
    crossing = crossing_of(prior_tokens=prior_tokens)
    for _ in range(2):
        assert learn(crossing, wanted - 1) is None
        # Outliers are left out of a prior, so they do not count.
        assert learn(crossing, 1, seed=5, outliers=1) is None
        stats = learn(crossing, 3, seed=2)
        assert (stats.tokens, stats.outliers) == (wanted + 2, 1)
        assert [learn(crossing, 10 * wanted) for _ in range(3)] == [None] * 3  # a prior is being made of them
        crossing.measure()  # none came of it


def test_with_a_prior_nothing_is_measured_and_what_was_counted_before_is_forgotten() -> None:
    crossing = crossing_of()
    assert learn(crossing, 99) is None
    crossing.use(PRIOR)
    assert learn(crossing, 1000) is None
    crossing.measure()
    assert crossing.prior is None
    assert learn(crossing, 99) is None
    assert learn(crossing, 1).tokens == 100


# ---- when a prior is worn -----------------------------------------------------------------------------------------

EVERY, CHECKS = 16, 8  # frames to a check, checks to an error
PER_FRAME = 40


def check(crossing: Crossing, tensor: torch.Tensor, ids: torch.Tensor, prior: BoundaryPrior | None) -> Draft:
    """One frame goes out."""
    context = context_of(ids, prior)
    draft = crossing.draft(tensor, context)
    crossing.check(draft, tensor, context)
    return draft


def frames(crossing: Crossing, count: int, strange: bool = False) -> int:
    """Send up to `count` frames, while there is a prior. Returns how many. strange: along other directions."""
    for number in range(count):
        if crossing.prior is None:
            return number
        h, _, ids = boundary_tokens(PER_FRAME, seed=number)
        if strange:
            noise = torch.randn(h.shape, generator=torch.Generator().manual_seed(number))
            h = noise / noise.norm(dim=1, keepdim=True) * h.norm(dim=1, keepdim=True)
        check(crossing, h[None], ids[None], crossing.prior)
    return count


def test_a_worn_prior_is_given_up_after_64_times_its_tokens_and_then_it_is_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    crossing = crossing_of()
    crossing.use(PRIOR)
    assert frames(crossing, EVERY - 1) == EVERY - 1
    assert crossing.error is None
    assert frames(crossing, EVERY * CHECKS - EVERY + 1)
    fresh = crossing.error
    assert fresh is not None
    least = 64 * PRIOR.tokens
    sent = EVERY * CHECKS + frames(crossing, 10_000, strange=True)
    assert crossing.error > 1.25 * fresh
    # At the first check that is no sooner; eight checks of the new error would have been enough much earlier.
    assert sent == -(-least // (PER_FRAME * EVERY)) * EVERY
    assert sent > EVERY * 2 * CHECKS
    assert [record.getMessage() for record in caplog.records].count("prior_worn") == 1
    assert codecs(crossing) == ("int8", "int8")
    assert learn(crossing, 99) is None
    assert learn(crossing, 1).tokens == 100


def test_a_prior_of_a_source_that_stays_the_same_is_never_worn() -> None:
    crossing = crossing_of()
    crossing.use(PRIOR)
    assert frames(crossing, 2 * 64 * PRIOR.tokens // PER_FRAME) > EVERY * 2 * CHECKS
    assert crossing.prior is PRIOR
    assert learn(crossing, 1000) is None


def test_a_new_prior_is_judged_by_its_own_first_errors() -> None:
    """Not by those of the one before, which was apter for what it saw."""
    crossing = crossing_of()
    crossing.use(PRIOR)
    frames(crossing, EVERY * CHECKS)
    crossing.use(made_prior(boundary=1, seed=1))
    count = 64 * PRIOR.tokens // PER_FRAME + EVERY * CHECKS
    assert frames(crossing, count, strange=True) == count  # as strange from its first frame on
    assert crossing.prior is not None


def test_frames_with_the_safe_codec_or_another_prior_say_nothing_of_this_one() -> None:
    crossing = crossing_of()
    crossing.use(PRIOR)
    other = made_prior(boundary=1, seed=1)
    h, _, ids = (each[None] for each in boundary_tokens(PER_FRAME, seed=1))
    for _ in range(EVERY):
        assert check(crossing, h, ids, None).codec.name == "int8"
        check(crossing, h, ids, other)
    assert crossing.error is None


errors = st.floats(1e-6, 1e6)
shares = st.lists(st.floats(0, 1), min_size=CHECKS, max_size=60)


@given(least=errors, shares=shares)
def test_errors_within_the_factor_wear_nothing(least: float, shares: list[float]) -> None:
    wear = Wear()
    assert not any(wear.worn(least * (1 + 0.2499 * share)) for share in shares)


@given(most=errors, first=st.lists(st.floats(0, 1), min_size=CHECKS, max_size=CHECKS), later=shares)
def test_errors_that_stay_above_the_factor_wear_it_out_at_the_eighth(
    most: float, first: list[float], later: list[float]
) -> None:
    wear = Wear()
    assert not any(wear.worn(most * share) for share in first)
    found = [wear.worn(most * (1.2501 + share)) for share in later]
    assert found == [False] * (CHECKS - 1) + [True] * (len(later) - CHECKS + 1)


def test_one_bad_frame_does_not_wear_a_prior() -> None:
    wear = Wear()
    assert not any(wear.worn(error) for error in [1.0] * 20 + [2.9] + [1.0] * 20)


# ---- how a prior reaches the neighbours ---------------------------------------------------------------------------

RUN = make_run([2])


@dataclass
class Neighbour:
    """A replica of the next hop that has a prior so many seconds after it was told of it; None: never."""

    delay_s: float | None
    heard: list[pb.LinkMessage] = field(default_factory=list)

    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        async for message in duplex:
            self.heard.append(message)
            if message.WhichOneof("body") == "prior" and self.delay_s is not None:
                await asyncio.sleep(self.delay_s)
                await duplex.send(message)

    @property
    def told(self) -> list[bytes]:
        """The priors that it was told of."""
        return [message.prior.prior for message in self.heard if message.HasField("prior")]


def link_to(address: str, on_credit: Callable[[], None]) -> Downstream:
    return Downstream(opening(RUN.run_id).open, address, on_credit, lambda counts: None, lambda kept: None)


@asynccontextmanager
async def linked(*neighbours: Neighbour) -> AsyncIterator[list[Downstream]]:
    """A link to each neighbour."""
    async with MemoryNetwork(VirtualClock()) as net, asyncio.TaskGroup() as tasks:
        links, running = [], []
        for number, neighbour in enumerate(neighbours):
            net.register(f"{number}:1", neighbour)  # type: ignore[arg-type]
            link = link_to(f"{number}:1", lambda: None)
            links.append(link)
            running.append(tasks.create_task(link.run(net.transport("me:1"))))
        yield links
        for task in running:
            task.cancel()


def test_a_neighbour_is_told_of_each_prior_once_and_after_the_link_is_open() -> None:
    first, second = bytes(32), b"2" * 32

    async def main() -> None:
        neighbour = Neighbour(delay_s=1.0)
        async with linked(neighbour) as (link,):
            link.announce(first)  # not open yet
            link.announce(first)
            await asyncio.sleep(0.5)
            assert [message.WhichOneof("body") for message in neighbour.heard] == ["open", "prior"]
            assert neighbour.heard[1].prior.boundary == 0
            assert link.knows == b""
            await asyncio.sleep(1)
            assert link.knows == first
            link.announce(first)
            link.announce(second)
            await asyncio.sleep(0.5)
            assert (neighbour.told, link.knows) == ([first, second], first)
            await asyncio.sleep(1)
            assert link.knows == second
        assert link.lost is not None
        link.announce(first)  # nobody to tell

    run_virtual(main())


def test_what_a_neighbour_says_that_it_has_wakes_those_who_wait_and_is_bounded() -> None:
    woken: list[bytes] = []

    class Chatty:
        async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
            await duplex.send(pb.LinkMessage(prior=pb.PriorNotice(prior=b"x" * 10**6)))
            async for _ in duplex:
                pass

    async def main() -> None:
        async with MemoryNetwork(VirtualClock()) as net, asyncio.TaskGroup() as tasks:
            net.register("chatty:1", Chatty())  # type: ignore[arg-type]
            link = link_to("chatty:1", lambda: woken.append(link.knows))
            running = tasks.create_task(link.run(net.transport("me:1")))
            await asyncio.sleep(1)
            running.cancel()

    run_virtual(main())
    assert woken == [b"x" * 32]


def opened(root: Path, keep: int = 3) -> PriorStore:
    return PriorStore(BundleStore(root / "bundles"), HIDDEN, RANK, 3, keep)


@dataclass
class Maker:
    """An author of boundary 1's priors."""

    store: PriorStore
    links: list[Downstream] = field(default_factory=list)
    crossing: Crossing = field(default_factory=crossing_of)

    def __post_init__(self) -> None:
        clock = VirtualClock()
        self.metrics = Metrics(clock)
        links = {1: self.links}
        self.author = Author(
            self.store, [self.crossing], links.__getitem__, lambda: clock.sleep(1.0), clock, self.metrics
        )

    async def publish(self, seed: int = 0, measured: int = 0) -> None:
        self.crossing.measure()
        await self.author.publish(self.crossing, boundary_stats(200, seed), measured)

    @property
    def used(self) -> bytes:
        return b"" if self.crossing.prior is None else self.crossing.prior.name


def test_a_prior_is_used_once_all_neighbours_have_it(tmp_path: Path) -> None:
    async def main() -> None:
        quick, slow = Neighbour(delay_s=0.0), Neighbour(delay_s=7.0)
        async with linked(quick, slow) as links, asyncio.TaskGroup() as tasks:
            maker = Maker(opened(tmp_path), links[:1])
            tasks.create_task(maker.publish(measured=123))
            await asyncio.sleep(0.5)
            maker.links.append(links[1])  # a newcomer, while it spreads
            await asyncio.sleep(6.5)
            assert maker.used == b""
            assert maker.author.current(1) == b""
            await asyncio.sleep(3)
            assert maker.used == maker.author.current(1) != b""
            assert quick.told == slow.told == [maker.used]
            assert maker.metrics.value("priors_fitted") == 1
            prior = maker.store.get(maker.used)
            assert prior is not None
            assert (prior.boundary, prior.measured) == (1, 123)
            assert codecs(maker.crossing) == (FORWARD, BACKWARD)

    run_virtual(main())


def test_a_neighbour_that_does_not_get_it_is_waited_for_30_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with linked(Neighbour(delay_s=None), Neighbour(delay_s=0.0)) as links:
            maker = Maker(opened(tmp_path), links)
            clock = VirtualClock()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(maker.publish())
                await clock.sleep(29)
                assert maker.used == b""
            assert clock.monotonic() == pytest.approx(30, abs=1)
            assert maker.used != b""

    run_virtual(main())
    (record,) = (each for each in caplog.records if each.getMessage() == "prior_spreads_slowly")
    assert record.levelno == logging.WARNING


def test_with_no_neighbours_it_is_used_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        maker = Maker(opened(tmp_path))
        await maker.publish()
        assert maker.used != b""
        assert VirtualClock().monotonic() == 0

    run_virtual(main())


def test_a_replaced_prior_is_let_go(tmp_path: Path) -> None:
    async def main() -> None:
        maker = Maker(opened(tmp_path, keep=1))
        names = []
        for number in range(3):
            await maker.publish(seed=number, measured=number)
            names.append(maker.used)
        assert len(set(names)) == 3
        assert [maker.store.get(name) is not None for name in names] == [False, False, True]

    run_virtual(main())


def full(*_: object) -> None:
    raise ResourceError("the disk is full")


def exhausted(*_: object, **__: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("fault", ["full disk", "too few tokens", "no memory"])
def test_where_no_prior_comes_of_it_the_safe_codec_stays_and_it_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    async def main() -> None:
        maker = Maker(opened(tmp_path))
        stats = learn(maker.crossing, 100)
        with monkeypatch.context() as patch:
            if fault == "full disk":
                patch.setattr(BundleStore, "write", full)
            elif fault == "no memory":
                patch.setattr(author_module, "fit", exhausted)
            else:
                stats = boundary_stats(HIDDEN - 1)
            await maker.author.publish(maker.crossing, stats, 0)
        assert maker.used == maker.author.current(1) == b""
        assert len(maker.store) == 0
        assert maker.metrics.value("priors_fitted") == 0
        assert codecs(maker.crossing) == ("int8", "int8")
        again = learn(maker.crossing, 100)
        assert again.tokens == 100
        await maker.author.publish(maker.crossing, again, 0)
        assert maker.used != b""

    run_virtual(main())
    (record,) = (each for each in caplog.records if each.getMessage() == "no_prior")
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30, 3e38])
def test_a_boundary_of_any_size_ends_in_a_prior_or_in_measuring_again(tmp_path: Path, scale: float) -> None:
    """Gradients are what a neighbour says they are: none of them may end the sender."""

    async def main() -> None:
        for number in range(2):
            maker = Maker(opened(tmp_path / str(number)))
            h, g, ids = boundary_tokens(100, seed=0)
            most = max(float(h.abs().max()), float(g.abs().max()))
            tensors = (h, g / most * scale) if number else (h / most * scale, g)
            stats = maker.crossing.learn(*tensors, ids)
            assert stats is not None
            await maker.author.publish(maker.crossing, stats, 0)
            assert maker.used or learn(maker.crossing, 100)

    run_virtual(main())


def test_a_restart_takes_the_newest_prior_of_each_boundary_and_keeps_it(tmp_path: Path) -> None:
    async def main() -> None:
        before = opened(tmp_path)
        for boundary, measured in ((1, 5), (1, 9), (0, 20), (1, 7)):
            await before.put(made_prior(boundary, measured).to_bytes())
        store = opened(tmp_path, keep=1)
        await store.load()
        plain = crossing_of(0, forward="dense", backward="dense")
        maker = Maker(store)
        newest = made_prior(1, 9).name
        assert maker.used == maker.author.current(1) == newest
        assert codecs(maker.crossing) == (FORWARD, BACKWARD)
        assert learn(maker.crossing, 1000) is None
        Author(store, [plain], lambda boundary: [], lambda: asyncio.sleep(1), VirtualClock(), maker.metrics)
        assert plain.prior is None
        # A neighbour's newer one does not take it away.
        await store.put(made_prior(1, 99).to_bytes())
        assert store.get(newest) is not None
        assert maker.metrics.value("priors_fitted") == 0

    run_virtual(main())
