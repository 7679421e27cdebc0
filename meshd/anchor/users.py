"""What a stage does with priors that are brought to it: send with codec priors, correct steps with weight priors."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress

import torch

from meshd.anchor.library import Held, chosen, merge
from meshd.clock import Clock
from meshd.errors import MeshdError, MismatchError
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.pipeline.crossing import Crossing
from meshd.pipeline.exhaustion import with_memory
from meshd.pipeline.runtime import StageRuntime
from meshd.priors import weight_file
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb

log = logging.getLogger(__name__)

_LOOK_S = 1.0
# Files whose authors are known.
_MOST_AUTHORS = 64


async def woken(news: asyncio.Event) -> None:
    """Wait for an event and clear it, for a second at most: steps and time go on without one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            await news.wait()
    news.clear()


class Codecs:
    """Anchors' priors of one boundary that this peer sends over. `run` must be running."""

    def __init__(
        self,
        crossing: Crossing,
        hidden: int,
        store: PriorStore,
        adopt: Callable[[BoundaryPrior], Awaitable[None]],
        counted: Callable[[], int],
        bar: Callable[[str, str], None],
    ) -> None:
        """adopt: use one once the neighbours have it, unless something newer is used; takes up to a minute. counted:
        global tokens known here. bar: take nothing more of an author, for a reason."""
        self._crossing, self._hidden, self._store = crossing, hidden, store
        self._adopt, self._counted, self._bar = adopt, counted, bar
        self._authors: OrderedDict[bytes, str] = OrderedDict()
        self._next: BoundaryPrior | None = None  # held
        self._news = asyncio.Event()

    async def take(self, notice: pb.Notice, data: bytes) -> None:
        prior = await asyncio.to_thread(
            BoundaryPrior.from_bytes, data, self._hidden, self._store.rank, notice.name
        )
        if (prior.boundary, prior.measured) != (notice.number, notice.measured):
            # The store goes by what the file says.
            raise MismatchError(
                f"a prior of boundary {prior.boundary} at {prior.measured} tokens, announced as of "
                f"{notice.number} at {notice.measured}"
            )
        # What an author says of the future would shut out those who say the truth.
        await self._store.take(notice.name, notice.number, self._counted())
        prior = self._store.hold(notice.name)
        self._authors[notice.name] = notice.author
        if len(self._authors) > _MOST_AUTHORS:
            self._authors.popitem(last=False)
        if self._next is not None:
            if (self._next.measured, self._next.name) >= (prior.measured, prior.name):
                self._store.release(prior.name)
                return
            self._store.release(self._next.name)
        self._next = prior
        self._news.set()

    def gone(self, notice: pb.Notice) -> None:
        """It is used on: until a newer one comes, or its error has grown."""

    def needs(self, name: bytes) -> bool:
        return self._store.get(name) is not None

    async def run(self) -> None:
        """Use what comes, until cancelled."""
        while True:
            await woken(self._news)
            author = self._authors.pop(self._crossing.worse, None)
            if author is not None:
                self._bar(author, "its codec prior made larger errors than what was used before")
            # A liar that always brought its next one before the last is judged would never be found out.
            if self._next is not None and not self._crossing.on_trial:
                prior, self._next = self._next, None
                try:
                    await self._adopt(prior)
                finally:
                    self._store.release(prior.name)


class Weights:
    """Anchors' weight priors of this peer's stage: merged in a thread when one comes or goes, and swapped in whole, so
    that a step never waits for them. `run` must be running."""

    def __init__(self, stage: int, runtime: StageRuntime, clock: Clock, metrics: Metrics) -> None:
        self._stage, self._runtime, self._clock, self._metrics = stage, runtime, clock, metrics
        self._spec = runtime.run.spec.anchors
        self._library: dict[str, tuple[int, Held]] = {}  # by author, with the notice's version
        self._tried: tuple[Held, ...] = ()  # what a correction was made of last, or could not be
        self._changed = asyncio.Event()
        self.most_bytes = weight_file.most_bytes(runtime.corrected_weights(), self._spec.rank)

    async def take(self, notice: pb.Notice, data: bytes) -> None:
        shapes = self._runtime.corrected_weights()
        priors = await asyncio.to_thread(
            weight_file.from_bytes, data, self._stage, shapes, self._spec.rank, notice.name
        )
        held = Held.of(notice, priors, self._runtime.version, self._clock.time())
        self._library[notice.author] = notice.version, held
        self._changed.set()

    def gone(self, notice: pb.Notice) -> None:
        if notice.author in self._library and self._library[notice.author][0] == notice.version:
            del self._library[notice.author]
            self._changed.set()

    def needs(self, name: bytes) -> bool:
        return False

    async def run(self) -> None:
        """Keep the runtime's correction up to date, until cancelled."""
        while True:
            await self._update()
            self._tell()
            await woken(self._changed)

    async def _update(self) -> None:
        runtime, now = self._runtime, self._clock.time()
        of = chosen([held for _, held in self._library.values()], self._spec, runtime.version, now)
        if of == self._tried:
            return
        before, self._tried = self._tried, of
        if not of:
            runtime.correction = None
            return
        version, device = runtime.version, runtime.device
        try:
            made = await asyncio.to_thread(with_memory, lambda: merge(of, self._spec, version, device))
        except (MeshdError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            # What passed the checks decomposes, as a rule; no stranger's prior is worth this peer's work.
            runtime.correction = None
            event(log, "priors_not_merged", level=logging.WARNING, anchors=len(of), reason=str(error))
            return
        runtime.correction = made
        self._metrics.count("priors_used", sum(held not in before for held in of))

    def _tell(self) -> None:
        if self._library:
            version, now = self._runtime.version, self._clock.time()
            held = [held for _, held in self._library.values()]
            newest = max(held, key=lambda held: (held.version, held.time))
            self._metrics.gauge("prior_age_steps", max(0, version - newest.version))
            self._metrics.gauge("prior_age_s", max(0.0, now - newest.time))
