"""How a peer comes by what it needs: the run spec from the link alone, then bundles from peers (or from the source)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from meshd.clock import Clock
from meshd.config.runspec import ResolvedRun
from meshd.discovery.dht import DhtRegistry
from meshd.discovery.records import hello_of
from meshd.errors import MeshdError, MismatchError, NetworkError
from meshd.model.families import load_config
from meshd.model.sources import resolve_stage
from meshd.model.weights import write_base
from meshd.observe.log import event
from meshd.peer.directory import Directory
from meshd.peer.handlers import report_skew
from meshd.priors.boundary import most_bytes
from meshd.priors.features import FEATURES, TokenFeatures
from meshd.priors.store import bundle_of
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.state.fetch import fetch_bundle
from meshd.state.manifest import Manifest
from meshd.state.stage_state import WEIGHTS
from meshd.transport.base import Transport

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 15.0
# A peer that serves a run announces itself every few seconds.
_UNSERVED_S = 30.0


async def fetch_run(run_id: str, directory: Directory, transport: Transport, clock: Clock) -> ResolvedRun:
    """The run spec, from any peer that answers; its hash must be the run id. Tries for ever: a swarm may come later.

    Raises MismatchError when all peers speak another protocol, or when the link's address answers and nobody there is
    of the run.
    """
    wait, registry = 1.0, directory.registry
    reached: float | None = None
    while True:
        peers = await directory.refresh()
        failures: list[MeshdError] = []
        for peer in peers:
            try:
                return await _ask_run(run_id, peer, directory, transport, clock)
            except MeshdError as error:
                failures.append(type(error)(f"{peer.name or peer.peer_id[-8:]} at {peer.address}: {error}"))
        if failures and all(isinstance(failure, MismatchError) for failure in failures):
            raise failures[0]
        problem = "; ".join(map(str, failures)) or "no peer of this run is announced"
        if isinstance(registry, DhtRegistry) and not failures:
            problem = registry.problem or problem
            reached = (reached or clock.monotonic()) if registry.joined else None
            if reached is not None and clock.monotonic() - reached > _UNSERVED_S:
                raise MismatchError(
                    f"the link's address answers, but nobody there is of run {run_id}: the link is of another run, or "
                    "the run is over, or clocks differ. Fix: ask the operator for the present link"
                )
        event(log, "no_run_yet", level=logging.WARNING, problem=problem, next_try_s=wait)
        await clock.sleep(wait)
        wait = min(_LONGEST_WAIT_S, 1.5 * wait)


async def _ask_run(
    run_id: str, peer: pb.Record, directory: Directory, transport: Transport, clock: Clock
) -> ResolvedRun:
    reply = await transport.hello(peer.address, hello_of(directory.record(), clock.time()))
    report_skew(reply.name, reply.wall_clock - clock.time())
    given = await transport.get_run(peer.address, pb.GetRunRequest(run_id=run_id))
    try:
        run = ResolvedRun.model_validate_json(given.resolved_run)
    except ValidationError as error:
        raise NetworkError(f"it gave a run spec that does not read: {error.error_count()} errors") from error
    if run.run_id != run_id:
        raise NetworkError("it gave a run spec that is not the one in the link")
    return run


@dataclass(frozen=True)
class Supply:
    """Where bundles come from, and go."""

    run: ResolvedRun
    store: BundleStore
    directory: Directory
    transport: Transport
    clock: Clock
    rng: random.Random

    async def tokenizer(self) -> Path:
        """Folder with config and tokenizer files."""
        name = "run/tokenizer"
        await self._need(name, self.run.resolved.tokenizer_sha256, self.directory.everyone)
        return self.store.path(name, "config.json").parent

    async def data(self) -> Path:
        """Folder with the tokenized corpus."""
        name = "run/data"
        await self._need(name, self.run.resolved.data_sha256, self.directory.everyone)
        return self.store.path(name, "facts.json").parent

    async def features(self) -> TokenFeatures:
        """What codecs know of each token."""
        name, resolved = "run/features", self.run.resolved
        await self._need(name, resolved.features_sha256, self.directory.everyone)
        return await asyncio.to_thread(
            lambda: TokenFeatures.load(self.store.path(name, FEATURES), resolved.vocabulary)
        )

    async def base(self, stage: int) -> None:
        """The stage's base weights."""
        name, digest = f"base/{stage}", self.run.resolved.base_sha256[stage]
        if self.run.spec.model.weights_from == "source":
            await asyncio.to_thread(self._base_from_source, stage, digest)
        else:
            # Where a stage has no replica left and the seeds are gone, any other peer may have it.
            await self._need(name, digest, lambda: self.directory.donors(stage) or self.directory.everyone())

    async def prior(self, name: bytes, address: str, rank: int) -> None:
        """Bring a codec prior here from the peer that named it. rank: of the token features. Raises NetworkError."""
        await self.named(bundle_of(name), address, most_bytes(self.run.resolved.hidden, rank))

    async def named(self, bundle: str, address: str, most: int) -> None:
        """Bring a bundle of at most so many bytes here from one peer. What is in it is not checked. Raises
        NetworkError."""
        await fetch_bundle(
            bundle,
            [address],
            self.transport,
            self.store,
            self.run.run_id,
            clock=self.clock,
            rng=self.rng,
            patience_s=10.0,
            max_bytes=most,
        )

    async def live(self, stage: int, donors: list[str]) -> int:
        """A working replica's parameters and optimizer. Returns its weight version. Errors as `snapshot`."""
        return await self._state(f"live/{stage}", donors, 30.0)

    async def snapshot(self, stage: int, watermark: int, donors: list[str], patience_s: float = 10.0) -> None:
        """The stage's average at a watermark. Raises NetworkError when nobody has one whose facts can be used: no hash
        vouches for them. What is here stays then."""
        await self._state(f"snapshot/{stage}/{watermark}", donors, patience_s)

    async def _state(self, name: str, donors: list[str], patience_s: float) -> int:
        manifest = await self._fetch(name, None, lambda: donors, patience_s, check=_check_state)
        return manifest.count("weight_version")

    async def _need(self, name: str, digest: str, donors: Callable[[], list[str]]) -> None:
        """Fetch until it is here: without it this peer can do nothing."""
        while True:
            try:
                await self._fetch(name, digest, donors)
                return
            except NetworkError as error:
                event(log, "waiting_for_bundle", level=logging.WARNING, bundle=name, reason=str(error))

    async def _fetch(
        self,
        name: str,
        digest: str | None,
        donors: Callable[[], list[str]],
        patience_s: float = 30.0,
        check: Callable[[Manifest], object] = lambda manifest: None,
    ) -> Manifest:
        async def fresh() -> list[str]:
            await self.directory.refresh()
            return donors()

        return await fetch_bundle(
            name,
            fresh,
            self.transport,
            self.store,
            self.run.run_id,
            clock=self.clock,
            rng=self.rng,
            expected_sha256=digest,
            patience_s=patience_s,
            check=check,
        )

    def _base_from_source(self, stage: int, digest: str) -> None:
        name, model = f"base/{stage}", self.run.spec.model
        if self.store.has(name, digest):
            return
        resolved = self.run.resolved
        folder, files = resolve_stage(model.source, model.revision, resolved.cut, resolved.tied, stage)
        with self.store.writing(name, {}) as directory:
            write_base(files, load_config(folder), resolved.cut, resolved.tied, stage, directory / WEIGHTS)
        found = self.store.manifest(name).sha256
        if found != digest:
            self.store.delete(name)
            raise MismatchError(
                f"{model.source} here gives other weights for stage {stage} than the operator's. "
                'Fix: the same revision, or weights_from = "peers"'
            )


def _check_state(manifest: Manifest) -> None:
    """Raises MismatchError when a state has no weights, or does not say of which step and how many tokens it is."""
    if manifest.file(WEIGHTS) is None:
        raise MismatchError(f"bundle {manifest.bundle} has no {WEIGHTS}")
    manifest.count("tokens")
    manifest.count("weight_version")
