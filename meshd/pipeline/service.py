"""The fast circuit of one peer: microbatches come in over links, pass through the stage, go on to the next hop, and
come back (DESIGN section 2)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshd import PROTOCOL_VERSION
from meshd.clock import Clock
from meshd.errors import MeshdError, MismatchError
from meshd.model.cut import Hop, hops
from meshd.model.stage import StageModel
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.optim.inner import StepReport
from meshd.optim.schedule import TokenCounter
from meshd.pipeline import worker
from meshd.pipeline.downstream import Cargo, Downstream, Evaluated, Passed, Result
from meshd.pipeline.dropped import Busy, Dropped, Refused
from meshd.pipeline.exhaustion import OutOfMemory
from meshd.pipeline.router import Router
from meshd.pipeline.runtime import NonFinite, Pace, Returned, StageRuntime, StaleMicrobatch, Work
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import LinkLost, Transport
from meshd.wire import Frame

log = logging.getLogger(__name__)

# Without a replica of the next hop for so long, a microbatch goes back to its origin.
NO_ROUTE_S = 60.0
# How often those who wait for a route look again, should no event wake them.
_LOOK_S = 1.0


@dataclass(frozen=True)
class Replica:
    """Where one replica of a hop can be reached."""

    peer_id: str
    name: str
    address: str


@dataclass(frozen=True)
class Surroundings:
    """What the pipeline asks the daemon.

    replicas: working replicas of a stage, this peer left out. live_replicas: of this peer's own stage, this peer
    included. frozen: the model of a snapshot watermark, or None when it is not here.
    """

    replicas: Callable[[int], Sequence[Replica]]
    live_replicas: Callable[[], int]
    frozen: Callable[[int], Awaitable[StageModel | None]]
    stepped: Callable[[StepReport], None]


@dataclass
class Stage:
    """The parts that make up one stage peer's pipeline."""

    peer_id: str
    name: str
    incarnation: int
    runtime: StageRuntime
    worker: worker.DeviceWorker
    transport: Transport
    counter: TokenCounter
    around: Surroundings
    clock: Clock
    metrics: Metrics
    rng: random.Random
    hops: list[Hop] = field(init=False)

    def __post_init__(self) -> None:
        resolved = self.runtime.run.resolved
        self.hops = hops(resolved.layers, resolved.cut, resolved.tied)


