"""Facts of a bundle are what a peer wrote: a wrong one costs that bundle, not the peer that joins."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshd.errors import MismatchError
from meshd.peer.join import Supply
from meshd.peer.loading import _newest_state
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state.bundle import BundleStore
from meshd.state.manifest import Manifest

WRONG = ["7", [7], {}, None, True, 1.0, -1, 1 << 63]


@pytest.mark.parametrize("value", WRONG)
def test_a_fact_that_is_no_count_is_named(value: object) -> None:
    with pytest.raises(MismatchError, match=r"live/0: fact weight_version"):
        Manifest("live/0", (), {"weight_version": value}).count("weight_version")


def test_counts_are_read_and_absent_ones_are_0() -> None:
    manifest = Manifest("live/0", (), {"tokens": (1 << 63) - 1})
    assert (manifest.count("tokens"), manifest.count("weight_version")) == ((1 << 63) - 1, 0)


@pytest.mark.parametrize("fact", ["weight_version", "tokens"])
@pytest.mark.parametrize("own", [True, False])
def test_a_joiner_goes_on_without_the_state_that_has_wrong_facts(
    own: bool, fact: str, tmp_path: Path
) -> None:
    """The live bundle and the snapshot on offer are both wrong. Neither is transferred, and this peer's own state
    stays; where it has none, the base model is left."""
    store, theirs = BundleStore(tmp_path / "own"), BundleStore(tmp_path / "theirs")
    for name in ("live/1", "snapshot/1/64"):
        theirs.write(name, {"f": b"x"}, {"weight_version": 9, "tokens": 64, fact: ["wrong"]})
    if own:
        store.write("live/1", {"f": b"own"}, {"weight_version": 3, "tokens": 24})

    class Donor:
        async def list_bundles(self, address: str, request: object) -> Any:
            return SimpleNamespace(bundles=["snapshot/1/64"])

        async def manifest(self, address: str, request: Any) -> Any:
            return theirs.manifest(request.bundle).to_proto()

    class Directory:
        async def refresh(self) -> None: ...

        def stage_peers(self, stage: int) -> list[Any]:
            return [SimpleNamespace(address="a", weight_version=9)]

        def donors(self, stage: int) -> list[str]:
            return ["a"]

        def everyone(self) -> list[str]:
            return ["a"]

    run = SimpleNamespace(run_id="r", spec=SimpleNamespace(stop_tokens=100))
    parts = cast(list[Any], [run, store, Directory(), Donor(), VirtualClock()])
    supply = Supply(*parts, random.Random(0))
    assert run_virtual(_newest_state(supply, 1)) == ("live/1" if own else None)
    assert store.names() == (["live/1"] if own else [])
    assert not own or store.path("live/1", "f").read_bytes() == b"own"
