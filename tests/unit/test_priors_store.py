"""The store of codec priors: what is kept, what is deleted, and what survives a restart."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path

import pytest
from priors_helpers import HIDDEN, RANK, made_prior

from meshd.errors import DataError, MismatchError
from meshd.priors.boundary import BoundaryPrior, most_bytes
from meshd.priors.store import PRIOR, PriorStore, bundle_of
from meshd.state.bundle import BundleStore
from meshd.transport.base import NotHere


@cache
def prior(measured: int, boundary: int = 1) -> BoundaryPrior:
    return made_prior(boundary, measured)


@pytest.fixture
def bundles(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "bundles")


def opened(bundles: BundleStore, keep: int = 2, boundaries: int = 3) -> PriorStore:
    return PriorStore(bundles, HIDDEN, RANK, boundaries, keep)


async def put(store: PriorStore, *measured: int, boundary: int = 1) -> None:
    for when in measured:
        made = prior(when, boundary)
        assert (await store.put(made.to_bytes())).name == made.name


def on_disk(bundles: BundleStore) -> set[str]:
    return {name for name in bundles.names() if name.startswith("prior/")}


async def test_what_was_put_is_found_now_and_after_a_restart(bundles: BundleStore) -> None:
    store = opened(bundles)
    await put(store, 1, 2)
    assert bundles.path(bundle_of(prior(1).name), PRIOR).read_bytes() == prior(1).to_bytes()
    again = opened(bundles)
    assert again.get(prior(1).name) is None
    await again.load()
    for found in (store, again):
        kept = found.get(prior(1).name)
        assert kept is not None
        assert kept.to_bytes() == prior(1).to_bytes()
        newest = found.newest(1)
        assert newest is not None
        assert newest.name == prior(2).name
        assert found.newest(0) is None
        assert found.get(bytes(32)) is None


async def test_the_newest_of_each_boundary_are_kept_whatever_the_order(bundles: BundleStore) -> None:
    store = opened(bundles)
    await put(store, 5, 9, 3, 7)
    await put(store, 1, boundary=0)
    kept = {prior(9).name, prior(7).name, prior(1, 0).name}
    assert {name for name in (prior(w).name for w in (3, 5, 7, 9)) if store.get(name)} == {
        prior(7).name,
        prior(9).name,
    }
    assert len(store) == 3
    assert on_disk(bundles) == {bundle_of(name) for name in kept}


async def test_a_held_prior_stays_until_it_is_released_as_often(bundles: BundleStore) -> None:
    store = opened(bundles)
    old = prior(1).name
    await put(store, 1)
    assert store.hold(old).name == store.hold(old).name == old
    await put(store, 2, 3, 4)
    assert store.get(old) is not None
    store.release(old)
    assert store.get(old) is not None
    assert bundle_of(old) in on_disk(bundles)
    store.release(old)
    assert store.get(old) is None
    await put(store, 5)
    assert on_disk(bundles) == {bundle_of(prior(w).name) for w in (4, 5)}


async def test_releasing_the_newest_keeps_it(bundles: BundleStore) -> None:
    store = opened(bundles)
    await put(store, 1)
    store.hold(prior(1).name)
    store.release(prior(1).name)
    assert store.get(prior(1).name) is not None


async def test_holds_must_match(bundles: BundleStore) -> None:
    store = opened(bundles)
    with pytest.raises(NotHere, match="prior 00000000"):
        store.hold(bytes(32))
    with pytest.raises(ValueError, match="not held"):
        store.release(bytes(32))
    await put(store, 1)
    with pytest.raises(ValueError, match="not held"):
        store.release(prior(1).name)


async def test_the_same_prior_twice_is_one(bundles: BundleStore) -> None:
    store = opened(bundles)
    data = prior(1).to_bytes()
    one, other = await asyncio.gather(store.put(data), store.put(data))
    assert one.name == other.name
    assert len(store) == len(on_disk(bundles)) == 1


async def test_what_is_no_prior_of_this_run_is_refused_and_not_stored(bundles: BundleStore) -> None:
    store = opened(bundles, boundaries=1)
    with pytest.raises(MismatchError, match="a prior of boundary 1; this run has 1"):
        await store.put(prior(1).to_bytes())
    with pytest.raises(MismatchError):
        await store.put(b"x" * 100)
    assert on_disk(bundles) == set()


async def test_a_fetched_bundle_is_taken_up(bundles: BundleStore) -> None:
    store = opened(bundles)
    name = prior(1).name
    with pytest.raises(NotHere):
        await store.take(name, 1)
    bundles.write(bundle_of(name), {PRIOR: prior(1).to_bytes()}, {})
    # One that is older than all that is kept stays for whoever fetched it to hold it.
    await put(store, 5, 6)
    assert (await store.take(name, 1)).name == name
    store.hold(name)
    await put(store, 7)
    assert store.get(name) is not None
    store.release(name)
    assert (await store.take(name, 1)).name == name  # still on the disk
    await put(store, 8)
    assert on_disk(bundles) == {bundle_of(prior(w).name) for w in (7, 8)}


@pytest.mark.parametrize("content", ["another", "noise", "large", "none"])
async def test_a_fetched_bundle_that_is_not_what_its_name_says_is_deleted(
    bundles: BundleStore, content: str
) -> None:
    store, name = opened(bundles), prior(1).name
    files = {
        "another": {PRIOR: prior(2).to_bytes()},
        "noise": {PRIOR: os.urandom(1000)},
        "large": {PRIOR: bytes(most_bytes(HIDDEN, RANK) + 1)},
        "none": {"other": b"x"},
    }[content]
    bundles.write(bundle_of(name), files, {})
    with pytest.raises(MismatchError):
        await store.take(name, 1)
    assert on_disk(bundles) == set()
    assert store.get(name) is None


async def test_what_is_damaged_on_the_disk_is_dropped_at_the_start(bundles: BundleStore) -> None:
    await put(opened(bundles), 1, 2)
    path = bundles.path(bundle_of(prior(1).name), PRIOR)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    bundles.write(bundle_of(bytes(32)), {PRIOR: b"noise"}, {})
    bundles.write("base/0", {"weights": b"w"}, {})
    store = opened(BundleStore(bundles.root))
    with pytest.raises(DataError, match="damaged"):
        await store.take(prior(1).name, 1)
    await store.load()
    assert len(store) == 1
    assert on_disk(bundles) == {bundle_of(prior(2).name)}
    assert "base/0" in bundles.names()


async def test_fewer_are_kept_after_a_restart_that_says_so(bundles: BundleStore) -> None:
    await put(opened(bundles, keep=3), 1, 2, 3)
    store = opened(bundles, keep=1)
    await store.load()
    assert len(store) == 1
    assert on_disk(bundles) == {bundle_of(prior(3).name)}


async def test_a_fetched_prior_of_another_boundary_is_deleted(bundles: BundleStore) -> None:
    """Kept, it could be the newest of a boundary that this peer is the author of."""
    store = opened(bundles)
    made = prior(2**60, boundary=2)
    bundles.write(bundle_of(made.name), {PRIOR: made.to_bytes()}, {})
    with pytest.raises(MismatchError, match="boundary 2 where one of 1"):
        await store.take(made.name, 1)
    assert store.newest(2) is None
    assert on_disk(bundles) == set()


async def test_what_is_only_fetched_does_not_pile_up_on_the_disk(bundles: BundleStore) -> None:
    store = opened(bundles, keep=1)
    for measured in range(6):
        made = prior(measured)
        bundles.write(bundle_of(made.name), {PRIOR: made.to_bytes()}, {})
        await store.take(made.name, 1)
        store.hold(made.name)
        store.release(made.name)
    assert len(store) == 1
    assert len(on_disk(bundles)) <= 2
