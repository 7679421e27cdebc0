"""A replica's side of the spreading of priors: take what is offered, check it, use it, pass it on (docs/priors.md)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshd import PROTOCOL_VERSION
from meshd.anchor.notices import MAX_AUTHORS, MAX_NOTICES, Board, Bounds, Entry, Key, authentic, opened, wrong
from meshd.anchor.spreading import REPEAT_S, Offering, bundle_of
from meshd.clock import Clock
from meshd.errors import DataError, MeshdError, MismatchError
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.pipeline.stage import Replica
from meshd.priors.store import PRIOR
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore

log = logging.getLogger(__name__)

# Offers that wait to be looked at; of one peer; files that wait to be fetched; peers that one may be fetched from.
_MOST_OFFERS, _MOST_OF_ONE, _MOST_WANTED, _MOST_DONORS = 64, 4, 64, 8
_FETCHERS = 4
# A whole file must be here after so long: one who sends a little every few seconds would keep others waiting for ever.
_FETCH_S = 120.0
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


@dataclass(frozen=True)
class Donor:
    peer_id: str
    address: str


@dataclass
class _Wanted:
    """A file to be fetched, and from whom."""

    entry: Entry
    donors: deque[Donor] = field(default_factory=lambda: deque(maxlen=_MOST_DONORS))


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
        self._wanted: OrderedDict[bytes, _Wanted] = OrderedDict()
        self._fetching = set[bytes]()
        self._fresh: dict[Key, Entry] = {}  # to be passed on
        self._back: OrderedDict[str, list[Entry]] = OrderedDict()  # what replicas lack, by peer id
        self._blamed: OrderedDict[str, float] = OrderedDict()
        self._barred: OrderedDict[str, None] = OrderedDict()  # authors whose priors made things worse
        self._doomed: deque[pb.Notice] = deque()  # others may still be fetching their files
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
        under_way = (wanted.entry for wanted in self._wanted.values())
        return pb.PriorAnswer(seen=[*(_seen(entry) for entry in under_way), *seen][:256])

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look())
            tasks.create_task(self._pass_on())
            tasks.create_task(self._repeat())
            for _ in range(_FETCHERS):
                tasks.create_task(self._bring())

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
                    self._want(entry, donor)
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
        return entry.notice.version > self.board.version(key)

    def _want(self, entry: Entry, donor: Donor) -> None:
        name = entry.notice.name
        if name not in self._wanted:
            if len(self._wanted) >= _MOST_WANTED:
                return  # it will be offered again
            self._wanted[name] = _Wanted(entry)
        donors = self._wanted[name].donors
        if donor not in donors:
            donors.append(donor)
        self._wake()

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

    async def _bring(self) -> None:
        while True:
            name = next((name for name in self._wanted if name not in self._fetching), None)
            if name is None:
                await self._event.wait()
                continue
            self._fetching.add(name)
            try:
                await self._obtain(self._wanted[name])
            except (MeshdError, OSError) as error:
                # Of this machine's disk, as a rule: no stranger's prior is worth this peer's work.
                event(log, "prior_not_kept", level=logging.WARNING, reason=str(error))
            finally:
                self._fetching.discard(name)
                del self._wanted[name]

    async def _obtain(self, wanted: _Wanted) -> None:
        """From one of those that offered it, one after the other."""
        entry = wanted.entry
        while wanted.donors and entry.notice.version > self.board.version(entry.key):
            donor = wanted.donors.popleft()
            try:
                data = await self._fetched(entry.notice, donor)
            except Wrong as fault:
                self._refuse(donor.peer_id, "", str(fault))
            except (MeshdError, TimeoutError) as error:
                event(
                    log, "prior_not_brought", level=logging.DEBUG, peer=donor.peer_id[-8:], reason=str(error)
                )
            else:
                async with self._taking:
                    await self._accept(entry, donor, data)
                return

    async def _fetched(self, notice: pb.Notice, donor: Donor) -> bytes:
        bundle = bundle_of(notice.kind, notice.name)
        async with asyncio.timeout(_FETCH_S):
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

    async def _accept(self, entry: Entry, donor: Donor, data: bytes) -> None:
        notice, key = entry.notice, entry.key
        self._metrics.count("prior_bytes_received", len(data))
        if key.author in self._barred or notice.version <= self.board.version(key):
            await self._delete(notice)
            return
        try:
            if len(data) != notice.size_bytes:
                raise MismatchError(f"a file of {len(data)} bytes, announced with {notice.size_bytes}")
            await self._users[key.kind, key.number].take(notice, data)
        except MismatchError as fault:
            self.board.pass_over(entry)  # whoever has not checked it yet will offer it again
            await self._delete(notice)
            self._refuse(donor.peer_id, notice.author, str(fault))
            return
        except MeshdError as error:
            event(log, "prior_not_used", level=logging.WARNING, author=notice.author[-8:], reason=str(error))
            return
        self._gone(self.board.add(entry))
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

    def _gone(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._fresh.pop(entry.key, None)
            self._users[entry.key.kind, entry.key.number].gone(entry.notice)
            self._doomed.append(entry.notice)

    async def _delete(self, notice: pb.Notice) -> None:
        """Its file, unless it is also one that stays: a liar may announce another's."""
        here = any(entry.notice.name == notice.name for entry in self.board.entries)
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
