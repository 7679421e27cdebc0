"""What a peer announces of itself."""

from __future__ import annotations

from typing import Any, cast

from meshd.optim.schedule import TokenCounter
from meshd.peer.directory import Directory, Self
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual


class Registry:
    def __init__(self) -> None:
        self.announced: list[pb.Record] = []

    async def announce(self, record: pb.Record) -> None:
        self.announced.append(record)


def test_counts_of_more_origins_than_a_record_holds_are_announced_in_turn() -> None:
    """After long churn: who only reads records must learn of all that was committed all the same."""
    registry, counter, heard = Registry(), TokenCounter(), TokenCounter()
    for number in range(200):
        counter.advance(f"origin{number:03}", number + 1)

    async def main() -> None:
        me = Self(peer_id="me", name="me", role=pb.ROLE_STAGE, run_id="r", incarnation=1)
        directory = Directory(me, cast(Any, registry), counter, VirtualClock())
        for _ in range(8):
            await directory.announce()

    run_virtual(main())
    for record in registry.announced:
        assert len(record.committed) == 64
        assert record.ByteSize() < 10_000
        heard.merge(record.committed)
    assert heard.total == counter.total
