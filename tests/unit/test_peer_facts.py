"""Facts of a bundle are what a peer wrote: a wrong one costs that bundle, not the peer that joins."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshd.errors import MismatchError
from meshd.peer.join import Supply
from meshd.peer.loading import _states
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state.bundle import BundleStore
from meshd.state.manifest import FileEntry, Manifest
from meshd.state.stage_state import WEIGHTS

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
        theirs.write(name, {WEIGHTS: b"x"}, {"weight_version": 9, "tokens": 64, fact: ["wrong"]})
    if own:
        store.write("live/1", {WEIGHTS: b"own"}, {"weight_version": 3, "tokens": 24})

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

    run = SimpleNamespace(
        run_id="r", spec=SimpleNamespace(stop_tokens=100, snapshot=SimpleNamespace(every_tokens=64))
    )
    parts = cast(list[Any], [run, store, Directory(), Donor(), VirtualClock()])
    supply = Supply(*parts, random.Random(0))

    async def offered() -> list[str]:
        return [name async for name in _states(supply, 1)]

    assert run_virtual(offered()) == (["live/1"] if own else [])
    assert store.names() == (["live/1"] if own else [])
    assert not own or store.path("live/1", WEIGHTS).read_bytes() == b"own"


def test_states_come_best_first_and_invented_watermarks_are_not_asked_for(tmp_path: Path) -> None:
    """Anybody may name any: only those are fetched at which there can be a snapshot, and of these the newest few."""
    store, asked = BundleStore(tmp_path), list[str]()
    store.write("live/1", {WEIGHTS: b"own"}, {"weight_version": 3, "tokens": 200})

    class Donor:
        async def list_bundles(self, address: str, request: object) -> Any:
            return SimpleNamespace(bundles=[f"snapshot/1/{mark}" for mark in range(1, 6401)])

        async def manifest(self, address: str, request: Any) -> Any:
            asked.append(request.bundle)
            files = (FileEntry(WEIGHTS, 1, 1, (hashlib.sha256(b"x").digest(),)),)
            return Manifest(request.bundle, files, {"weight_version": 1, "tokens": 1}).to_proto()

        async def fetch(self, address: str, request: Any) -> Any:
            yield pb.FetchChunk(offset=0, data=b"x")

    class Directory:
        async def refresh(self) -> None: ...

        def stage_peers(self, stage: int) -> list[Any]:
            return []

        def donors(self, stage: int) -> list[str]:
            return ["a"]

        def everyone(self) -> list[str]:
            return ["a"]

    spec = SimpleNamespace(stop_tokens=6400, snapshot=SimpleNamespace(every_tokens=64))
    parts = cast(
        list[Any], [SimpleNamespace(run_id="r", spec=spec), store, Directory(), Donor(), VirtualClock()]
    )
    supply = Supply(*parts, random.Random(0))

    async def offered() -> list[str]:
        return [name async for name in _states(supply, 1)]

    newest = [f"snapshot/1/{mark}" for mark in range(6400, 6400 - 8 * 64, -64)]
    assert run_virtual(offered()) == [*newest, "live/1"]
    assert asked == newest
