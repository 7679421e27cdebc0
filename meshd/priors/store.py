"""The codec priors that a peer has: on the disk, so that they can be fetched and outlive a restart, and in memory, so
that decoding never waits for the disk (DESIGN section 3)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

from meshd.errors import DataError, MismatchError
from meshd.observe.log import event
from meshd.priors.boundary import BoundaryPrior, most_bytes
from meshd.state.bundle import BundleStore
from meshd.transport.base import NotHere

log = logging.getLogger(__name__)

PRIOR = "prior.safetensors"
"""File name in a bundle `prior/HASH`."""
_PREFIX = "prior/"


def bundle_of(name: bytes) -> str:
    """The bundle that holds the prior of this name (32 bytes)."""
    return _PREFIX + name.hex()


class PriorStore:
    """Keeps the `keep` newest priors of each boundary, and every one that is held; deletes the others.

    What a stored input, or a frame under way, refers to is held: `hold` and `release` count. Lookups are in memory.
    On the event loop only.
    """

    def __init__(self, store: BundleStore, hidden: int, rank: int, boundaries: int, keep: int = 3) -> None:
        """hidden, rank: of the run's model and token features; boundaries: priors of other ones are refused."""
        self._store, self._hidden, self.rank = store, hidden, rank
        self._boundaries, self._keep = boundaries, keep
        self._priors: dict[bytes, BoundaryPrior] = {}
        self._held = Counter[bytes]()
        self._doomed = set[bytes]()  # forgotten, and still on the disk
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Take up what is on the disk. What cannot be used is deleted."""
        async with self._writing:
            for bundle in await asyncio.to_thread(self._bundles):
                try:
                    prior = await asyncio.to_thread(self._read, bundle)
                except (DataError, MismatchError) as fault:
                    event(log, "prior_dropped", level=logging.WARNING, bundle=bundle, reason=str(fault))
                    await asyncio.to_thread(self._store.delete, bundle)
                    continue
                self._priors[prior.name] = prior
            await self._tidy()

    async def put(self, data: bytes, hold: bool = False) -> BoundaryPrior:
        """Keep a prior: its bytes as its author wrote them. Again, or when it is too old to be kept: no effect. hold:
        as `hold` does, so that it is kept though others say that they are newer.

        Raises MismatchError when it is no prior of this run, ResourceError when the disk cannot take it.
        """
        prior = await asyncio.to_thread(self._checked, data)
        async with self._writing:
            if prior.name not in self._priors:
                await asyncio.to_thread(self._store.write, bundle_of(prior.name), {PRIOR: data}, {})
                self._keep_here(prior)
                if hold:
                    self._held[prior.name] += 1
                await self._tidy()
            elif hold:
                self._held[prior.name] += 1
        return prior

    async def take(self, name: bytes, boundary: int, latest: int | None = None) -> BoundaryPrior:
        """Take up a prior whose bundle has been fetched into the bundle store. latest: global tokens; one that says
        that it was measured later counts as measured then, while it is in memory.

        Raises NotHere when it has not; MismatchError when it is not what its name says, or of another boundary (whose
        newest a stranger must not choose), DataError when it is damaged, and deletes it then.
        """
        async with self._writing:
            prior = self._priors.get(name)
            if prior is None:
                prior = await asyncio.to_thread(self._read_or_delete, bundle_of(name), boundary)
                if latest is not None and prior.measured > latest:
                    prior = replace(prior, measured=latest)
                self._keep_here(prior)
                # A peer that makes no priors has no other occasion; what was just taken up is yet to be held.
                await self._sweep()
            return prior

    def get(self, name: bytes) -> BoundaryPrior | None:
        """The prior of this name, or None when it is not here."""
        return self._priors.get(name)

    def newest(self, boundary: int) -> BoundaryPrior | None:
        """The boundary's prior that was measured last; None: there is none yet."""
        return next(iter(self._of(boundary)), None)

    def hold(self, name: bytes) -> BoundaryPrior:
        """Keep a prior that is here until as many `release` have followed. Raises NotHere."""
        prior = self._priors.get(name)
        if prior is None:
            raise NotHere(f"prior {name.hex()[:16]} is not here")
        self._held[name] += 1
        return prior

    def release(self, name: bytes) -> None:
        """The end of a `hold`. What is old and no longer held goes from memory now, from the disk later."""
        if self._held[name] <= 0:
            raise ValueError(f"prior {name.hex()[:16]} is not held")
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]
            self._forget()

    def __len__(self) -> int:
        return len(self._priors)

    def _of(self, boundary: int) -> list[BoundaryPrior]:
        """Newest first; ties have an order that all peers agree on."""
        found = [prior for prior in self._priors.values() if prior.boundary == boundary]
        return sorted(found, key=lambda prior: (prior.measured, prior.name), reverse=True)

    def _keep_here(self, prior: BoundaryPrior) -> None:
        self._priors[prior.name] = prior
        self._doomed.discard(prior.name)

    def _forget(self) -> None:
        for boundary in range(self._boundaries):
            for prior in self._of(boundary)[self._keep :]:
                if prior.name not in self._held:
                    del self._priors[prior.name]
                    self._doomed.add(prior.name)

    async def _tidy(self) -> None:
        # Only what was forgotten goes: a bundle that is unknown here may be one that is just being fetched.
        self._forget()
        await self._sweep()

    async def _sweep(self) -> None:
        while self._doomed:
            await asyncio.to_thread(self._store.delete, bundle_of(self._doomed.pop()))

    # ---- on the disk, in a thread ---------------------------------------------------------------------------------

    def _bundles(self) -> list[str]:
        return [name for name in self._store.names() if name.startswith(_PREFIX)]

    def _read_or_delete(self, bundle: str, boundary: int) -> BoundaryPrior:
        try:
            prior = self._read(bundle)
            if prior.boundary != boundary:
                raise MismatchError(
                    f"a prior of boundary {prior.boundary} where one of {boundary} was expected"
                )
            return prior
        except (DataError, MismatchError):
            self._store.delete(bundle)
            raise

    def _read(self, bundle: str) -> BoundaryPrior:
        entry = self._store.manifest(bundle).file(PRIOR)
        size, most = 0 if entry is None else entry.size, most_bytes(self._hidden, self.rank)
        if not 0 < size <= most:
            raise MismatchError(f"bundle {bundle} has a prior of {size} bytes where {most} are the most")
        data = self._store.path(bundle, PRIOR).read_bytes()
        return self._checked(data, bytes.fromhex(bundle.removeprefix(_PREFIX)))

    def _checked(self, data: bytes, name: bytes | None = None) -> BoundaryPrior:
        prior = BoundaryPrior.from_bytes(data, self._hidden, self.rank, name)
        if prior.boundary >= self._boundaries:
            raise MismatchError(f"a prior of boundary {prior.boundary}; this run has {self._boundaries}")
        return prior
