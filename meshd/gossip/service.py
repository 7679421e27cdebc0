"""Gossip of one peer: when to exchange, and with whom."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from meshd import PROTOCOL_VERSION
from meshd.errors import MeshdError, MismatchError, ResourceError
from meshd.gossip.budget import Budget
from meshd.gossip.coordinates import Coverage
from meshd.gossip.distances import Distances
from meshd.gossip.exchange import (
    Exchange,
    ExchangeRefused,
    ExchangeReport,
    TooFar,
    agreed_offset,
    check_open,
)
from meshd.gossip.forms import BF16
from meshd.gossip.memory import LISTENERS, SEGMENT_BLOCKS
from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters
from meshd.observe.log import event
from meshd.pipeline.stage import Replica, Stage
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex, LinkLost

log = logging.getLogger(__name__)

# A partner that is in another exchange is asked again so often, after so long, before the next step is waited for.
_RETRIES, _RETRY_S = 5, 0.2
# One that failed is left alone for about as long as the record of a peer that died may live: one line per loss (C10).
_ASIDE_S = 30.0
# So many times due in a row without an exchange, a replica opens one with whomever there is.
_OVERDUE = 3
# Inner steps without an exchange that are long at least.
_LONG_STEPS = 100


def choose_partner(
    me: str, replicas: Sequence[Replica], aside: Collection[str], overdue: bool, rng: random.Random
) -> Replica | None:
    """A random replica of the own stage that this peer may open an exchange with. Pure.

    Of any two replicas only the one with the smaller peer id opens: so two rarely open exchanges with each other at
    the same moment. Who is overdue opens with any: those with smaller ids may have no work, and then they never do.
    """
    able = [r for r in replicas if (overdue or r.peer_id > me) and r.peer_id not in aside]
    return rng.choice(able) if able else None


class Gossip:
    """At most one exchange at a time that moves values here. `run` opens them, `serve` answers them, and beside that
    lets a few others listen."""

    def __init__(self, stage: Stage, flat: FlatParameters, own_stage: int) -> None:
        self._stage, self._flat, self._own_stage = stage, flat, own_stage
        self._spec = stage.runtime.run.spec.gossip
        self._turn: object | None = None  # of the one exchange that may move the values; None: free
        self._listeners = 0
        self._asked = ""  # peer id of the replica that one was opened with and that has not answered yet
        self._aside: dict[str, float] = {}
        self._due = asyncio.Event()
        self._coverage, self._distances = Coverage(self._spec.subset, stage.runtime.version), Distances()
        self._outer = OuterStep(flat, self._spec.outer_momentum)
        self._steps = self._work = 0  # inner steps and label tokens since the last exchange
        self._budget = Budget(self._spec.bps)
        self._missed = 0  # times that an exchange was due since the last one
        self._exchanged = stage.runtime.version  # inner steps in the weights at the last exchange

    @property
    def _usual_steps(self) -> int:
        """Between two exchanges of a coordinate there are rarely more inner steps. What a replica did alone for longer
        is averaged as it is: momentum on top of it would throw it far off."""
        return 4 * self._spec.every * self._coverage.subset

    @property
    def _was_alone(self) -> bool:
        """This replica has trained for long without an exchange."""
        return self._stage.runtime.version - self._exchanged > max(_LONG_STEPS, self._usual_steps)

    def stepped(self, tokens: int) -> None:
        """The stage has taken an inner step on so many label tokens."""
        self._steps += 1
        self._work += tokens
        self._budget.stepped(self._stage.clock.monotonic())
        if self._steps >= self._spec.every:
            self._due.set()

    async def run(self) -> None:
        """Exchange with a random replica whenever `every` steps were taken since the last exchange."""
        while True:
            await self._due.wait()
            self._due.clear()
            self._steps = 0
            self._missed += 1
            for _ in range(_RETRIES):
                now = self._stage.clock.monotonic()
                self._aside = {peer: until for peer, until in self._aside.items() if until > now}
                replicas = self._stage.around.replicas(self._own_stage)
                overdue = self._missed > _OVERDUE
                partner = choose_partner(self._stage.peer_id, replicas, self._aside, overdue, self._stage.rng)
                if partner is None:
                    break
                if self._turn is None and await self.exchange_with(partner):
                    break
                await self._stage.clock.sleep(_RETRY_S * (0.5 + self._stage.rng.random()))

    async def farewell(self) -> None:
        """One last exchange, of all values, with any replica that takes it: what this peer has learnt must not go with
        it."""
        replicas = list(self._stage.around.replicas(self._own_stage))
        self._stage.rng.shuffle(replicas)
        keeping = self._stage.runtime.keeping
        for _ in range(_RETRIES):
            for replica in replicas:
                if keeping.kept >= keeping.stepped or (
                    self._turn is None and await self.exchange_with(replica, whole=True)
                ):
                    return
            await self._stage.clock.sleep(_RETRY_S * (0.5 + self._stage.rng.random()))

    async def exchange_with(self, partner: Replica, whole: bool = False) -> bool:
        """One attempt. A partner that fails (and is not just busy) is set aside for a while. whole: all values, however
        few the run's exchanges cover."""
        turn = self._turn = object()
        self._asked = partner.peer_id
        stepped = self._stage.runtime.keeping.stepped

        def answered() -> None:
            if self._turn is not turn:
                raise ExchangeRefused(f"in the exchange that {partner.name} opened at the same time")
            self._asked = ""

        try:
            self._fit_budget()
            if self._was_alone:
                # How far away others were says nothing any more, and what was done meanwhile goes to them at once.
                whole, self._distances = True, Distances()
            # All values cross in bf16: then two differ here and there by more than fewer bits can tell.
            subset, bits = (1, BF16) if whole else (self._coverage.subset, self._spec.bits)
            opening = self._opening(self._stage.rng.getrandbits(64), bits, subset)
            with self._stage.tracer.phase("gossip", "exchange", partner=partner.name) as phase:
                _, report = await self._open(partner, opening, answered)
                phase.note(bytes=report.bytes_sent)
        except ExchangeRefused:
            self._stage.metrics.count("gossip_busy")
            return False
        except MeshdError as error:  # whatever the partner refuses with
            self._aside[partner.peer_id] = self._stage.clock.monotonic() + _ASIDE_S
            self._failed(partner.peer_id, partner.name, error)
            return False
        finally:
            if self._turn is turn:
                self._turn, self._asked = None, ""
        self._done(partner.peer_id, partner.name, opening, report, stepped)
        return True

    async def follow(self, partner: Replica, met: Callable[[], None]) -> ExchangeReport:
        """Take over a working replica's values, which does not move. For a peer that takes no steps and does not serve
        exchanges yet. met: told when the replica has answered.

        Raises ExchangeRefused when the replica is busy, another MeshdError when it fails; what was taken over by then
        stays.
        """
        opening = self._opening(self._stage.rng.getrandbits(64), BF16, 1)
        opening.listening = True
        theirs, report = await self._open(partner, opening, met)
        # The steps in these values are the replica's; the optimizer's moments are this peer's own.
        self._stage.runtime.version = max(self._stage.runtime.version, theirs.weight_version)
        self._stage.metrics.count("gossip_followed")
        return report

    async def _open(
        self, partner: Replica, opening: pb.GossipOpen, met: Callable[[], None]
    ) -> tuple[pb.GossipOpen, ExchangeReport]:
        async with self._stage.transport.gossip(partner.address) as duplex:
            await duplex.send(pb.GossipMessage(open=opening))
            messages = aiter(duplex)
            exchange = self._exchange(duplex, messages)
            reply = await exchange.next("open")
            check_open(opening, reply.open)
            met()
            self._stage.counter.merge(reply.open.committed)
            return reply.open, await self._run(exchange, opening, reply.open, opener=True)

    def _exchange(
        self, duplex: Duplex[pb.GossipMessage], messages: AsyncIterator[pb.GossipMessage]
    ) -> Exchange:
        return Exchange(duplex, messages, self._flat, self._outer, self._stage.worker, self._spec.timeout_s)

    async def _run(
        self, exchange: Exchange, mine: pb.GossipOpen, theirs: pb.GossipOpen, opener: bool
    ) -> ExchangeReport:
        began = self._stage.clock.monotonic()
        offset = agreed_offset(mine, theirs, opener)
        since = self._coverage.since(mine.subset, offset, mine.weight_version)
        carry = mine.subset == self._coverage.subset and since is not None and since <= self._usual_steps
        report = await exchange.run(mine, theirs, opener, carry)
        metrics = self._stage.metrics
        seconds = self._stage.clock.monotonic() - began
        self._budget.sent(report.bytes_sent, seconds)
        metrics.count("gossip_s", seconds)
        metrics.count("gossip_sent_bytes", report.bytes_sent)
        metrics.count("gossip_received_bytes", report.bytes_received)
        return report

    async def serve(self, duplex: Duplex[pb.GossipMessage]) -> None:
        """Answer one exchange that a replica opened."""
        messages = aiter(duplex)
        exchange = self._exchange(duplex, messages)
        name = duplex.remote
        try:
            theirs = (await exchange.next("open")).open
            mine = self._opening(theirs.exchange, theirs.bits, theirs.subset)
            check_open(mine, theirs)
            self._check_choice(theirs)
        except (LinkLost, MismatchError, ExchangeRefused) as error:
            self._failed(name, name, error)
            await self._refuse(duplex, str(error), busy=False)
            return
        if theirs.listening:
            await self._let_listen(duplex, exchange, mine, theirs)
            return
        # Two that open with each other at the same moment would refuse each other, over a slow link again and again:
        # the one with the larger id lets go of its own.
        crossed = self._asked == theirs.peer_id < self._stage.peer_id
        if self._turn is not None and not crossed:
            await self._refuse(duplex, "in another exchange", busy=True)
            return
        turn = self._turn = object()
        self._asked = ""
        known = self._stage.around.replicas(self._own_stage)
        peer, name = next(((r.peer_id, r.name) for r in known if r.peer_id == theirs.peer_id), (name, name))
        try:
            self._stage.counter.merge(theirs.committed)
            await duplex.send(pb.GossipMessage(open=mine))
            stepped = self._stage.runtime.keeping.stepped
            with self._stage.tracer.phase("gossip", "answer", partner=name) as phase:
                report = await self._run(exchange, mine, theirs, opener=False)
                phase.note(bytes=report.bytes_sent)
            self._done(peer, name, mine, report, stepped)
            # Exchanged with: what this peer would open itself can wait as long again.
            self._steps = 0
        except (LinkLost, MismatchError, ExchangeRefused, ResourceError) as error:
            self._failed(peer, name, error)
        finally:
            if self._turn is turn:
                self._turn = None

    async def _let_listen(
        self,
        duplex: Duplex[pb.GossipMessage],
        exchange: Exchange,
        mine: pb.GossipOpen,
        theirs: pb.GossipOpen,
    ) -> None:
        """Values here do not move, so it goes on beside an exchange: a listener may be slow, and must not keep this
        replica from averaging."""
        if self._listeners >= LISTENERS:
            await self._refuse(duplex, f"{LISTENERS} listen already", busy=True)
            return
        self._listeners += 1
        try:
            self._stage.counter.merge(theirs.committed)
            await duplex.send(pb.GossipMessage(open=mine))
            stepped = self._stage.runtime.keeping.stepped
            with self._stage.tracer.phase("gossip", "let listen", partner=duplex.remote) as phase:
                report = await self._run(exchange, mine, theirs, opener=False)
                phase.note(bytes=report.bytes_sent)
            # An anchor, or a stranger, gives nothing back to the stage.
            if theirs.subset == 1 and self._stage.around.holds(theirs.peer_id):
                self._stage.runtime.keeping.keep(stepped)
        except (LinkLost, MismatchError, ExchangeRefused, ResourceError) as error:
            self._failed(duplex.remote, duplex.remote, error)
        finally:
            self._listeners -= 1

    def _check_choice(self, opening: pb.GossipOpen) -> None:
        """What an opener may choose. Residues take memory for all their values at once: no more of them than the run
        asks for. Raises MismatchError."""
        if opening.bits == BF16:
            return
        least = 1 if self._spec.bps else self._spec.subset
        if opening.bits != self._spec.bits or opening.subset < least:
            raise MismatchError(
                f"gossip bits {opening.bits} of one value in {opening.subset}: this run exchanges {BF16} bits, or "
                f"{self._spec.bits} of one value in {least} or more"
            )

    async def _refuse(self, duplex: Duplex[pb.GossipMessage], reason: str, busy: bool) -> None:
        try:
            await duplex.send(pb.GossipMessage(refusal=pb.GossipRefusal(reason=reason[:200], busy=busy)))
        except LinkLost:
            return  # it has gone: nobody is left to be refused

    def _fit_budget(self) -> None:
        subset = self._budget.subset(
            self._coverage.subset, self._flat.count, self._spec.bits, self._spec.every
        )
        if subset != self._coverage.subset:
            self._coverage = Coverage(subset, self._stage.runtime.version)
            self._stage.metrics.gauge("gossip_subset", subset)

    def _opening(self, exchange: int, bits: int, subset: int) -> pb.GossipOpen:
        """exchange, bits, subset: as the opener decides."""
        if subset == self._coverage.subset:
            offset = self._coverage.next(self._stage.rng)
        else:
            offset = self._stage.rng.randrange(max(1, subset))
        return pb.GossipOpen(
            run_id=self._stage.runtime.run.run_id,
            protocol=PROTOCOL_VERSION,
            peer_id=self._stage.peer_id,
            stage=self._own_stage,
            weight_version=self._stage.runtime.version,
            committed=self._stage.counter.to_proto(),
            count=self._flat.count,
            segment_blocks=SEGMENT_BLOCKS,
            exchange=exchange,
            subset=subset,
            offset=offset,
            bits=bits,
            work=self._work,
            usual=self._distances.usual,
        )

    def _done(
        self, peer: str, name: str, opening: pb.GossipOpen, report: ExchangeReport, stepped: int
    ) -> None:
        """opening: this side's. stepped: additions that were in the weights before the exchange."""
        self._missed, self._exchanged = 0, opening.weight_version
        self._work -= min(self._work, opening.work)  # what was done meanwhile is for the next
        self._stage.runtime.keeping.keep(
            self._coverage.exchanged(opening.subset, report.offset, stepped, opening.weight_version)
        )
        self._distances.measured(peer, report.distance)
        metrics = self._stage.metrics
        metrics.count("gossip_exchanges")
        metrics.gauge("gossip_distance", report.distance)
        metrics.gauge("gossip_partner_lag", report.lag)
        event(log, "gossip", level=logging.DEBUG, peer=name, distance=report.distance, lag=report.lag)

    def _failed(self, peer: str, name: str, error: MeshdError) -> None:
        self._stage.metrics.count("gossip_failed")
        if isinstance(error, TooFar):
            self._stage.metrics.count("gossip_too_far")
            self._distances.measured(peer, error.distance)
        event(
            log,
            "gossip_failed",
            level=logging.WARNING,
            peer=name,
            stage=self._own_stage,
            reason=str(error),
        )