class Pipeline:
    """Carries microbatches from this peer's hops onward. `run` must be running while `through` is used."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._router = Router(stage.rng)
        self._links: dict[tuple[str, int], Downstream] = {}
        self._tasks: asyncio.TaskGroup | None = None
        # Set and replaced whenever a route may have opened: credit, a new replica, a link that came up.
        self._changed = asyncio.Event()
        self.waiting_for: str = ""

    async def run(self) -> None:
        """Own the links until cancelled."""
        told = 0
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                await self.stage.clock.sleep(_LOOK_S)
                self.wake()
                if self.stage.counter.total > told:
                    told = self.stage.counter.total
                    counts = self.stage.counter.to_proto()
                    for link in list(self._links.values()):
                        link.progress(counts)

    def wake(self) -> None:
        """Routes may have changed: let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def learn(self, counts: Iterable[pb.Count]) -> None:
        """Merge what a peer says of the global token counter."""
        self.stage.counter.merge(counts)

    def knows(self, hop: int) -> bool:
        """Whether this peer serves the hop."""
        return 0 <= hop < len(self.stage.hops) and hop in {h.index for h in self.stage.runtime.model.hops}

    # ---- a microbatch, from one of this peer's hops to the end and back ---------------------------------------------

    async def through(self, hop: int, id: pb.MicrobatchId, work: Work) -> Passed:
        """Train on a microbatch from `hop` on. Returns its loss and the gradient for the hop before.

        Raises Dropped when it is not coming back.
        """
        runtime, run = self.stage.runtime, self.stage.worker.run
        pace = self._pace()
        if self.stage.hops[hop].head:
            job = run(lambda: runtime.head(hop, work, pace), worker.FORWARD)
            loss, returned = await self._computed(job, partial=False)
        else:

            def forward() -> Awaitable[Frame]:
                return run(lambda: runtime.forward(hop, work), worker.FORWARD)

            frame = await self._computed(forward(), partial=False)
            passed, sender = await self._carry(hop + 1, id, work, frame, forward)
            assert isinstance(passed, Passed)
            gradient = passed.gradient
            assert gradient is not None
            loss, pace = passed.loss, self._pace()
            way_back = run(lambda: runtime.backward(hop, work, gradient, pace), worker.BACKWARD)
            try:
                returned = await self._computed(way_back, partial=True)
            except Dropped as dropped:
                if dropped.reason == pb.Drop.REASON_CORRUPT:
                    # What it sent does not decode, or is not finite: the next microbatch had better go elsewhere.
                    self._router.failed(sender, self.stage.clock.monotonic())
                raise
        self._returned(hop, work, returned)
        return Passed(loss, returned.gradient)

    async def evaluate(self, hop: int, id: pb.MicrobatchId, work: Work, watermark: int) -> Evaluated:
        """Loss of a microbatch from `hop` on with the frozen snapshot of `watermark`. Raises Dropped."""
        model = await self.stage.around.frozen(watermark)
        if model is None:
            raise Dropped(
                pb.Drop.REASON_NO_SNAPSHOT, f"no snapshot {watermark} of stage {self.stage.hops[hop].stage}"
            )
        runtime, run = self.stage.runtime, self.stage.worker.run
        if self.stage.hops[hop].head:
            score = run(lambda: runtime.score(hop, work, model), worker.BACKGROUND)
            return Evaluated(*await self._computed(score, partial=False))

        def forward() -> Awaitable[Frame]:
            return run(lambda: runtime.forward_frozen(hop, work, model), worker.BACKGROUND)

        frame = await self._computed(forward(), partial=False)
        result, _ = await self._carry(hop + 1, id, work, frame, forward, evaluate=watermark + 1)
        assert isinstance(result, Evaluated)
        return result

    def _pace(self) -> Pace:
        return Pace(self.stage.counter.total, self.stage.around.live_replicas())

    def _returned(self, hop: int, work: Work, returned: Returned) -> None:
        metrics = self.stage.metrics
        if hop == self.stage.runtime.counting_hop:
            metrics.count("microbatches_added")
            metrics.rate("tokens_per_s", work.batch.label_tokens)
        if returned.gradient is not None:
            metrics.count("gradient_sent_bytes", len(returned.gradient.payload))
        if returned.step is not None:
            metrics.count("steps_skipped_nonfinite" if returned.step.skipped else "steps")
            metrics.gauge("gradient_norm", returned.step.norm)
            metrics.gauge("learning_rate", returned.step.lr)
            self.stage.around.stepped(returned.step)

    async def _computed(self, job: Awaitable[worker.T], partial: bool) -> worker.T:
        """Result of a job on the device, its failures as Dropped. partial: a later hop has added already."""
        try:
            return await job
        except StaleMicrobatch as error:
            raise self._dropped(pb.Drop.REASON_STALE, error, partial) from error
        except NonFinite as error:
            raise self._dropped(pb.Drop.REASON_NONFINITE, error, partial) from error
        except MismatchError as error:
            raise self._dropped(pb.Drop.REASON_CORRUPT, error, partial) from error
        except OutOfMemory as error:
            event(log, "out_of_memory", level=logging.ERROR, reason=str(error))
            raise self._dropped(pb.Drop.REASON_FAILED, error, partial) from error

    def _dropped(self, reason: pb.Drop.Reason, error: MeshdError, partial: bool) -> Dropped:
        dropped = Dropped(reason, str(error), partial)
        self.stage.metrics.count(f"dropped_{pb.Drop.Reason.Name(reason).removeprefix('REASON_').lower()}")
        return dropped

    # ---- to the next hop --------------------------------------------------------------------------------------------

    async def _carry(
        self,
        hop: int,
        id: pb.MicrobatchId,
        work: Work,
        frame: Frame,
        forward: Callable[[], Awaitable[Frame]],
        evaluate: int = 0,
    ) -> tuple[Result, str]:
        """Find a replica of `hop`, send, wait for the way back; again elsewhere when it fails.

        Returns what came back, and the peer id that sent it.

        forward: what made `frame`, to make it again. evaluate: 0 to train, else a snapshot's watermark + 1.
        """
        trip = _Trip(hop, id.origin, id.sequence, id.attempt, work, evaluate, Cargo(frame))
        while True:
            replica = self._choose(trip)
            if replica is None:
                await self._wait_for_route(trip)
                continue
            if trip.cargo.frame is None:
                trip.cargo.frame = await self._computed(forward(), trip.partial)
                self._replayed(trip)
            try:
                return await self._attempt(trip, replica), replica.peer_id
            except Busy:
                self._router.busy(replica.peer_id, self.stage.clock.monotonic())
                # There is a way, it is only full: that may last. Unless it was tried, and nobody could compute it.
                if not trip.failed:
                    trip.troubled_since = None
            except Refused as error:
                trip.refused[replica.peer_id] = str(error)
            except LinkLost as error:
                self._router.failed(replica.peer_id, self.stage.clock.monotonic())
                event(log, "resend", level=logging.DEBUG, peer=replica.name, hop=hop, reason=str(error))
                # Once it was sent whole, how far it came is unknown: stages behind may have added it.
                self._again(trip, partial=trip.cargo.frame is None)
                # A new trouble, however long the peer had worked on it.
                trip.troubled_since = self.stage.clock.monotonic()
            except Dropped as dropped:
                if dropped.reason == pb.Drop.REASON_FAILED:
                    # Memory is short there, for the next microbatch as well.
                    self._router.failed(replica.peer_id, self.stage.clock.monotonic())
                    trip.failed = dropped.text
                final = not dropped.retriable or self._given_up(trip)
                self._again(trip, dropped.partial)
                if final:
                    raise Dropped(dropped.reason, dropped.text, trip.partial) from dropped
                trip.refused[replica.peer_id] = dropped.text

    async def _attempt(self, trip: _Trip, replica: Replica) -> Result:
        """One offer to one replica, with the router's books kept."""
        began = self.stage.clock.monotonic()
        self._router.sent(replica.peer_id)
        assert trip.cargo.frame is not None
        size = len(trip.cargo.frame.payload)
        elapsed: float | None = None
        try:
            result = await self._link(replica, trip.hop).carry(self._offer(trip), trip.cargo)
            elapsed = self.stage.clock.monotonic() - began
            self.stage.metrics.count(
                "evaluation_sent_bytes" if trip.evaluate else "activation_sent_bytes", size
            )
            return result
        finally:
            if elapsed is None:
                self._router.abandoned(replica.peer_id)
            else:
                self._router.returned(replica.peer_id, elapsed)

    def _again(self, trip: _Trip, partial: bool) -> None:
        trip.partial |= partial
        trip.attempt = self.stage.rng.getrandbits(32)

    def _replayed(self, trip: _Trip) -> None:
        """It was sent whole, did not come back, and runs again (DESIGN section 2.5). Counted once, however often."""
        if not trip.replayed and not trip.evaluate:
            self.stage.metrics.count("microbatches_replayed")
        trip.replayed = True

    def _given_up(self, trip: _Trip) -> bool:
        """Whether it has gone nowhere for too long. The time counts from the first call."""
        now = self.stage.clock.monotonic()
        if trip.troubled_since is None:
            trip.troubled_since = now
        return now - trip.troubled_since > NO_ROUTE_S

    def _choose(self, trip: _Trip) -> Replica | None:
        stage = self.stage.hops[trip.hop].stage
        replicas = {r.peer_id: r for r in self.stage.around.replicas(stage)}
        if self.stage.hops[trip.hop].head and stage == 0:
            # The ring closes where it began: only the origin holds this microbatch's place.
            replicas = {peer: r for peer, r in replicas.items() if peer == trip.origin}
        open_to = [peer for peer in replicas if peer not in trip.refused]
        order = self._router.order(open_to, self.stage.clock.monotonic())
        return replicas[order[0]] if order else None

    async def _wait_for_route(self, trip: _Trip) -> None:
        stage = self.stage.hops[trip.hop].stage
        if self._given_up(trip):
            why = "; ".join(f"{peer[-8:]}: {reason}" for peer, reason in trip.refused.items())
            why = why or trip.failed or "none known"
            raise Dropped(
                pb.Drop.REASON_NO_ROUTE, f"no replica of stage {stage} took it ({why})", trip.partial
            )
        self.waiting_for = f"a replica of stage {stage}"
        if trip.refused:
            # All that can be asked said no: what they lack (a snapshot, their own way onward) takes time to come.
            await self.stage.clock.sleep(_LOOK_S)
            trip.refused.clear()
        else:
            changed = self._changed
            try:
                async with asyncio.timeout(_LOOK_S):
                    await changed.wait()
            except TimeoutError:
                pass
        self.waiting_for = ""

    def _offer(self, trip: _Trip) -> pb.Offer:
        assert trip.cargo.frame is not None
        return pb.Offer(
            id=pb.MicrobatchId(origin=trip.origin, sequence=trip.sequence, attempt=trip.attempt),
            hop=trip.hop,
            batch=trip.work.wire,
            hidden=trip.cargo.frame.header,
            committed=self.stage.counter.to_proto(),
            evaluate=trip.evaluate,
        )

    def _link(self, replica: Replica, hop: int) -> Downstream:
        """The link to a replica, opened when there is none."""
        link = self._links.get((replica.peer_id, hop))
        if link is not None and link.lost is None:
            return link
        assert self._tasks is not None
        opening = pb.LinkOpen(
            run_id=self.stage.runtime.run.run_id,
            protocol=PROTOCOL_VERSION,
            peer_id=self.stage.peer_id,
            name=self.stage.name,
            hop=hop,
            incarnation=self.stage.incarnation,
        )
        link = Downstream(opening, replica.address, lambda: self._credit(replica.peer_id), self.learn)
        self._links[replica.peer_id, hop] = link
        self._tasks.create_task(self._hold(link, replica, hop))
        return link

    async def _hold(self, link: Downstream, replica: Replica, hop: int) -> None:
        await link.run(self.stage.transport)
        if self._links.get((replica.peer_id, hop)) is link:
            del self._links[replica.peer_id, hop]
        self._router.failed(replica.peer_id, self.stage.clock.monotonic())
        stage = self.stage.hops[hop].stage
        event(log, "link_lost", level=logging.WARNING, peer=replica.name, stage=stage, reason=str(link.lost))

    def _credit(self, peer_id: str) -> None:
        self._router.credit(peer_id)
        self.wake()


@dataclass
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
    refused: dict[str, str] = field(default_factory=dict)
