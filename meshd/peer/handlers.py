"""The serving side of a daemon: gRPC calls, handed to the parts that answer them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from meshd import PROTOCOL_VERSION, __version__
from meshd.clock import Clock
from meshd.config.runspec import ResolvedRun
from meshd.errors import MismatchError, NetworkError
from meshd.observe.log import event
from meshd.peer.directory import Self
from meshd.peer.status import StatusBoard
from meshd.proto import meshd_pb2 as pb
from meshd.state.donor import Donor
from meshd.transport.base import Duplex

log = logging.getLogger(__name__)

MAX_SKEW_S = 3.0


class DaemonHandlers:
    """Implements `meshd.transport.base.Handlers`. Parts that are not there yet answer UNAVAILABLE with the state
    (C02); the daemon sets them as they come up."""

    def __init__(self, me: Self, clock: Clock, status: StatusBoard) -> None:
        self._me, self._clock, self._status = me, clock, status
        self.run: ResolvedRun | None = None
        self.donor: Donor | None = None
        self.serve_link: Callable[[Duplex[pb.LinkMessage]], Awaitable[None]] | None = None
        self.serve_gossip: Callable[[Duplex[pb.GossipMessage]], Awaitable[None]] | None = None
        self.serve_offer: Callable[[pb.PriorOffer], Awaitable[pb.PriorAnswer]] | None = None

    async def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        if request.protocol != PROTOCOL_VERSION:
            raise MismatchError(
                f"protocol {request.protocol} meets protocol {PROTOCOL_VERSION} of {self._me.name}: "
                "update the older meshd"
            )
        self._check_run(request.run_id)
        if request.wall_clock:
            report_skew(request.name, request.wall_clock - self._clock.time())
        me, directory = self._me, self._status.directory
        return pb.HelloReply(
            peer_id=me.peer_id,
            name=me.name,
            role=me.role,
            stage=me.stage,
            incarnation=me.incarnation,
            wall_clock=self._clock.time(),
            state=me.state,
            software=f"meshd {__version__}",
            record=directory.record() if directory is not None else None,
        )

    async def get_run(self, request: pb.GetRunRequest) -> pb.GetRunReply:
        self._check_run(request.run_id)
        assert self.run is not None
        return pb.GetRunReply(resolved_run=self.run.canonical())

    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return await self._status.answer(request)

    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        if self.serve_link is None:
            raise self._not_ready("serves no stage")
        await self.serve_link(duplex)

    async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
        if self.serve_gossip is None:
            raise self._not_ready("averages no stage")
        await self.serve_gossip(duplex)

    async def offer(self, request: pb.PriorOffer) -> pb.PriorAnswer:
        if self.serve_offer is None:
            raise self._not_ready("uses no priors")
        return await self.serve_offer(request)

    async def list_bundles(self, request: pb.ListRequest) -> pb.ListReply:
        return await self._donor().list_bundles(request)

    async def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        return await self._donor().manifest(request)

    def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        return self._donor().fetch(request)

    def _donor(self) -> Donor:
        if self.donor is None:
            raise self._not_ready("has no state to give")
        return self.donor

    def _check_run(self, run_id: str) -> None:
        if self.run is None:
            raise self._not_ready("does not know its run")
        if run_id != self.run.run_id:
            raise MismatchError(f"{self._me.name} serves run {self.run.run_id}, not {run_id[:40]!r}")

    def _not_ready(self, what: str) -> NetworkError:
        state = pb.PeerState.Name(self._me.state).removeprefix("PEER_STATE_").lower()
        return NetworkError(f"{self._me.name} is {state} and {what} yet")


def report_skew(name: str, skew_s: float) -> None:
    """Say so when a peer's clock is off: records would seem expired, or live too long."""
    if abs(skew_s) > MAX_SKEW_S:
        way = "ahead of" if skew_s > 0 else "behind"
        event(
            log,
            "clock_skew",
            level=logging.WARNING,
            peer=name,
            seconds=round(abs(skew_s), 1),
            problem=f"its clock is {way} this machine's. Fix: synchronise the clocks (NTP) of both",
        )
