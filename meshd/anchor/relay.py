"""A replica's side of the spreading of priors: take what is offered, check it, use it, pass it on (docs/priors.md)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from meshd import PROTOCOL_VERSION
from meshd.anchor.notices import MAX_AUTHORS, MAX_NOTICES, Board, Bounds, Entry, Key, authentic, opened, wrong
from meshd.anchor.spreading import REPEAT_S, Offering, bundle_of
from meshd.anchor.wanted import Donor, Queue, Task, allowed_s
from meshd.clock import Clock
from meshd.errors import DataError, MeshdError, MismatchError, ResourceError
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.pipeline.stage import Replica
from meshd.priors.store import PRIOR
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore

log = logging.getLogger(__name__)

# Offers that wait to be looked at; of one peer.
_MOST_OFFERS, _MOST_OF_ONE = 64, 4
# Files that are fetched at a time; of those, from peers that have delivered only.
_FETCHERS, _RESERVED = 4, 2
# One line in so long for each peer that sends what cannot be.
_SAY_AGAIN_S = 10.0
_MOST_BLAMED = 256

Fetch = Callable[[str, str, int], Awaitable[object]]
"""(bundle, address, most bytes): bring a bundle into the store. Raises MeshdError."""


class User(Protocol):
    """What a stage does with priors of one kind and number."""

    async def take(self, notice: pb.Notice, data: bytes) -> None:
        """Check and use one, whose bytes hash to its name. Raises MismatchError when it is not what the notice says,
        another MeshdError when it cannot be used here."""

    def gone(self, notice: pb.Notice) -> None:
        """One that was taken is not on the board any more: it has a follower, or its author was put aside."""

    def needs(self, name: bytes) -> bool:
        """Whether the file of this name must stay, whoever announces it."""


class Wrong(Exception):
    """What came is not what was announced. Never leaves the module."""


class Relay:
    """`serve` answers offers, `run` does the rest."""

    def __init__(
        self,
        bounds: Bounds,
        users: Mapping[tuple[pb.PriorKind, int], User],
        store: BundleStore,
        fetch: Fetch,
        offering: Offering,
        others: Callable[[], Sequence[Replica]],
        address: Callable[[str], str | None],
        standing: Callable[[], tuple[int, int]],
        clock: Clock,
        metrics: Metrics,
        rng: random.Random,
    ) -> None:
        """users: of the kinds and numbers that this replica uses. others: the other replicas of its stage. address: of
        a peer, by its record. standing: (inner steps in the weights here, global tokens known)."""
        self.board = Board()
        self._bounds, self._users, self._store, self._fetch = bounds, users, store, fetch
        self._offering, self._others = offering, others
        self._address, self._standing = address, standing
        self._clock, self._metrics, self._rng = clock, metrics, rng
        self._offers: deque[pb.PriorOffer] = deque()
        self._queue = Queue()
        self._fresh: dict[Key, Entry] = {}  # to be passed on
        self._back: OrderedDict[str, list[Entry]] = OrderedDict()  # what replicas lack, by peer id
        self._blamed: OrderedDict[str, float] = OrderedDict()
        self._barred: OrderedDict[str, None] = OrderedDict()  # authors whose priors made things worse
        self._doomed: deque[Entry] = deque()  # others may still be fetching their files
        # Else an author's older one that was fetched meanwhile could be put over its newer one.
        self._taking = asyncio.Lock()
        self._event = asyncio.Event()

    async def serve(self, offer: pb.PriorOffer) -> pb.PriorAnswer:
        """Answer an offer at once; it is looked at later. Raises MismatchError."""
        if offer.run_id != self._bounds.run_id or offer.protocol != PROTOCOL_VERSION:
            raise MismatchError(f"an offer of run {offer.run_id[:40]!r}, protocol {offer.protocol}")
        if len(offer.notices) > MAX_NOTICES:
            raise MismatchError(f"an offer of {len(offer.notices)} notices; at most {MAX_NOTICES} are taken")
        if self._address(offer.peer_id) is None:
            # Files are fetched where a record says that the peer is: else anybody could be made to connect anywhere.
            raise MismatchError(f"an offer by {offer.peer_id[:64]!r}, who has no record here yet")
        seen = self.board.seen()
        waiting = sum(other.peer_id == offer.peer_id for other in self._offers)
        if len(self._offers) < _MOST_OFFERS and waiting < _MOST_OF_ONE:
            self._offers.append(offer)
            self._wake()
        return pb.PriorAnswer(seen=[*(_seen(entry) for entry in self._queue.entries), *seen][:256])

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look())
            tasks.create_task(self._pass_on())
            tasks.create_task(self._repeat())
            for number in range(_FETCHERS):
                tasks.create_task(self._bring(proven=number < _RESERVED))

    def bar(self, author: str, reason: str) -> None:
        """Take nothing more of an author: what it said has made things worse."""
        self._barred[author] = None
        if len(self._barred) > _MOST_BLAMED:
            self._barred.popitem(last=False)
        self._refuse("", author, reason)
        self._gone(self.board.remove(author))

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    # ---- what is offered --------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            while not self._offers:
                await self._event.wait()
            offer = self._offers.popleft()
            if (address := self._address(offer.peer_id)) is None:
                continue  # gone meanwhile
            donor = Donor(offer.peer_id, address)
            entries = [entry for signed in offer.notices if (entry := self._read(signed, donor)) is not None]
            new = [entry for entry in entries if self._is_news(entry, donor)]
            honest = await asyncio.to_thread(lambda entries: [authentic(entry) for entry in entries], new)
            for entry, signed in zip(new, honest, strict=True):
                if signed:
                    self._queue.offered(entry, donor, self._clock.monotonic())
                    self._wake()
                else:
                    self._refuse(donor.peer_id, entry.notice.author, "its author has not signed it")
            self._owe(offer, entries)

    def _read(self, signed: pb.SignedNotice, donor: Donor) -> Entry | None:
        entry = opened(signed)
        if isinstance(entry, str):
            self._refuse(donor.peer_id, "", entry)
            return None
        version, counted = self._standing()
        problem = wrong(entry.notice, self._bounds, self._clock.time(), version, counted)
        if problem is not None:
            self._refuse(donor.peer_id, entry.notice.author, problem)
            return None
        return entry

    def _is_news(self, entry: Entry, donor: Donor) -> bool:
        """Whether this peer uses it and does not have it. An older one is no fault: the other may not know better."""
        key = entry.key
        if (key.kind, key.number) not in self._users or key.author in self._barred:
            return False
        if self.board.contradicts(entry):
            # Not yet known to be its author's.
            self._refuse(donor.peer_id, "", "another notice of its author has the same version")
        # Too soon is no fault either, and is not remembered: it may be offered again later.
        return self._is_wanted(entry)

    def _owe(self, offer: pb.PriorOffer, entries: Sequence[Entry]) -> None:
        """What the other replica lacks, by an offer of all that it has."""
        if not offer.whole or not any(other.peer_id == offer.peer_id for other in self._others()):
            return
        theirs = {entry.key: entry.notice.version for entry in entries}
        lacks = [entry for entry in self.board.entries if theirs.get(entry.key, 0) < entry.notice.version]
        if lacks:
            self._back[offer.peer_id] = lacks
            self._wake()

    # ---- files ------------------------------------------------------------------------------------------------------

    async def _bring(self, proven: bool) -> None:
        """proven: only from peers that have delivered: others cannot keep these fetchers busy."""
        while True:
            task = self._queue.begin(self._clock.monotonic(), proven)
            if task is None:
                await self._event.wait()
                continue
            delivered: bool | None = None
            try:
                delivered = await self._obtain(task)
            except (MeshdError, OSError) as error:
                # Of this machine's disk, as a rule: no stranger's prior is worth this peer's work.
                event(log, "prior_not_kept", level=logging.WARNING, reason=str(error))
            finally:
                if delivered is None:
                    self._queue.cancel(task)
                else:
                    self._queue.end(task, delivered, self._clock.monotonic())
                self._wake()  # its donor is free, or another's turn

    async def _obtain(self, task: Task) -> bool | None:
        """Fetch a file and use it. Whether its donor has delivered; None: that cannot be told, and no more is done for
        it."""
        entry, donor = task.wanted.entry, task.donor
        if not self._is_wanted(entry):
            return None
        try:
            data = await self._fetched(entry.notice, donor)
        except Wrong as fault:
            self._refuse(donor.peer_id, "", str(fault))
            return False
        except ResourceError:
            raise
        except (MeshdError, TimeoutError) as error:
            event(log, "prior_not_brought", level=logging.DEBUG, peer=donor.peer_id[-8:], reason=str(error))
            return False
        async with self._taking:
            return await self._accept(entry, donor, data)

    def _is_wanted(self, entry: Entry) -> bool:
        """Again when its file is here: its author's next may have been taken meanwhile."""
        if entry.key.author in self._barred or entry.notice.version <= self.board.version(entry.key):
            return False
        _, counted = self._standing()
        return not self.board.too_soon(entry, self._bounds, self._clock.monotonic(), counted)

    async def _fetched(self, notice: pb.Notice, donor: Donor) -> bytes:
        bundle = bundle_of(notice.kind, notice.name)
        async with asyncio.timeout(allowed_s(notice.size_bytes)):
            await self._fetch(bundle, donor.address, notice.size_bytes)
        return await asyncio.to_thread(self._file, bundle, notice)

    def _file(self, bundle: str, notice: pb.Notice) -> bytes:
        """In a thread. It may have been here before, under another notice."""
        most = self._bounds.most_bytes[notice.kind, notice.number]
        try:
            entry = self._store.manifest(bundle).file(PRIOR)
            if entry is None or entry.size > most:
                raise Wrong("its bundle is none of a prior")
            data = self._store.path(bundle, PRIOR).read_bytes()
            if hashlib.sha256(data).digest() != notice.name:
                raise Wrong("its file is not the one announced")
            return data
        except (DataError, Wrong):
            self._store.delete(bundle)
            raise

    async def _accept(self, entry: Entry, donor: Donor, data: bytes) -> bool | None:
        """Returns as `_obtain`."""
        notice, key = entry.notice, entry.key
        self._metrics.count("prior_bytes_received", len(data))
        if not self._is_wanted(entry):
            await self._delete(entry)
            return None
        try:
            if len(data) != notice.size_bytes:
                raise MismatchError(f"a file of {len(data)} bytes, announced with {notice.size_bytes}")
            await self._users[key.kind, key.number].take(notice, data)
        except MismatchError as fault:
            self.board.pass_over(entry)  # whoever has not checked it yet will offer it again
            await self._delete(entry)
            self._refuse(donor.peer_id, notice.author, str(fault))
            return False
        except MeshdError as error:
            event(log, "prior_not_used", level=logging.WARNING, author=notice.author[-8:], reason=str(error))
            return None
        self._gone(self.board.add(entry))
        self.board.took(entry, self._clock.monotonic(), self._standing()[1])
        self._fresh[key] = entry
        self._wake()
        while len(self._doomed) > MAX_AUTHORS:
            await self._delete(self._doomed.popleft())
        self._metrics.count("priors_heard")
        event(
            log,
            "prior_heard",
            kind=pb.PriorKind.Name(notice.kind).removeprefix("PRIOR_KIND_").lower(),
            number=notice.number,
            author=notice.author[-8:],
            peer=donor.peer_id[-8:],
            weight_version=notice.weight_version,
            size_bytes=len(data),
        )
        return True

    def _gone(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._fresh.pop(entry.key, None)
            self._users[entry.key.kind, entry.key.number].gone(entry.notice)
            self._doomed.append(entry)

    async def _delete(self, entry: Entry) -> None:
        """Its file, unless it is also one that stays, or is wanted: a liar may announce another's."""
        notice = entry.notice
        others = [*self.board.entries, *(other for other in self._queue.entries if other is not entry)]
        here = any(other.notice.name == notice.name for other in others)
        if not here and not self._users[notice.kind, notice.number].needs(notice.name):
            await asyncio.to_thread(self._store.delete, bundle_of(notice.kind, notice.name))

    def _refuse(self, peer: str, author: str, reason: str) -> None:
        self._metrics.count("priors_refused")
        now, blamed = self._clock.monotonic(), peer or author
        if now - self._blamed.get(blamed, -_SAY_AGAIN_S) < _SAY_AGAIN_S:
            return
        self._blamed[blamed] = now
        if len(self._blamed) > _MOST_BLAMED:
            self._blamed.popitem(last=False)
        event(
            log,
            "prior_refused",
            level=logging.WARNING,
            peer=peer[:64],
            author=author[:64],
            reason=reason[:300],
        )

    # ---- passing on -------------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """One offer after the other, within the run's rate: news to random replicas, and to single ones what they
        lack."""
        while True:
            if self._back:
                peer, entries = self._back.popitem(last=False)
                for replica in self._others():
                    if replica.peer_id == peer:
                        await self._offering.offer(replica, entries)
            elif self._fresh:
                entry = self._fresh.pop(next(iter(self._fresh)))
                await self._offering.spread(self._others(), [entry], self._rng)
            else:
                await self._event.wait()

    async def _repeat(self) -> None:
        """All that this replica has, to a random other one, which then offers what is missing. A newcomer begins with
        that."""
        while True:
            if others := self._others():
                await self._offering.offer(self._rng.choice(others), self.board.entries, whole=True)
            await self._clock.sleep(REPEAT_S * (0.5 + self._rng.random()))


def _seen(entry: Entry) -> pb.Seen:
    return pb.Seen(
        author=entry.key.author, kind=entry.key.kind, number=entry.key.number, version=entry.notice.version
    )
