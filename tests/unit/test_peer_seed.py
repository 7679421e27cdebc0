"""What a seed says of the snapshots that it cannot keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from meshd.errors import MeshdError, NetworkError, ResourceError
from meshd.peer.seed import SeedPeer


async def test_a_full_disk_is_no_longer_said_once_something_else_is_lacking() -> None:
    outcomes: list[MeshdError | None] = [
        ResourceError("full"),
        NetworkError("gone"),
        ResourceError("full"),
        None,
    ]

    class Supply:
        directory = SimpleNamespace(stage_peers=lambda stage: [])

        async def snapshot(self, stage: int, watermark: int, donors: list[str]) -> None:
            if (outcome := outcomes.pop(0)) is not None:
                raise outcome

    seed = SeedPeer(*cast(list[Any], [SimpleNamespace(stages=1), Supply(), None, None]))
    said = []
    while outcomes:
        kept = await seed._bring(64)
        said.append((kept, seed._problem))
    full = "no snapshot at 64 tokens: full"
    assert said == [(False, full), (False, ""), (False, full), (True, "")]
