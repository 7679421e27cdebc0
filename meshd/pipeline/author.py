"""The priors that a peer makes of its own boundaries: fitted from what it measured, brought to its downstream
neighbours, and only then used (DESIGN section 3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from meshd.clock import Clock
from meshd.errors import MeshdError
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.observe.trace import Tracer
from meshd.pipeline.crossing import Crossing
from meshd.pipeline.downstream import Downstream
from meshd.pipeline.exhaustion import with_memory
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats
from meshd.priors.store import PriorStore

log = logging.getLogger(__name__)

# Neighbours that have not fetched a new prior by then get safe frames until they have.
_SPREAD_S = 30.0


class Author:
    """links: the open ones over a boundary. changed: returns when one of them may have said something, or soon."""

    def __init__(
        self,
        store: PriorStore,
        crossings: Iterable[Crossing],
        links: Callable[[int], list[Downstream]],
        changed: Callable[[], Awaitable[None]],
        clock: Clock,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        """crossings: those that this peer is the upper end of. A prior from this peer's last time is used at once."""
        self._store, self._links, self._changed = store, links, changed
        self._clock, self._metrics, self._tracer = clock, metrics, tracer or Tracer()
        self._held: dict[int, bytes] = {}
        self._crossings = {crossing.boundary: crossing for crossing in crossings if crossing.adapts}
        # One prior of a boundary at a time: neighbours hold few.
        self._turns = {boundary: asyncio.Lock() for boundary in self._crossings}
        for crossing in self._crossings.values():
            prior = store.newest(crossing.boundary)
            if prior is not None:
                self._use(crossing, prior, trial=True)

    async def publish(self, crossing: Crossing, stats: BoundaryStats, measured: int) -> None:
        """Make a prior of what was measured, and use it once the neighbours have it. Where none comes of it (a full
        disk, no memory, too few tokens) the boundary is measured again. measured: the run's global tokens."""
        fitting = self._tracer.phase("coder", "fit prior")
        try:
            data = await asyncio.to_thread(
                fitting.around,
                with_memory,
                lambda: fit(stats, crossing.boundary, measured=measured).to_bytes(),
            )
            # Others' may be dated later than they were measured: what is made here is not to be forgotten for them.
            prior = await self._store.put(data, hold=True)
        except MeshdError as error:
            event(log, "no_prior", level=logging.WARNING, boundary=crossing.boundary, reason=str(error))
            crossing.measure()
            return
        try:
            async with self._turns[crossing.boundary]:
                if crossing.prior is not None:  # an anchor's has come meanwhile
                    return
                await self._spread(crossing.boundary, prior.name)
                self._use(crossing, prior)
        finally:
            self._store.release(prior.name)
        self._metrics.count("priors_fitted")
        event(
            log,
            "prior_fitted",
            boundary=crossing.boundary,
            prior=prior.name.hex()[:16],
            tokens=stats.tokens,
            size_bytes=len(data),
        )

    async def adopt(self, prior: BoundaryPrior) -> None:
        """Use an anchor's prior once the neighbours have it, unless it is no newer than what was used last. The caller
        holds it."""
        if prior.boundary not in self._crossings:
            return
        async with self._turns[prior.boundary]:
            if not self._newer(prior):
                return
            await self._spread(prior.boundary, prior.name)
            self._use(self._crossings[prior.boundary], prior, trial=True)
        self._metrics.count("priors_used")
        event(log, "prior_adopted", boundary=prior.boundary, prior=prior.name.hex()[:16])

    def _newer(self, prior: BoundaryPrior) -> bool:
        used = self._store.get(self.current(prior.boundary))
        return used is None or (used.measured, used.name) < (prior.measured, prior.name)

    def current(self, boundary: int) -> bytes:
        """Name of the newest prior that this peer has used for a boundary; empty: none."""
        return self._held.get(boundary, b"")

    async def _spread(self, boundary: int, name: bytes) -> None:
        """Tell the neighbours, and wait until all of them have it, or for as long as is bearable."""
        deadline = self._clock.monotonic() + _SPREAD_S
        while self._clock.monotonic() < deadline:
            lacking = [link for link in self._links(boundary) if link.knows != name]
            for link in lacking:
                link.announce(name)
            if not lacking:
                return
            await self._changed()
        event(log, "prior_spreads_slowly", level=logging.WARNING, boundary=boundary, lacking=len(lacking))

    def _use(self, crossing: Crossing, prior: BoundaryPrior, trial: bool = False) -> None:
        before = self._held.get(crossing.boundary)
        self._held[crossing.boundary] = self._store.hold(prior.name).name
        if before is not None:
            self._store.release(before)
        crossing.use(prior, trial)
