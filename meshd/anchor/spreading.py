"""How priors get from anchors to the stages that use them (docs/priors.md, "Spreading"): the side of whoever has one to
offer. The replica's is `meshd.anchor.relay`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from meshd import PROTOCOL_VERSION
from meshd.anchor.notices import MAX_NOTICES, Entry, Key, seal
from meshd.clock import Clock
from meshd.config.runspec import ResolvedRun
from meshd.errors import MeshdError
from meshd.identity import Identity
from meshd.model.cut import hops
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.pipeline.stage import Replica
from meshd.priors.store import PRIOR
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.transport.base import Transport

log = logging.getLogger(__name__)

FANOUT = 2
"""Replicas that a new prior is offered to by each that has it."""
REPEAT_S = 30.0
"""Between offers of all that a peer has: what answers lost messages, newcomers and partitions."""
# Replicas that are tried, of which FANOUT are wanted: some may be gone.
_TRIES = 6
# Files that peers were charged for, remembered.
_MOST_CHARGED = 4096
# Of each kind and number: others may still be fetching the one before.
_KEPT = 2

_FOLDERS = {pb.PRIOR_KIND_BOUNDARY: "prior", pb.PRIOR_KIND_WEIGHTS: "weights"}


def bundle_of(kind: pb.PriorKind, name: bytes) -> str:
    """The bundle with the file of this name (32 bytes)."""
    return f"{_FOLDERS[kind]}/{name.hex()}"


def user_stage(run: ResolvedRun, kind: pb.PriorKind, number: int) -> int:
    """The stage whose replicas use a prior: the one that sends over the boundary; the one whose weights it is of."""
    if kind == pb.PRIOR_KIND_WEIGHTS:
        return number
    return hops(run.resolved.layers, run.resolved.cut, run.resolved.tied)[number].stage


def drop_leftovers(store: BundleStore, *kinds: pb.PriorKind) -> None:
    """Delete the priors of these kinds that an earlier start has left: nobody knows of them any more. Blocking."""
    folders = tuple(f"{_FOLDERS[kind]}/" for kind in kinds)
    for bundle in store.names():
        if bundle.startswith(folders):
            store.delete(bundle)


class Bucket:
    """Bounds bytes to a rate. Pure. What is sent next may be over it; whoever comes then waits until that is paid."""

    def __init__(self, bps: int) -> None:
        """bps: bits a second; 0: no bound."""
        self._rate = bps / 8
        self._owed, self._at = 0.0, 0.0

    def wait_s(self, now: float) -> float:
        """How long to wait before more is sent."""
        if not self._rate:
            return 0.0
        self._owed = max(0.0, self._owed - (now - self._at) * self._rate)
        self._at = now
        return self._owed / self._rate

    def spend(self, count: int) -> None:
        """So many bytes are being sent. After `wait_s`."""
        self._owed += count


class Offering:
    """Offers notices to single peers, within the run's rate. They fetch the files where this peer's record says."""

    def __init__(
        self,
        peer_id: str,
        run: ResolvedRun,
        transport: Transport,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._peer_id, self._run_id = peer_id, run.run_id
        self._transport, self._clock, self._metrics = transport, clock, metrics
        self._bucket = Bucket(run.spec.anchors.bps)
        self._charged: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # peer ids and files
        self._turn = asyncio.Lock()  # to send: else many would find the bucket full at once

    async def offer(self, to: Replica, entries: Iterable[Entry], whole: bool = False) -> bool:
        """Offer some of what this peer has; whole: all of it. False: it was not reached, or refuses."""
        entries = list(entries)[-MAX_NOTICES:]
        request = pb.PriorOffer(
            run_id=self._run_id,
            protocol=PROTOCOL_VERSION,
            notices=[entry.signed for entry in entries],
            peer_id=self._peer_id,
            whole=whole,
        )
        async with self._turn:
            while (wait_s := self._bucket.wait_s(self._clock.monotonic())) > 0:
                await self._clock.sleep(wait_s)
            try:
                answer = await self._transport.offer(to.address, request)
            except MeshdError as error:
                event(log, "offer_failed", level=logging.DEBUG, peer=to.name, reason=str(error))
                return False
            seen = {Key(s.author, s.kind, s.number): s.version for s in answer.seen}
            # Who says again that it lacks a file is fetching it, or lies: it must not use up what is for others too.
            lacked = [
                entry.notice
                for entry in entries
                if seen.get(entry.key, 0) < entry.notice.version and self._charge(to.peer_id, entry.notice)
            ]
            size = sum(notice.size_bytes for notice in lacked)
            self._bucket.spend(size)
        self._metrics.count("priors_relayed", len(lacked))
        self._metrics.count("prior_bytes_sent", size)
        return True

    def _charge(self, peer_id: str, notice: pb.Notice) -> bool:
        """Whether a file is new to what a peer was charged for."""
        item = peer_id, notice.name
        if item in self._charged:
            return False
        self._charged[item] = None
        if len(self._charged) > _MOST_CHARGED:
            self._charged.popitem(last=False)
        return True

    async def spread(self, among: Sequence[Replica], entries: Sequence[Entry], rng: random.Random) -> None:
        """Offer to FANOUT random ones of them, others for those that are not reached."""
        reached = 0
        for replica in rng.sample(among, min(_TRIES, len(among))):
            reached += await self.offer(replica, entries)
            if reached >= FANOUT:
                return


class Publisher:
    """On an anchor: keeps its newest priors where others can fetch them, and brings their notices to the stages.

    `run` must be running (in the anchor's task group). The files are served by the peer's `Donor` over the same store.
    """

    def __init__(
        self,
        identity: Identity,
        run: ResolvedRun,
        store: BundleStore,
        transport: Transport,
        replicas: Callable[[int], Sequence[Replica]],
        clock: Clock,
        metrics: Metrics,
        rng: random.Random,
    ) -> None:
        """replicas: `Directory.replicas`, of a stage."""
        self._identity, self._run, self._store = identity, run, store
        self._replicas, self._clock, self._rng = replicas, clock, rng
        self._offering = Offering(identity.peer_id, run, transport, clock, metrics)
        self._newest: dict[Key, Entry] = {}
        self._kept: dict[Key, list[str]] = {}  # bundles, oldest first
        self._unoffered: dict[Key, Entry] = {}
        self._news = asyncio.Event()
        self._writing, self._begun = asyncio.Lock(), False

    async def publish(
        self,
        kind: pb.PriorKind,
        number: int,
        data: bytes,
        *,
        weight_version: int,
        measured: int,
        tokens: int,
        time: float | None = None,
    ) -> None:
        """Put a prior in the store and sign its notice; `run` offers it. kind: pb.PRIOR_KIND_BOUNDARY, data of
        BoundaryPrior.to_bytes(), number the boundary; or pb.PRIOR_KIND_WEIGHTS, data of
        `meshd.priors.weight_file.to_bytes`, number the stage. weight_version: of that stage (boundary: of the stage
        that sends over it). measured: the run's global tokens, for a boundary the same as in the data. tokens: label
        tokens measured on, at most anchors.passes microbatches. time: when the measurement began, in seconds since the
        epoch; None: now.

        Raises ResourceError when the disk cannot take it.
        """
        key = Key(self._identity.peer_id, kind, number)
        name, now = hashlib.sha256(data).digest(), self._clock.time()
        bundle = bundle_of(kind, name)
        async with self._writing:
            if not self._begun:
                await asyncio.to_thread(drop_leftovers, self._store, *_FOLDERS)
                self._begun = True
            await asyncio.to_thread(self._store.write, bundle, {PRIOR: data}, {})
        before = self._newest.get(key)
        # By the clock: versions grow over restarts as well.
        version = max(int(now * 1000), before.notice.version + 1 if before is not None else 0)
        notice = pb.Notice(
            run_id=self._run.run_id,
            author=key.author,
            kind=kind,
            number=number,
            name=name,
            size_bytes=len(data),
            version=version,
            weight_version=weight_version,
            measured=measured,
            time=now if time is None else time,
            tokens=tokens,
        )
        self._newest[key] = self._unoffered[key] = seal(notice, self._identity)
        self._news.set()
        kept = self._kept.setdefault(key, [])
        kept[:] = [*(other for other in kept if other != bundle), bundle]
        while len(kept) > _KEPT:
            await asyncio.to_thread(self._store.delete, kept.pop(0))

    async def run(self) -> None:
        """Offer what is published, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._offer())
            tasks.create_task(self._repeat())

    async def _offer(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unoffered:
                # Published again meanwhile: only the newest goes out.
                key = next(iter(self._unoffered))
                entry = self._unoffered.pop(key)
                stage = user_stage(self._run, key.kind, key.number)
                await self._offering.spread(self._replicas(stage), [entry], self._rng)

    async def _repeat(self) -> None:
        while True:
            await self._clock.sleep(REPEAT_S * (0.5 + self._rng.random()))
            for stage in range(self._run.stages):
                entries = [
                    entry
                    for key, entry in self._newest.items()
                    if user_stage(self._run, key.kind, key.number) == stage
                ]
                if entries and (replicas := self._replicas(stage)):
                    await self._offering.offer(self._rng.choice(replicas), entries)
