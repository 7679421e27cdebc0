"""An anchor's codec prior at a sender: taken when it is newer, once the neighbours have it, and left when it is no
good."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from priors_helpers import FEATURES, HIDDEN, boundary_tokens, made_prior
from test_pipeline_crossing import Maker, Neighbour, linked, opened

from meshd.anchor.users import Codecs
from meshd.errors import MismatchError
from meshd.pipeline.crossing import Crossing
from meshd.priors.boundary import BoundaryPrior, Packed
from meshd.priors.store import PRIOR, bundle_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.state.bundle import BundleStore
from meshd.wire import CodecContext


class Scene:
    """An author of boundary 1 and what brings anchors' priors to it."""

    def __init__(self, root: Path) -> None:
        self.maker = Maker(opened(root))
        self.bundles = BundleStore(root / "bundles")
        self.barred: list[str] = []
        self.counted = 10**9
        self.codecs = Codecs(
            self.maker.crossing, HIDDEN, self.maker.store, self.maker.author.adopt,
            lambda: self.counted, lambda author, reason: self.barred.append(author),
        )  # fmt: skip

    async def bring(self, prior: BoundaryPrior, author: str = "anchor", measured: int | None = None) -> bytes:
        """As the relay does it: the file first."""
        data = prior.to_bytes()
        name = hashlib.sha256(data).digest()
        self.bundles.write(bundle_of(name), {PRIOR: data}, {})
        at = prior.measured if measured is None else measured
        await self.codecs.take(pb.Notice(name=name, number=1, measured=at, author=author), data)
        return name


def test_a_newer_one_is_used_once_the_neighbours_have_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with linked(Neighbour(delay_s=7.0)) as links, asyncio.TaskGroup() as tasks:
            s = Scene(tmp_path)
            s.maker.links.extend(links)
            running = tasks.create_task(s.codecs.run())
            name = await s.bring(made_prior(1, 50))
            await asyncio.sleep(5)
            assert s.maker.used == b""
            await asyncio.sleep(5)
            assert s.maker.used == name
            assert s.maker.metrics.value("priors_used") == 1
            # Older, and as old.
            await s.bring(made_prior(1, 40, seed=1))
            await s.bring(made_prior(1, 50))
            await asyncio.sleep(30)
            assert s.maker.used == name
            assert s.maker.metrics.value("priors_used") == 1
            # Of several, the newest only.
            await s.bring(made_prior(1, 60, seed=2))
            newest = await s.bring(made_prior(1, 70, seed=3))
            await s.bring(made_prior(1, 65, seed=4))
            await asyncio.sleep(60)
            assert s.maker.used == newest
            assert s.maker.metrics.value("priors_fitted") == 0
            running.cancel()

    run_virtual(main())


def test_what_the_sender_measured_gives_way_to_what_has_come_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        async with linked(Neighbour(delay_s=5.0)) as links, asyncio.TaskGroup() as tasks:
            s = Scene(tmp_path)
            s.maker.links.extend(links)
            running = tasks.create_task(s.codecs.run())
            name = await s.bring(made_prior(1, 50))
            await asyncio.sleep(1)
            await s.maker.publish(measured=60)
            assert s.maker.used == name
            assert s.maker.metrics.value("priors_fitted") == 0
            # Once it is worn, the sender makes its own, and an anchor's newer one comes after that.
            await s.maker.publish(seed=5, measured=80)
            assert s.maker.used not in (b"", name)
            later = await s.bring(made_prior(1, 90, seed=6))
            await asyncio.sleep(20)
            assert s.maker.used == later
            running.cancel()

    run_virtual(main())


def test_others_that_are_dated_ahead_do_not_keep_a_sender_from_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        s = Scene(tmp_path)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(s.codecs.run())
            for n in range(4):
                await s.bring(made_prior(1, 1000 + n, seed=n), "liar")
                await asyncio.sleep(2)
            s.maker.crossing.measure()  # the last one was given up
            await s.maker.publish(seed=5, measured=80)
            assert s.maker.metrics.value("priors_fitted") == 1
            own = s.maker.used
            assert own != b""
            honest = await s.bring(made_prior(1, 90, seed=6))
            await asyncio.sleep(2)
            assert s.maker.used == honest
            running.cancel()

    run_virtual(main())


