"""The way from a peer to the next hop: links to its replicas, the choice among them, and sending again when it fails
(DESIGN sections 2.3 to 2.5)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from meshd import PROTOCOL_VERSION
from meshd.observe.log import event
from meshd.pipeline.author import Author
from meshd.pipeline.downstream import Cargo, Downstream, Passed, Result
from meshd.pipeline.dropped import Busy, Corrupt, Dropped, NoPrior, Refused
from meshd.pipeline.keeping import Debts
from meshd.pipeline.router import Router
from meshd.pipeline.runtime import Work
from meshd.pipeline.stage import Replica, Stage
from meshd.priors.stats import BoundaryStats
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import LinkLost
from meshd.wire import Frame

log = logging.getLogger(__name__)

# Without a replica of the next hop for so long, a microbatch goes back to its origin.
NO_ROUTE_S = 60.0
# All replicas that had room lacked the frame's prior for so long: it is encoded anew, without one.
_NO_PRIOR_S = 10.0
# How often those who wait for a route look again, should no event wake them.
_LOOK_S = 1.0


class Onward:
    """`run` must be running while `carry` is used.

    waiting_for: for people, what microbatches wait for; empty: nothing. author: of the priors that frames name. looks:
    called every second.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._router = Router(stage.rng)
        self._links: dict[tuple[str, int], Downstream] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._debts = Debts()
        self._lost: set[str] = set()  # those whose loss was told, as long as they are announced
        self._trips: set[_Trip] = set()
        # Set and replaced whenever a route may have opened: credit, a new replica, a link that came up.
        self._changed = asyncio.Event()
        self.waiting_for: str = ""
        self.looks: list[Callable[[], None]] = []
        crossings = stage.runtime.crossings
        self.author = Author(
            stage.around.priors,
            [crossings[hop.index] for hop in stage.runtime.model.hops if not hop.head],
            lambda boundary: [link for (_, hop), link in self._links.items() if hop == boundary + 1],
            self._soon,
            stage.clock,
            stage.metrics,
            stage.tracer,
        )

    async def run(self) -> None:
        """Own the links until cancelled."""
        told = 0
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                await self._stage.clock.sleep(_LOOK_S)
                self.wake()
                self._count_lost()
                self._stage.metrics.gauge("waiting_bytes", self.waiting_bytes())
                queued = sum(link.queued_bytes for link in self._links.values())
                self._stage.metrics.gauge("downstream_queued_bytes", queued)
                for look in self.looks:
                    look()
                if self._stage.counter.total > told:
                    told = self._stage.counter.total
                    counts = self._stage.counter.to_proto()
                    for link in list(self._links.values()):
                        link.progress(counts)

    def waiting_bytes(self, passing: bool = False) -> int:
        """Of frames that are not sent whole yet: they wait for a replica, or for its link. passing: of those only whose
        input came over a link."""
        return sum(
            len(trip.cargo.frame.payload)
            for trip in self._trips
            if trip.cargo.frame is not None and not (passing and trip.work.frame is None)
        )

    def _count_lost(self) -> None:
        """Peers that are neither announced nor linked have died or left, and took along what was not kept."""
        known = {
            replica.peer_id
            for hop in self._stage.runtime.model.hops
            if not hop.head
            for replica in self._stage.around.replicas(self._stage.hops[hop.index + 1].stage)
        }
        known |= {peer for peer, _ in self._links}
        self._router.forget(known, self._stage.clock.monotonic())
        self._debts.gone(known)
        self._lost &= known
        self._stage.metrics.gauge("lost_after_commit", self._debts.lost)

    def wake(self) -> None:
        """Routes may have changed: let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def measured(self, hop: int, stats: BoundaryStats) -> None:
        """Enough was measured of what a hop sends on for a prior: make one."""
        assert self._tasks is not None
        crossing, total = self._stage.runtime.crossings[hop], self._stage.counter.total
        self._tasks.create_task(self.author.publish(crossing, stats, total))

    def failed(self, peer_id: str) -> None:
        """A peer failed at what it took: leave it alone for a while."""
        self._router.failed(peer_id, self._stage.clock.monotonic())

    async def carry(
        self,
        hop: int,
        id: pb.MicrobatchId,
        work: Work,
        forward: Callable[[bool], Awaitable[Frame]],
        evaluate: int = 0,
    ) -> tuple[Result, str]:
        """Compute what `hop` is to get, find a replica of it, send, wait for the way back; elsewhere when that fails.

        Returns what came back, and the peer id that sent it.

        forward: makes the frame, with the safe codec when told; raises Dropped. evaluate: 0 to train, else a snapshot's
        watermark + 1.
        """
        trip = _Trip(hop, id.origin, id.sequence, id.attempt, work, evaluate, Cargo(await forward(False)))
        self._trips.add(trip)
        try:
            return await self._carry(trip, forward)
        finally:
            self._trips.remove(trip)

    async def _carry(self, trip: _Trip, forward: Callable[[bool], Awaitable[Frame]]) -> tuple[Result, str]:
        while True:
            replica = self._choose(trip)
            if replica is None:
                await self._wait_for_route(trip)
                continue
            if trip.cargo.frame is None:
                trip.cargo.frame = await _made(trip, forward(False))
                self._replayed(trip)
            try:
                return await self._attempt(trip, replica), replica.peer_id
            except NoPrior:
                now = self._stage.clock.monotonic()
                self._router.busy(replica.peer_id, now)
                trip.unprepared_since = trip.unprepared_since or now
                if now - trip.unprepared_since >= _NO_PRIOR_S:
                    trip.cargo.frame = await _made(trip, forward(True))
                    self._stage.metrics.count("microbatches_safe")
            except Busy:
                self._router.busy(replica.peer_id, self._stage.clock.monotonic())
                # There is a way, it is only full: that may last. Unless it was tried, and nobody could compute it.
                if not trip.failed:
                    trip.troubled_since = None
            except Refused as error:
                trip.refused[replica.peer_id] = str(error)
            except LinkLost as error:
                self._router.failed(replica.peer_id, self._stage.clock.monotonic())
                event(log, "resend", level=logging.DEBUG, peer=replica.name, hop=trip.hop, reason=str(error))
                # Once it was sent whole, how far it came is unknown: stages behind may have added it.
                self._again(trip, partial=trip.cargo.frame is None)
                # A new trouble, however long the peer had worked on it.
                trip.troubled_since = self._stage.clock.monotonic()
            except Dropped as dropped:
                if isinstance(dropped, Corrupt):
                    self._stage.metrics.count("dropped_corrupt")
                if dropped.reason == pb.Drop.REASON_FAILED:
                    # Memory is short there, for the next microbatch as well.
                    self._router.failed(replica.peer_id, self._stage.clock.monotonic())
                    trip.failed = dropped.text
                final = not dropped.retriable or self._given_up(trip)
                self._again(trip, dropped.partial)
                if final:
                    raise Dropped(dropped.reason, dropped.text, trip.partial) from dropped
                trip.refused[replica.peer_id] = dropped.text

    async def _attempt(self, trip: _Trip, replica: Replica) -> Result:
        """One offer to one replica, with the router's books kept."""
        began = self._stage.clock.monotonic()
        self._router.sent(replica.peer_id)
        assert trip.cargo.frame is not None
        size = len(trip.cargo.frame.payload)
        elapsed: float | None = None
        try:
            result = await self._link(replica, trip.hop).carry(self._offer(trip), trip.cargo)
            elapsed = self._stage.clock.monotonic() - began
            if isinstance(result, Passed):
                self._debts.returned(replica.peer_id, result.incarnation, result.addition)
            self._stage.metrics.count(
                "evaluation_sent_bytes" if trip.evaluate else "activation_sent_bytes", size
            )
            return result
        finally:
            if elapsed is None:
                self._router.abandoned(replica.peer_id)
            else:
                self._router.returned(replica.peer_id, elapsed, began + elapsed)

    def _again(self, trip: _Trip, partial: bool) -> None:
        trip.partial |= partial
        trip.attempt = self._stage.rng.getrandbits(32)

    def _replayed(self, trip: _Trip) -> None:
        """It was sent whole, did not come back, and runs again (DESIGN section 2.5). Counted once, however often."""
        if not trip.replayed and not trip.evaluate:
            self._stage.metrics.count("microbatches_replayed")
        trip.replayed = True

    def _given_up(self, trip: _Trip) -> bool:
        """Whether it has gone nowhere for too long. The time counts from the first call."""
        now = self._stage.clock.monotonic()
        if trip.troubled_since is None:
            trip.troubled_since = now
        return now - trip.troubled_since > NO_ROUTE_S

    def _choose(self, trip: _Trip) -> Replica | None:
        stage = self._stage.hops[trip.hop].stage
        replicas = {r.peer_id: r for r in self._stage.around.replicas(stage)}
        if self._stage.hops[trip.hop].head and stage == 0:
            # The ring closes where it began: only the origin holds this microbatch's place.
            origin = replicas.get(trip.origin) or self._stage.around.origin(trip.origin)
            replicas = {} if origin is None else {trip.origin: origin}
        open_to = [peer for peer in replicas if peer not in trip.refused]
        order = self._router.order(open_to, self._stage.clock.monotonic())
        return replicas[order[0]] if order else None

    async def _wait_for_route(self, trip: _Trip) -> None:
        stage = self._stage.hops[trip.hop].stage
        if self._given_up(trip):
            why = "; ".join(f"{peer[-8:]}: {reason}" for peer, reason in trip.refused.items())
            why = why or trip.failed or "none known"
            raise Dropped(
                pb.Drop.REASON_NO_ROUTE, f"no replica of stage {stage} took it ({why})", trip.partial
            )
        self.waiting_for = f"a replica of stage {stage}"
        with self._stage.tracer.phase("waiting", "wait for a replica", trip.id, trip.hop):
            if trip.refused:
                # All that can be asked said no: what they lack (a snapshot, their own way onward) takes time to come.
                await self._stage.clock.sleep(_LOOK_S)
                trip.refused.clear()
            else:
                await self._soon()
        self.waiting_for = ""

    async def _soon(self) -> None:
        """Wait until a route may have opened, or for a while."""
        changed = self._changed
        try:
            async with asyncio.timeout(_LOOK_S):
                await changed.wait()
        except TimeoutError:
            pass

    def _offer(self, trip: _Trip) -> pb.Offer:
        assert trip.cargo.frame is not None
        return pb.Offer(
            id=trip.id,
            hop=trip.hop,
            batch=trip.work.wire,
            hidden=trip.cargo.frame.header,
            committed=self._stage.counter.to_proto(),
            evaluate=trip.evaluate,
        )

    def _link(self, replica: Replica, hop: int) -> Downstream:
        """The link to a replica, opened when there is none."""
        link = self._links.get((replica.peer_id, hop))
        if link is not None and link.lost is None:
            return link
        assert self._tasks is not None
        opening = pb.LinkOpen(
            run_id=self._stage.runtime.run.run_id,
            protocol=PROTOCOL_VERSION,
            peer_id=self._stage.peer_id,
            name=self._stage.name,
            hop=hop,
            incarnation=self._stage.incarnation,
        )

        def kept(message: pb.Kept) -> None:
            self._debts.kept(replica.peer_id, message.incarnation, message.upto)

        link = Downstream(
            opening,
            replica.address,
            lambda: self._credit(replica.peer_id),
            self._stage.counter.merge,
            kept,
            self._stage.tracer,
            replica.name,
        )
        if self._stage.runtime.crossings[hop - 1].prior is not None:
            link.announce(self.author.current(hop - 1))
        self._links[replica.peer_id, hop] = link
        self._tasks.create_task(self._hold(link, replica, hop))
        return link

    async def _hold(self, link: Downstream, replica: Replica, hop: int) -> None:
        await link.run(self._stage.transport)
        if self._links.get((replica.peer_id, hop)) is link:
            del self._links[replica.peer_id, hop]
        self._router.failed(replica.peer_id, self._stage.clock.monotonic())
        stage = self._stage.hops[hop].stage
        # One line for each loss (C10): not for every try to have the link again.
        level = logging.DEBUG if replica.peer_id in self._lost and not link.answered else logging.WARNING
        self._lost.add(replica.peer_id)
        event(log, "link_lost", level=level, peer=replica.name, stage=stage, reason=str(link.lost))

    def _credit(self, peer_id: str) -> None:
        self._router.credit(peer_id)
        self.wake()


@dataclass(eq=False)
class _Trip:
    """One microbatch on its way to one hop, over as many replicas as it takes."""

    hop: int
    origin: str
    sequence: int
    attempt: int
    work: Work
    evaluate: int
    cargo: Cargo
    partial: bool = False
    replayed: bool = False
    failed: str = ""
    troubled_since: float | None = None
    unprepared_since: float | None = None
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> pb.MicrobatchId:
        return pb.MicrobatchId(origin=self.origin, sequence=self.sequence, attempt=self.attempt)


async def _made(trip: _Trip, frame: Awaitable[Frame]) -> Frame:
    """A frame that is made again. Raises Dropped, which then knows how far the microbatch had come."""
    try:
        return await frame
    except Dropped as dropped:
        raise Dropped(dropped.reason, dropped.text, dropped.partial or trip.partial) from dropped
