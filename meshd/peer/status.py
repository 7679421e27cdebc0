"""What this peer says about itself and, when asked, what the others say about themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from meshd.clock import Clock
from meshd.config.runspec import ResolvedRun
from meshd.errors import MeshdError
from meshd.observe.health import Health, reason_to_wait
from meshd.observe.metrics import Metrics
from meshd.peer.directory import LIFETIME_S, Directory, Self
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Transport

# A peer that does not answer in time has its cell say so; the rest is shown (C08).
_ANSWER_S = 3.0
_MAX_LOSSES = 1000


class StatusBoard:
    """Answers `Peer.Status`. The role's service fills in what it knows."""

    def __init__(self, me: Self, clock: Clock, metrics: Metrics) -> None:
        self._me, self._clock, self.metrics = me, clock, metrics
        self.run: ResolvedRun | None = None
        self.directory: Directory | None = None
        self.transport: Transport | None = None
        self.doing: Callable[[], str] = lambda: "starting"
        self.losses: Callable[[], Iterable[pb.LossPoint]] = tuple
        self.evaluations: list[pb.LossPoint] = []
        self.last_error: Callable[[], str] = str
        # Of the role: a good reason to do nothing now; empty: there is none.
        self.waiting: Callable[[], str] = str
        self.health: Callable[[], Health] | None = None
        # What others said last, and the points of those that have gone: they take them along otherwise.
        self._heard: dict[str, pb.StatusReply] = {}
        self._gone = pb.StatusReply()

    async def answer(self, request: pb.StatusRequest) -> pb.StatusReply:
        reply = self._own()
        if request.swarm and self.directory is not None and self.transport is not None:
            reply.peers.extend(await self._ask_all())
            there = {peer.peer_id for peer in reply.peers}
            reply.peers.extend(
                _missing(*peer) for peer in self.directory.lost() if peer[0].peer_id not in there
            )
            self._gather(reply)
        return reply

    def _own(self) -> pb.StatusReply:
        me = self._me
        reply = pb.StatusReply(
            self=pb.PeerStatus(
                peer_id=me.peer_id,
                name=me.name,
                role=me.role,
                stage=me.stage,
                state=me.state,
                address=me.address,
                weight_version=me.weight_version,
                tokens_per_s=me.tokens_per_s,
                doing=self.doing(),
                metrics=self.metrics.snapshot(),
                last_error=self._problems(),
            ),
            losses=list(self.losses())[-_MAX_LOSSES:],
            evaluations=self.evaluations,
            finished=me.state == pb.PEER_STATE_FINISHED,
        )
        if self.run is not None:
            reply.run_id, reply.run_name = self.run.run_id, self.run.spec.name
            reply.stop_tokens = self.run.spec.stop_tokens
        if self.directory is not None:
            reply.global_tokens = self.directory.counter.total
        return reply

    def _problems(self) -> str:
        """All that is wrong now: what the role says, the registry, and that nothing useful is done."""
        health = None if self.health is None else self.health()
        found = [
            self.last_error(),
            "" if self.directory is None else self.directory.registry.problem,
            "" if health is None or health.ok else health.why,
        ]
        return "; ".join(text for text in found if text)

    def waits(self) -> str:
        """A good reason of this peer to do no useful work now; empty: there is none."""
        directory, run = self.directory, self.run
        if directory is None or run is None:
            return ""
        me, total = self._me, directory.counter.total
        others = [stage for stage in range(run.stages) if stage != me.stage]
        return reason_to_wait(
            missing=[stage for stage in others if not directory.stage_peers(stage)],
            over=total >= run.spec.stop_tokens,
            evaluating=total == 0 and self.metrics.value("device_busy_share") > 0,
            alone="" if directory.peers else directory.registry.problem,
            own=self.waiting(),
        )

    async def _ask_all(self) -> list[pb.PeerStatus]:
        assert self.directory is not None
        answers = list(await asyncio.gather(*(self._ask(peer) for peer in self.directory.peers)))
        there = {peer.peer_id for peer in self.directory.peers}
        for peer_id in [peer_id for peer_id in self._heard if peer_id not in there]:
            self._gone = _points([self._gone, self._heard.pop(peer_id)])
        return answers

    async def _ask(self, peer: pb.Record) -> pb.PeerStatus:
        assert self.transport is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self.transport.status(peer.address, pb.StatusRequest())
        except (MeshdError, TimeoutError) as error:
            return _told(peer, f"does not answer: {str(error) or f'nothing in {_ANSWER_S:.0f} s'}")
        self._heard[peer.peer_id] = _points([reply])
        return reply.self

    def _gather(self, reply: pb.StatusReply) -> None:
        """Losses and evaluations of all origins, in order of time."""
        points = _points([self._gone, *self._heard.values(), reply])
        del reply.losses[:], reply.evaluations[:]
        reply.losses.extend(points.losses)
        reply.evaluations.extend(points.evaluations)


def _told(peer: pb.Record, doing: str, age_s: float = 0.0) -> pb.PeerStatus:
    """What is known of a peer that does not answer. age_s: for how long it has not."""
    return pb.PeerStatus(
        peer_id=peer.peer_id,
        name=peer.name,
        role=peer.role,
        stage=peer.stage,
        state=peer.state,
        address=peer.address,
        weight_version=peer.weight_version,
        doing=doing,
        age_s=age_s,
    )


def _missing(peer: pb.Record, away_s: float) -> pb.PeerStatus:
    # Its record had to end before it was taken for lost.
    return _told(peer, "lost: dead, or cut off from here; it is asked again", away_s + LIFETIME_S)


def _points(replies: Sequence[pb.StatusReply]) -> pb.StatusReply:
    """The newest losses and evaluations of these replies, each once (a peer that has gone may come back), in order."""
    losses = {(p.time, p.tokens, p.loss): p for reply in replies for p in reply.losses}
    evaluations = {p.tokens: p for reply in replies for p in reply.evaluations}
    return pb.StatusReply(
        losses=[losses[key] for key in sorted(losses)[-_MAX_LOSSES:]],
        evaluations=[evaluations[tokens] for tokens in sorted(evaluations)[-_MAX_LOSSES:]],
    )
