"""What a peer says of the swarm when asked: also of those who have gone, and without end of neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from meshd.observe.metrics import Metrics
from meshd.peer import status
from meshd.peer.directory import Self
from meshd.peer.status import StatusBoard
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual


class Others:
    """A directory and a transport: peers by name, each with losses at some times."""

    def __init__(self) -> None:
        self.losses: dict[str, list[int]] = {}
        self.registry = SimpleNamespace(problem="")
        self.counter = SimpleNamespace(total=0)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []

    @property
    def peers(self) -> list[pb.Record]:
        return [pb.Record(peer_id=name, address=name) for name in self.losses]

    async def status(self, address: str, request: pb.StatusRequest) -> pb.StatusReply:
        points = [pb.LossPoint(time=time, tokens=time, loss=1.0) for time in self.losses[address]]
        return pb.StatusReply(losses=points, evaluations=points[:1])


def test_losses_of_peers_that_went_stay_and_are_bounded_however_many_went(monkeypatch: Any) -> None:
    monkeypatch.setattr(status, "_MAX_LOSSES", 10)

    async def main() -> None:
        clock, others = VirtualClock(), Others()
        me = Self(peer_id="me", name="me", role=pb.ROLE_SEED, run_id="r", incarnation=1)
        board = StatusBoard(me, clock, Metrics(clock))
        board.directory = cast(Any, others)
        board.transport = cast(Any, others)
        for number in range(30):
            others.losses = {f"p{number}": [10 * number + i for i in range(3)]}
            reply = await board.answer(pb.StatusRequest(swarm=True))
            newest = sorted(10 * n + i for n in range(number + 1) for i in range(3))[-10:]
            assert [point.time for point in reply.losses] == newest
            assert len(board._heard) == 1
            assert len(board._gone.losses) <= 10
            assert len(board._gone.evaluations) <= 10
        # One that comes back says again what it had said: it counts once.
        others.losses = {"p29": [290, 291, 292], "p28": [280, 281, 282]}
        reply = await board.answer(pb.StatusRequest(swarm=True))
        assert [point.time for point in reply.losses] == newest

    run_virtual(main())
