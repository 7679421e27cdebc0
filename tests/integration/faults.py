"""A fault injector that knows where a microbatch is: it recognises the phases of its life, and strikes in one of them.

Stages are the three of `a0 | a1, b1 | a2`. Phases that messages show are seen on the network; those inside a peer by
wrapping what it does, in the thread that does it: what is struck there is struck half way.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from frozen import PROCESS, Freezer, FreezingLoop
from google.protobuf.message import Message
from swarm import Swarm

from meshd.pipeline.journal import Journal
from meshd.pipeline.runtime import StageRuntime
from meshd.proto import meshd_pb2 as pb
from meshd.state import stage_state
from meshd.transport.memory import Delivery

ORIGIN, REPLICAS, LAST = "a0", ("a1", "b1"), "a2"
# So that payloads and exchanges have a middle: a hidden state (16 KiB) takes four chunks, an exchange some segments.
CHUNK, SEGMENT = 4096, 1 << 17
_EVALUATIONS = 1 << 63


class Phase(Enum):
    """In the order of the issue. A phase is met at the middle stage, but for the ones said otherwise."""

    OFFERED = "offered"
    HALF_STREAMED = "half streamed"
    ACCEPTED = "accepted"
    FORWARD = "computing forward"
    SENT_ON = "sent on"
    WAITING = "waiting"  # while the last stage computes
    BACKWARD_HALF = "backward half streamed"  # by the last stage
    BACKWARD = "computing backward"
    RETURNED = "returned"
    COMMITTED = "committed"  # by the origin
    STEP = "inner step"
    GOSSIP = "gossip half done"
    SNAPSHOT = "snapshot half written"


class Fault(Enum):
    KILL = "kill"
    FREEZE = "freeze"  # for so long that the others notice
    PAUSE = "pause"  # a freeze that they do not notice
    CUT = "cut"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"


# Phases that a message shows: it can be harmed.
MESSAGES = {
    Phase.OFFERED: "offer",
    Phase.HALF_STREAMED: "chunk",
    Phase.ACCEPTED: "answer",
    Phase.SENT_ON: "chunk",
    Phase.BACKWARD_HALF: "chunk",
    Phase.RETURNED: "chunk",
    Phase.COMMITTED: "progress",
    Phase.GOSSIP: "done",
}
OF_MESSAGES = (Fault.DROP, Fault.DUPLICATE, Fault.REORDER, Fault.CORRUPT)
OF_PEERS = (Fault.KILL, Fault.FREEZE, Fault.PAUSE, Fault.CUT)


def makes_sense(phase: Phase, fault: Fault) -> bool:
    """Whether there is such a pair. Progress is a claim that nothing bears out: a damaged one is a lie about how far
    the run is, and whom to believe is not a matter of failover."""
    if fault in OF_PEERS:
        return True
    return phase in MESSAGES and (phase, fault) != (Phase.COMMITTED, Fault.CORRUPT)


PAIRS = [(phase, fault) for phase in Phase for fault in Fault if makes_sense(phase, fault)]


@dataclass(frozen=True)
class Moment:
    """A phase that is met: whose it is, and who is at the other end of its link."""

    phase: Phase
    peer: str
    other: str
    of: object = None
    """What it is a phase of: a microbatch, an exchange, a snapshot."""


@dataclass
class _Carried:
    """One attempt to carry a microbatch over one link. size: bytes of what is on its way."""

    sender: str
    receiver: str
    size: int


def died() -> BaseException:
    """What ends a thread or a task whose process is gone, at once: as those that waited for it are cancelled anyway,
    nobody sees it."""
    return asyncio.CancelledError("its process died")


class Phases:
    """Recognises phases, and applies the fault that is armed at the first moment of its phase.

    Make it before the swarm; `attach` it to the swarm then. met: how often each phase of each microbatch was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._freezer = Freezer(monkeypatch)
        self._freezing: asyncio.Task[None] | None = None
        self._swarm: Swarm | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._armed: tuple[Phase, Fault, Callable[[Moment], None]] | None = None
        self._carried: dict[tuple[str, int, int, int], _Carried] = {}
        self._exchanges: dict[tuple[str, str], int] = {}
        self._late: dict[tuple[str, str, str], Message] = {}
        self._watching: tuple[str, str] | None = None
        self._writing = threading.local()
        self._dying: set[str] = set()
        self._torn: dict[str, Path] = {}
        self.met: Counter[tuple[Phase, object]] = Counter()
        self.on_kill: Callable[[str], None] = lambda name: None
        for module in ("meshd.transport.chunks", "meshd.gossip.exchange"):
            monkeypatch.setattr(f"{module}.CHUNK_BYTES", CHUNK)
        for module in ("meshd.gossip.exchange", "meshd.gossip.service"):
            monkeypatch.setattr(f"{module}.SEGMENT_BLOCKS", SEGMENT)
        self._watch_computing(monkeypatch)
        self._watch_commits(monkeypatch)
        self._watch_snapshots(monkeypatch)

    def attach(self, swarm: Swarm) -> None:
        self._swarm, self._loop = swarm, asyncio.get_running_loop()
        swarm.network.tap = self._tap

    @property
    def swarm(self) -> Swarm:
        assert self._swarm is not None
        return self._swarm

    async def strike(self, phase: Phase, fault: Fault) -> Moment:
        """Apply `fault` at the next moment of `phase`, to the peer in it or its message; the moment. What was killed,
        frozen or cut is up again when this returns."""
        met: asyncio.Future[Moment] = asyncio.get_running_loop().create_future()
        self._armed = (phase, fault, met.set_result)
        async with asyncio.timeout(900.0):
            moment = await met
        await self._mend(moment, fault)
        return moment

    async def _mend(self, moment: Moment, fault: Fault) -> None:
        s, name = self.swarm, moment.peer
        match fault:
            case Fault.KILL:
                await asyncio.wait({s.running[name]})
                self._dying.discard(name)
                await s.clock.sleep(2.0)
                torn = self._torn.pop(name, None)
                if torn is not None:  # as a process leaves it that did not clear up
                    torn.mkdir()
                    (torn / stage_state.WEIGHTS).write_bytes(b"\0" * 1000)
                s.start(name, int(name[1:]))
            case Fault.FREEZE | Fault.PAUSE:
                assert self._freezing is not None
                await self._freezing
            case Fault.CUT:
                await s.clock.sleep(8.0)
                s.network.heal()

    # ---- the moment ---------------------------------------------------------------------------------------------

    def _meet(self, moment: Moment) -> Fault | None:
        """In the event loop. The fault, when it is this moment's; what befalls peers has begun then."""
        self.met[moment.phase, moment.of] += 1
        if self._armed is None or self._armed[0] != moment.phase:
            return None
        _, fault, told = self._armed
        self._armed = None
        s = self.swarm
        if fault is Fault.KILL:
            self.on_kill(moment.peer)
            self._dying.add(moment.peer)
            s.network.kill(f"{moment.peer}:1")
            s.running[moment.peer].cancel()
        elif fault in (Fault.FREEZE, Fault.PAUSE):
            seconds = 14.0 if fault is Fault.FREEZE else 3.0
            assert isinstance(self._loop, FreezingLoop)
            self._loop.freeze(moment.peer)
            # In nobody's context: it must not be frozen itself.
            self._freezing = Context().run(s.tasks.create_task, self._freezer.freeze(s, moment.peer, seconds))
        elif fault is Fault.CUT:
            s.cut([moment.peer], [moment.other])
        # Nor may what it wakes.
        assert self._loop is not None
        Context().run(self._loop.call_soon, told, moment)
        return fault

    def _meet_in_thread(self, moment: Moment) -> Fault | None:
        """From a thread that computes; it stands still meanwhile."""
        assert self._loop is not None
        if threading.current_thread() is threading.main_thread():
            return self._meet(moment)
        done, fault = threading.Event(), list[Fault | None]()

        def meet() -> None:
            fault.append(self._meet(moment))
            done.set()

        self._loop.call_soon_threadsafe(meet)
        done.wait()
        return fault[0]

    def _name_of(self, runtime: StageRuntime) -> str:
        """The peer that a stage's arithmetic is of; empty: none that is up."""
        for name, peer in self.swarm.peers.items():
            if getattr(peer.role, "_runtime", None) is runtime:
                return name
        return ""

    # ---- inside peers -------------------------------------------------------------------------------------------

    def _watch_computing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward, head, backward, step = (
            StageRuntime.forward,
            StageRuntime.head,
            StageRuntime.backward,
            StageRuntime._step,
        )

        def at(phase: Phase, runtime: StageRuntime, of: object, other: str = ORIGIN) -> None:
            name = self._name_of(runtime)
            if name in REPLICAS and self._meet_in_thread(Moment(phase, name, other, of)) is Fault.KILL:
                raise died()

        def forwarding(runtime: StageRuntime, hop: int, work: Any, *rest: Any) -> Any:
            at(Phase.FORWARD, runtime, work.key[3:])
            return forward(runtime, hop, work, *rest)

        def heading(runtime: StageRuntime, hop: int, work: Any, *rest: Any) -> Any:
            if self._name_of(runtime) == LAST:
                waits = self._carried[(*work.key[3:], hop)].sender
                self._meet_in_thread(Moment(Phase.WAITING, waits, LAST, work.key[3:]))
            return head(runtime, hop, work, *rest)

        def returning(runtime: StageRuntime, hop: int, work: Any, *rest: Any) -> Any:
            at(Phase.BACKWARD, runtime, work.key[3:])
            return backward(runtime, hop, work, *rest)

        def stepping(runtime: StageRuntime, *rest: Any) -> Any:
            at(Phase.STEP, runtime, (id(runtime), runtime.version))
            return step(runtime, *rest)

        monkeypatch.setattr(StageRuntime, "forward", forwarding)
        monkeypatch.setattr(StageRuntime, "head", heading)
        monkeypatch.setattr(StageRuntime, "backward", returning)
        monkeypatch.setattr(StageRuntime, "_step", stepping)

    def _watch_commits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        commit, write = Journal.commit, Journal._write

        def writing(journal: Journal, line: str) -> None:
            # A task that is cancelled may come to some more lines before it hears of it; a process that died does not.
            if PROCESS.get() in self._dying:
                raise died()
            write(journal, line)

        monkeypatch.setattr(Journal, "_write", writing)

        def committing(journal: Journal, sequence: int, tokens: int) -> None:
            commit(journal, sequence, tokens)
            if self._armed is None or self._armed[1] not in OF_MESSAGES:
                self._meet(Moment(Phase.COMMITTED, ORIGIN, REPLICAS[0], sequence))

        monkeypatch.setattr(Journal, "commit", committing)

    def _watch_snapshots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write, tensors = stage_state.write_stage, stage_state.write_tensors

        def writing(store: Any, name: str, *rest: Any) -> Any:
            self._writing.what = (store.root.parts, name)
            try:
                return write(store, name, *rest)
            finally:
                self._writing.what = ((), "")

        def halfway(path: Path, *rest: Any) -> None:
            tensors(path, *rest)
            parts, name = getattr(self._writing, "what", ((), ""))
            peer = next((peer for peer in REPLICAS if peer in parts), "")
            if name.startswith("part/") and peer:
                other = next(replica for replica in REPLICAS if replica != peer)
                fault = self._meet_in_thread(Moment(Phase.SNAPSHOT, peer, other, (peer, name)))
                if fault is Fault.KILL:
                    self._torn[peer] = path.parent
                    raise died()

        monkeypatch.setattr("meshd.peer.snapshots.write_stage", writing)
        monkeypatch.setattr(stage_state, "write_tensors", halfway)

    # ---- on the network -----------------------------------------------------------------------------------------

    def _tap(self, source: str, target: str, message: Message) -> Sequence[Delivery]:
        fault = None
        sender, receiver = source.partition(":")[0], target.partition(":")[0]
        moment = None
        if isinstance(message, pb.LinkMessage):
            moment = self._of_link(sender, receiver, message)
        elif isinstance(message, pb.GossipMessage):
            moment = self._of_gossip(sender, receiver, message)
        if moment is not None:
            fault = self._meet(moment)
        stream = (source, target, type(message).__name__)
        if fault is Fault.REORDER:
            self._late[stream] = message
            return []
        deliveries = _harmed(message) if fault is Fault.CORRUPT else [Delivery(message)]
        if fault is Fault.DROP:
            deliveries = []
        elif fault is Fault.DUPLICATE:
            deliveries *= 2
        late = self._late.pop(stream, None)
        return deliveries if late is None else [*deliveries, Delivery(late)]

    def _of_link(self, sender: str, receiver: str, message: pb.LinkMessage) -> Moment | None:
        kind = message.WhichOneof("body") or ""
        if kind == "progress":
            # Of a commit, when it is the message that is to be harmed.
            armed = self._armed is not None and self._armed[1] in OF_MESSAGES
            return Moment(Phase.COMMITTED, sender, receiver) if armed and sender == ORIGIN else None
        body = getattr(message, kind)
        if kind not in ("offer", "answer", "chunk", "gradient") or body.id.sequence >= _EVALUATIONS:
            return None
        of = (body.id.origin, body.id.sequence, body.id.attempt)
        key = (*of, body.hop)
        match kind:
            case "offer":
                self._carried[key] = _Carried(sender, receiver, body.hidden.payload_bytes)
                return Moment(Phase.OFFERED, receiver, sender, of) if body.hop == 1 else None
            case "gradient":
                self._carried[key].size = body.gradient.payload_bytes
                return None
            case "answer":
                taken = body.hop == 1 and body.verdict == pb.Answer.VERDICT_ACCEPTED
                return Moment(Phase.ACCEPTED, sender, receiver, of) if taken else None
        carried = self._carried[key]
        end = body.offset + len(body.data)
        down, last = sender == carried.sender, end == carried.size
        half = not last and body.offset < carried.size / 2 <= end
        match body.hop, down:
            case 1, True if half:
                return Moment(Phase.HALF_STREAMED, receiver, sender, of)
            case 2, True if last:
                return Moment(Phase.SENT_ON, sender, receiver, of)
            case 2, False if half:
                return Moment(Phase.BACKWARD_HALF, sender, receiver, of)
            case 1, False if last:
                return Moment(Phase.RETURNED, sender, receiver, of)
        return None

    def _of_gossip(self, sender: str, receiver: str, message: pb.GossipMessage) -> Moment | None:
        pair = (min(sender, receiver), max(sender, receiver))
        if message.HasField("open"):
            opened = message.open
            self._exchanges[pair] = math.ceil(opened.count / opened.subset / opened.segment_blocks)
            return None
        if not message.HasField("done") or pair != REPLICAS:
            return None
        segments = self._exchanges[pair]
        assert segments > 1, "an exchange has a middle"
        # The one that says so first: the other is then told nothing, or moves alone.
        half = message.done.segment == segments // 2 and self._watching != pair
        self._watching = pair if half else None
        return Moment(Phase.GOSSIP, sender, receiver, pair) if half else None


def _harmed(message: Message) -> list[Delivery]:
    """The message with some bits of it changed: such that what it says is another thing, of the same form."""
    if isinstance(message, pb.GossipMessage):
        message.done.checksum ^= 1
        return [Delivery(message)]
    assert isinstance(message, pb.LinkMessage)
    match message.WhichOneof("body"):
        case "offer":
            message.offer.hidden.checksum ^= 1
        case "answer":
            message.answer.verdict = 64  # type: ignore[assignment]  # none of this protocol's
        case "chunk":
            data = bytearray(message.chunk.data)
            data[len(data) // 2] ^= 0x10
            message.chunk.data = bytes(data)
    return [Delivery(message)]
