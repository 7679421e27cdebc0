"""What peers say of their snapshots is checked before it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from meshd.peer.seed import complete_watermarks
from meshd.peer.snapshots import watermarks_at
from meshd.proto import meshd_pb2 as pb

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
