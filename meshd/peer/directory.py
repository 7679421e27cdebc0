"""What one peer knows of the swarm, and what it says of itself."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshd import PROTOCOL_VERSION
from meshd.clock import Clock
from meshd.discovery.records import hello_of
from meshd.discovery.registry import Registry
from meshd.errors import MeshdError, NetworkError
from meshd.observe.log import event
from meshd.optim.schedule import TokenCounter
from meshd.peer.lost import Roster
from meshd.pipeline.stage import Replica
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Transport

log = logging.getLogger(__name__)

RENEW_S = 3.0
# A record outlives some lost renewals; a peer that died is noticed by its streams long before.
LIFETIME_S = 30.0

# A record that ends so soon has not been renewed for five turns: the peer is asked itself.
_UNRENEWED_S = 12.0
_ANSWER_S = 3.0
_SAY_AGAIN_S = 300.0
_MOST_COUNTS = 64
_KEPT = "the registry shows no renewal of its record, but it answers"

_SERVING = (pb.PEER_STATE_WORKING, pb.PEER_STATE_FINISHED)


@dataclass
class Self:
    """This peer, as it announces itself. Mutable: the daemon changes it as it goes."""

    peer_id: str
    name: str
    role: pb.Role
    run_id: str
    incarnation: int
    address: str = ""
    stage: int = -1
    state: pb.PeerState = pb.PEER_STATE_STARTING
    maddrs: Sequence[str] = ()
    weight_version: int = 0
    tokens_per_s: float = 0.0
    claimed: float = 0.0
    capacity_tokens_per_s: float = 0.0
    memory_bytes: int = 0
    pinned: bool = False
    moving_to: int = -1
    moving_since: float = 0.0


@dataclass
class Directory:
    """Registry, kept fresh. `on_change` is called after every refresh."""

    me: Self
    registry: Registry
    counter: TokenCounter
    clock: Clock
    on_change: Callable[[], None] = lambda: None
    transport: Transport | None = None
    _version: int = field(default=0, init=False)
    _unannounced: str = field(default="", init=False)  # why, as last logged
    _kept: dict[str, float] = field(default_factory=dict, init=False)  # when it was last said
    _roster: Roster = field(default_factory=Roster, init=False)
    _announcing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def announce(self) -> None:
        """Publish this peer's record as it is now. A failure is logged, once for each reason; the next renewal tries
        again."""
        # One at a time: a record that arrives after a newer one is refused, and looks like a fault.
        async with self._announcing:
            await self._announce()

    async def _announce(self) -> None:
        self._version += 1
        try:
            await self.registry.announce(self.record())
        except NetworkError as error:
            if str(error) != self._unannounced:
                self._unannounced = str(error)
                hint = "working on with the peers that are known"
                event(log, "announce_failed", level=logging.WARNING, reason=self._unannounced, hint=hint)
            return
        if self._unannounced:
            self._unannounced = ""
            event(log, "announced_again")

    def record(self) -> pb.Record:
        """This peer, as it is now."""
        me = self.me
        return pb.Record(
            run_id=me.run_id,
            peer_id=me.peer_id,
            name=me.name,
            role=me.role,
            stage=me.stage,
            state=me.state,
            address=me.address,
            maddrs=list(me.maddrs)[:8],
            protocol=PROTOCOL_VERSION,
            incarnation=me.incarnation,
            version=self._version,
            weight_version=me.weight_version,
            tokens_per_s=me.tokens_per_s,
            expires=self.clock.time() + LIFETIME_S,
            committed=self._counts(),
            claimed=me.claimed,
            capacity_tokens_per_s=me.capacity_tokens_per_s,
            memory_bytes=me.memory_bytes,
            pinned=me.pinned,
            moving_to=me.moving_to,
            moving_since=me.moving_since,
        )

    def _counts(self) -> list[pb.Count]:
        """A record is at most 10 KB: of more origins than fit, each renewal shows the next ones."""
        counts = self.counter.to_proto()
        if len(counts) <= _MOST_COUNTS:
            return counts
        start = self._version * _MOST_COUNTS % len(counts)
        return (counts + counts)[start : start + _MOST_COUNTS]

    async def refresh(self) -> Sequence[pb.Record]:
        """Read the registry anew; ask those themselves whose records it no longer renews."""
        await self.registry.refresh()
        await self._ask_silent()
        peers = self.registry.peers
        for peer in peers:
            self.counter.merge(peer.committed)
        self._report(peers)
        self.on_change()
        return peers

    async def _ask_silent(self) -> None:
        """Keep those known who live, although the registry shows no renewal of theirs: it cannot be read here, or not
        be written to there. Whoever does not answer either counts as lost when its record ends, and is asked again."""
        end = self.clock.time() + _UNRENEWED_S
        silent = [
            peer for peer in self.peers if peer.expires < end and peer.state != pb.PEER_STATE_UNSPECIFIED
        ]
        lost = self._roster.due(self.clock.monotonic())
        answers = await asyncio.gather(*(self._ask(peer) for peer in [*silent, *lost]))
        for number, (peer, record) in enumerate(zip([*silent, *lost], answers, strict=True)):
            if record is not None:
                self.registry.heard(record)
                if number < len(silent):
                    self._say_kept(peer)

    def _say_kept(self, peer: pb.Record) -> None:
        now = self.clock.monotonic()
        if now - self._kept.get(peer.peer_id, -math.inf) >= _SAY_AGAIN_S:
            self._kept[peer.peer_id] = now
            event(log, "peer_kept", peer=peer.name or peer.peer_id[-8:], reason=_KEPT)

    async def _ask(self, peer: pb.Record) -> pb.Record | None:
        """What a peer says of itself; None when it does not answer, or another one does."""
        if self.transport is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self.transport.hello(peer.address, hello_of(self.record()))
        except (MeshdError, TimeoutError):
            return None
        record = reply.record
        if record.peer_id != peer.peer_id or record.run_id != self.me.run_id:
            return None
        record.address = peer.address
        return record

    async def run(self) -> None:
        """Announce and refresh until cancelled."""
        while True:
            await self.announce()
            await self.refresh()
            await self.clock.sleep(RENEW_S)

    @property
    def peers(self) -> Sequence[pb.Record]:
        """Records of the others at the last refresh."""
        return [peer for peer in self.registry.peers if peer.protocol == PROTOCOL_VERSION]

    def stage_peers(self, stage: int) -> list[pb.Record]:
        """Records of the others that serve a stage."""
        return [p for p in self.peers if p.role == pb.ROLE_STAGE and p.stage == stage and p.state in _SERVING]

    def seeds(self) -> list[pb.Record]:
        return [p for p in self.peers if p.role == pb.ROLE_SEED]

    def replicas(self, stage: int) -> list[Replica]:
        return [_replica(peer) for peer in self.stage_peers(stage)]

    def ahead(self, stage: int, version: int) -> list[Replica]:
        """Those that serve a stage with at least so many inner steps in their weights, by what they last announced."""
        return [_replica(peer) for peer in self.stage_peers(stage) if peer.weight_version >= version]

    def origin(self, peer_id: str) -> Replica | None:
        """A peer of stage 0, also one that leaves: it still takes what is its own."""
        found = (p for p in self.peers if p.peer_id == peer_id and p.role == pb.ROLE_STAGE and p.stage == 0)
        peer = next((p for p in found if p.state in (*_SERVING, pb.PEER_STATE_DRAINING)), None)
        return None if peer is None else _replica(peer)

    def holds(self, peer_id: str) -> bool:
        """Whether a peer has claimed the own stage, working or not yet."""
        stage = self.me.stage
        return any(p.peer_id == peer_id and p.role == pb.ROLE_STAGE and p.stage == stage for p in self.peers)

    def live_replicas(self) -> int:
        """Working replicas of the own stage, this peer included."""
        return 1 + len(self.stage_peers(self.me.stage))

    def leads(self) -> bool:
        """Whether this peer is its stage's leader: of the working replicas, the one with the smallest peer id."""
        return all(self.me.peer_id < p.peer_id for p in self.stage_peers(self.me.stage))

    def donors(self, stage: int) -> list[str]:
        """Addresses of those who may have a stage's bundles: its replicas and the seeds."""
        return _addresses(self.stage_peers(stage)) + _addresses(self.seeds())

    def address(self, peer_id: str) -> str | None:
        """Where a peer can be reached; None: it has no record."""
        return next((p.address for p in self.peers if p.peer_id == peer_id and p.address), None)

    def everyone(self) -> list[str]:
        return _addresses(self.peers)

    def lost(self) -> list[tuple[pb.Record, float]]:
        """Last records of peers that vanished without taking leave, and for how many seconds they are away."""
        return self._roster.missing(self.clock.monotonic())

    def _report(self, peers: Iterable[pb.Record]) -> None:
        """One line for each peer that came or left; one for all that were lost, or are back, together."""
        # Of a peer without a state, a file says that it should be there; it has not said so itself.
        said = [peer for peer in peers if peer.state != pb.PEER_STATE_UNSPECIFIED]
        changes = self._roster.look(said, self.clock.time(), self.clock.monotonic())
        for name in changes.found:
            event(log, "peer_found", peer=name)
        for name in changes.left:
            event(log, "peer_gone", peer=name)
        if changes.lost:
            hint = "dead, or the network between is cut: they are asked again"
            event(log, "peers_lost", level=logging.WARNING, peers=", ".join(changes.lost), hint=hint)
        if changes.back:
            away_s = round(changes.back_after_s)
            event(log, "peers_back", peers=", ".join(changes.back), away_s=away_s)


def _replica(peer: pb.Record) -> Replica:
    return Replica(peer.peer_id, peer.name or peer.peer_id[-8:], peer.address)


def _addresses(peers: Iterable[pb.Record]) -> list[str]:
    return [peer.address for peer in peers]