def test_one_that_is_dated_ahead_does_not_shut_out_one_that_is_not(tmp_path: Path) -> None:
    """Neither what is used, nor what waits, nor what is kept goes by what an author says of the future."""

    async def main() -> None:
        async with linked(Neighbour(delay_s=1.0)) as links, asyncio.TaskGroup() as tasks:
            s = Scene(tmp_path)
            s.maker.links.extend(links)
            s.counted = 100
            running = tasks.create_task(s.codecs.run())
            liar = await s.bring(made_prior(1, 50_000), "liar")
            await asyncio.sleep(10)
            assert s.maker.used == liar
            s.counted = 200
            honest = await s.bring(made_prior(1, 150), "honest")
            await asyncio.sleep(10)
            newest = s.maker.store.newest(1)
            assert newest is not None
            assert newest.name == s.maker.used == honest
            running.cancel()

    run_virtual(main())


def test_a_file_that_says_something_else_than_its_notice_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        s = Scene(tmp_path)
        with pytest.raises(MismatchError):
            await s.bring(made_prior(1, 50), measured=10)
        with pytest.raises(MismatchError):
            await s.bring(made_prior(0, 50))
        with pytest.raises(MismatchError):
            await s.codecs.take(pb.Notice(name=hashlib.sha256(b"x").digest(), number=1), b"x")
        assert len(s.maker.store) == 0

    run_virtual(main())


def send(crossing: Crossing, frames: int) -> None:
    for seed in range(frames):
        h, _, ids = boundary_tokens(32, seed)
        context = CodecContext(1, "forward", ids[None], seed, crossing.prior, FEATURES)
        crossing.check(crossing.draft(h[None], context), h[None], context)


def useless(prior: BoundaryPrior) -> BoundaryPrior:
    """Valid, and decodes to something else."""
    decode = prior.forward.packed_decode
    assert decode is not None
    turned = Packed(-decode.values.flip(0), decode.rows, decode.columns)
    return replace(
        prior,
        forward=replace(prior.forward, packed_decode=turned),
        predictor=torch.zeros_like(prior.predictor),
        name=b"",
    ).sealed()


@pytest.mark.parametrize("before", [True, False], ids=["good before", "none before"])
def test_a_liars_prior_is_left_after_a_few_frames_and_its_author_barred(before: bool, tmp_path: Path) -> None:
    async def main() -> None:
        s = Scene(tmp_path)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(s.codecs.run())
            if before:
                good = await s.bring(made_prior(1, 10))
                await asyncio.sleep(2)
                send(s.maker.crossing, 16 * 8)
                assert s.maker.used == good
            bad = await s.bring(useless(made_prior(1, 20, seed=1)), "liar")
            await asyncio.sleep(2)
            assert s.maker.used == bad
            send(s.maker.crossing, 16 * 8)
            assert s.maker.used == b""
            await asyncio.sleep(2)
            assert s.barred == ["liar"]
            next_one = await s.bring(made_prior(1, 30, seed=2))
            await asyncio.sleep(2)
            send(s.maker.crossing, 16 * 8)
            assert s.maker.used == next_one
            await asyncio.sleep(2)
            assert s.barred == ["liar"]
            running.cancel()

    run_virtual(main())


def test_a_liar_that_brings_one_after_the_other_is_found_out(tmp_path: Path) -> None:
    async def main() -> None:
        s = Scene(tmp_path)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(s.codecs.run())
            await s.bring(made_prior(1, 10))
            await asyncio.sleep(2)
            send(s.maker.crossing, 16 * 8)
            for n in range(4):
                await s.bring(useless(made_prior(1, 20 + n, seed=1 + n)), "liar")
                await asyncio.sleep(2)
                send(s.maker.crossing, 16 * 6)
                await asyncio.sleep(2)
            assert "liar" in s.barred
            running.cancel()

    run_virtual(main())
