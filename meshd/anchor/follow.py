"""How an anchor's copy of a stage keeps up with the stage's replicas: it listens to exchanges (docs/gossip.md), first
of all values in bf16, then of a part of them at a time, in as few bits as the replicas use among themselves."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshd import PROTOCOL_VERSION
from meshd.clock import Clock
from meshd.config.runspec import GossipSpec, ResolvedRun
from meshd.errors import MeshdError, MismatchError
from meshd.gossip.budget import affordable_subset
from meshd.gossip.coordinates import Coverage
from meshd.gossip.exchange import Exchange, ExchangeRefused, check_open
from meshd.gossip.forms import BF16
from meshd.gossip.memory import SEGMENT_BLOCKS
from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.stage import Replica
from meshd.pipeline.worker import DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Transport

log = logging.getLogger(__name__)

# After so many refreshes' worth of steps without an exchange, all values again.
_LONG_REFRESHES = 4
# Replicas that are busy with others are asked again after so long, so often.
_BUSY_S, _MOST_ROUNDS = 0.5, 60
# Stages do not count exactly alike, and counts of tokens come late.
_SPARE_STEPS = 500


@dataclass(frozen=True)
class Listening:
    """What a copy takes over next: one value of `subset`, in so many bits. reason: in words."""

    bits: int
    subset: int
    reason: str

    @property
    def whole(self) -> bool:
        return self.bits == BF16 and self.subset == 1


def next_listening(
    spec: GossipSpec, *, followed: bool, fitted: bool, steps: int, refresh_steps: int, subset: int
) -> Listening:
    """Pure. followed: the copy was whole once. fitted: the last exchange did not end in a mismatch. steps: inner steps
    of the run since. subset: one value of so many is what bytes allow; at least the run's own is taken."""
    if not followed:
        return Listening(BF16, 1, "the first time")
    if not fitted:
        return Listening(BF16, 1, "the last exchange did not fit")
    if steps > _LONG_REFRESHES * refresh_steps:
        return Listening(BF16, 1, f"{steps} steps without an exchange")
    return Listening(spec.bits, max(spec.subset, subset), "as the run's replicas do")


@dataclass(frozen=True)
class Links:
    """What followers of all stages share. peer_id: the anchor's own."""

    run: ResolvedRun
    peer_id: str
    transport: Transport
    worker: DeviceWorker
    counter: TokenCounter
    clock: Clock
    metrics: Metrics
    rng: random.Random


class Follower:
    """One stage's copy, with its values in `flat`. One call at a time; values move in the device's thread only.

    version: inner steps of the replica that was followed last; None: the copy was never whole.
    """

    def __init__(self, links: Links, stage: int, flat: FlatParameters) -> None:
        self.stage = stage
        self.version: int | None = None
        self._links, self._flat = links, flat
        self._spec = links.run.spec.gossip
        self._coverage = Coverage(self._spec.subset, 0)
        self._fitted = True
        self._told: dict[str, str] = {}  # by peer id, what was wrong, as last logged
        self._at: tuple[int, float] = (0, 0.0)  # global tokens and time of the last exchange

    async def follow(self, replicas: Callable[[], Sequence[Replica]]) -> bool:
        """Listen to one replica, in random order; one that fails is left out of this call. False: none gave its values;
        what some gave stays.

        replicas: the working ones, asked again in every round of waiting for a busy one.
        """
        failed = set[str]()
        for _ in range(_MOST_ROUNDS):
            able = [replica for replica in replicas() if replica.peer_id not in failed]
            if not able:
                return False
            self._links.rng.shuffle(able)
            for replica in able:
                try:
                    await self._listen(replica)
                    return True
                except ExchangeRefused:
                    self._links.metrics.count("gossip_busy")
                except MeshdError as error:
                    failed.add(replica.peer_id)
                    self._fitted = self._fitted and not isinstance(error, MismatchError)
                    self._links.metrics.count("gossip_failed")
                    self._tell(replica, str(error))
            await self._links.clock.sleep(_BUSY_S * (0.5 + self._links.rng.random()))
        return False

    def _tell(self, replica: Replica, reason: str) -> None:
        """Once for each thing that is wrong, however often it is tried."""
        if self._told.get(replica.peer_id) == reason:
            return
        self._told[replica.peer_id] = reason
        event(
            log,
            "not_followed",
            level=logging.WARNING,
            stage=self.stage,
            peer=replica.name,
            reason=reason,
        )

    async def _listen(self, replica: Replica) -> None:
        """Raises ExchangeRefused when the replica is busy, another MeshdError when it fails."""
        links, choice = self._links, self._next()
        tokens, now = links.counter.total, links.clock.monotonic()
        if choice.subset != self._coverage.subset:
            self._coverage = Coverage(choice.subset, 0)
        offset = self._coverage.next(links.rng)
        version = await self._exchange(replica, choice, offset)
        self._coverage.exchanged(choice.subset, offset, 0, version)
        self.version, self._fitted, self._at = version, True, (tokens, now)
        self._told.clear()
        links.metrics.count("gossip_followed")
        event(
            log,
            "followed",
            level=logging.INFO if choice.whole else logging.DEBUG,
            stage=self.stage,
            peer=replica.name,
            weight_version=version,
            bits=choice.bits,
            subset=choice.subset,
            reason=choice.reason,
        )

    def _next(self) -> Listening:
        links, spec = self._links, self._links.run.spec
        tokens, at = self._at
        afforded = 1
        if self._spec.bps:
            seconds = links.clock.monotonic() - at
            afforded = affordable_subset(self._flat.count, self._spec.bits, seconds, self._spec.bps)
        return next_listening(
            self._spec,
            followed=self.version is not None,
            fitted=self._fitted,
            steps=(links.counter.total - tokens) // spec.batch_tokens,
            refresh_steps=spec.anchors.refresh_steps,
            subset=afforded,
        )

    async def _exchange(self, replica: Replica, choice: Listening, offset: int) -> int:
        """One exchange. Returns the replica's inner steps."""
        links = self._links
        opening = pb.GossipOpen(
            run_id=links.run.run_id,
            protocol=PROTOCOL_VERSION,
            peer_id=links.peer_id,
            stage=self.stage,
            weight_version=self.version or 0,
            committed=links.counter.to_proto(),
            count=self._flat.count,
            segment_blocks=SEGMENT_BLOCKS,
            exchange=links.rng.getrandbits(64),
            subset=choice.subset,
            offset=offset,
            bits=choice.bits,
            listening=True,
        )
        async with links.transport.gossip(replica.address) as duplex:
            await duplex.send(pb.GossipMessage(open=opening))
            still = OuterStep(self._flat, 0.0)
            timeout_s = links.run.spec.gossip.timeout_s
            exchange = Exchange(duplex, aiter(duplex), self._flat, still, links.worker, timeout_s)
            reply = (await exchange.next("open")).open
            check_open(opening, reply)
            links.counter.merge(reply.committed)
            self._check_version(reply.weight_version)
            report = await exchange.run(opening, reply, opener=True)
        links.metrics.count("anchor_follow_bytes", report.bytes_sent + report.bytes_received)
        return reply.weight_version

    def _check_version(self, version: int) -> None:
        """What is measured on these weights is dated by it, and refused when it cannot be. Raises MismatchError."""
        steps = self._links.counter.total // self._links.run.spec.batch_tokens
        if version > 2 * steps + _SPARE_STEPS:
            raise MismatchError(f"weights of step {version}, where the run's tokens make {steps}")
