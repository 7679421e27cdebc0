"""Facts of a bundle are what a peer wrote: a wrong one costs that bundle, not the peer that joins."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshd.errors import MismatchError
from meshd.peer import join
from meshd.peer.join import Supply
from meshd.peer.loading import _newest_state
from meshd.state.bundle import BundleStore
from meshd.state.manifest import Manifest
from meshd.transport.base import NotHere

WRONG = ["7", [7], {}, None, True, 1.0, -1, 1 << 63]


@pytest.mark.parametrize("value", WRONG)
def test_a_fact_that_is_no_count_is_named(value: object) -> None:
    with pytest.raises(MismatchError, match=r"live/0: fact weight_version"):
        Manifest("live/0", (), {"weight_version": value}).count("weight_version")


def test_counts_are_read_and_absent_ones_are_0() -> None:
    manifest = Manifest("live/0", (), {"tokens": (1 << 63) - 1})
    assert (manifest.count("tokens"), manifest.count("weight_version")) == ((1 << 63) - 1, 0)


@pytest.mark.parametrize("fact", ["weight_version", "tokens"])
async def test_a_joiner_goes_on_without_the_state_that_has_wrong_facts(
    fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live bundle and the snapshot are both wrong: what is left is the base model."""
    store = BundleStore(tmp_path)

    async def fetch(name: str, *rest: Any, **named: Any) -> Manifest:
        return store.write(name, {"f": b"x"}, {fact: ["wrong"]})

    class Lister:
        async def list_bundles(self, address: str, request: object) -> Any:
            return SimpleNamespace(bundles=["snapshot/1/64"])

    monkeypatch.setattr(join, "fetch_bundle", fetch)
    peer = SimpleNamespace(address="a", weight_version=9)
    directory = SimpleNamespace(stage_peers=lambda stage: [peer], donors=lambda stage: ["a"])
    run = SimpleNamespace(run_id="r", spec=SimpleNamespace(stop_tokens=100))
    parts = cast(list[Any], [run, store, directory, Lister(), None])
    supply = Supply(*parts, random.Random(0))
    assert await _newest_state(supply, 1) is None
    for name in ("live/1", "snapshot/1/64"):
        with pytest.raises(NotHere):
            store.manifest(name)
