"""What peers say of their snapshots is checked before it is used."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save

from meshd.errors import DataError, MismatchError, NetworkError, ResourceError
from meshd.peer.seed import complete_watermarks
from meshd.peer.snapshots import read_part, watermarks_at
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.state.stage_state import write_stage

STOP = 1000
# Of these, only the watermarks 64 and STOP are ones that a run of STOP tokens can have.
LISTED = [
    "run/data",
    "snapshot/0/x",
    "snapshot/x/64",
    "snapshot/0/64/1",
    "snapshot/0/-3",
    f"snapshot/0/{STOP + 1}",
    "snapshot/0/" + "9" * 5000,
    "snapshot/0/64",
    f"snapshot/0/{STOP}",
    "snapshot/1/64",
]


class Lister:
    async def list_bundles(self, address: str, request: pb.ListRequest) -> pb.ListReply:
        assert request.run_id == "r"
        return pb.ListReply(bundles=LISTED)


async def test_names_that_are_not_ours_and_watermarks_past_the_end_are_passed_over() -> None:
    run = cast(Any, SimpleNamespace(run_id="r", spec=SimpleNamespace(stop_tokens=STOP)))
    assert await watermarks_at(["a"], 0, cast(Any, Lister()), run) == {64, STOP}
    assert complete_watermarks(LISTED, 2, STOP) == [64]
    assert complete_watermarks(LISTED, 1, STOP) == [64, STOP]


async def test_a_peer_that_refuses_to_list_has_none() -> None:
    """Its port may belong to a daemon of another run by now."""

    class Mixed(Lister):
        async def list_bundles(self, address: str, request: pb.ListRequest) -> pb.ListReply:
            if address == "other":
                raise MismatchError("works on run x")
            if address == "full":
                raise ResourceError("too many calls")
            return await super().list_bundles(address, request)

    run = cast(Any, SimpleNamespace(run_id="r", spec=SimpleNamespace(stop_tokens=STOP)))
    assert await watermarks_at(["other", "full", "a"], 1, cast(Any, Mixed()), run) == {64}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"v": torch.ones(2)}, "w is missing .*; v .* is not expected"),
        ({"w": torch.ones(3)}, r"w .*\[3\]"),
        ({"w": torch.tensor([1.0, math.nan])}, "w has values that are not finite"),
        ({"w": torch.tensor([1.0, math.inf])}, "w has values that are not finite"),
    ],
)
def test_c27_a_replicas_part_that_does_not_fit_or_is_not_finite_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    store = BundleStore(tmp_path)
    write_stage(store, "part/0/64", {"w": torch.ones(2)}, None, {})
    assert read_part(store, "part/0/64", {"w": torch.zeros(2)})["w"].tolist() == [1.0, 1.0]
    # What this software writes is finite: another's may not be.
    store.write("part/0/128", {"weights.safetensors": save(tensors)}, {})
    with pytest.raises((MismatchError, DataError), match=message):
        read_part(store, "part/0/128", {"w": torch.zeros(2)})


def test_a_part_without_weights_is_one_of_the_errors_that_the_leader_expects(tmp_path: Path) -> None:
    with pytest.raises(NetworkError):
        read_part(BundleStore(tmp_path), "part/0/64", {"w": torch.zeros(2)})
