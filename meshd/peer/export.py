"""Taking the result away: the newest complete set of snapshots as a transformers checkpoint (DESIGN section 7)."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from meshd.clock import Clock, SystemClock
from meshd.config.runspec import ResolvedRun
from meshd.discovery.dht import DhtRegistry
from meshd.discovery.link import SwarmLink
from meshd.discovery.p2pd import Endpoint
from meshd.discovery.static import StaticRegistry
from meshd.errors import DataError, MeshdError, NetworkError
from meshd.identity import Identity
from meshd.model.export import check_destination, export
from meshd.observe.daemonfile import DaemonFile
from meshd.observe.log import event
from meshd.peer.resolve import BUNDLES, RESOLVED, load_run
from meshd.peer.seed import complete_watermarks
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.state.disk import disk_faults
from meshd.state.fetch import fetch_bundle
from meshd.state.lock import lock_state_dir
from meshd.state.stage_state import read_params
from meshd.transport.base import Transport
from meshd.transport.grpc_client import GrpcTransport

log = logging.getLogger(__name__)

_SEARCH_S = 30.0


async def export_checkpoint(source: SwarmLink | Path, dest: Path, *, watermark: int | None = None) -> int:
    """Write the run's result to `dest`. Returns its token watermark.

    source: a swarm link, or an absolute state directory (asked through its daemon while one runs). watermark: None
    takes the newest for which all stages have a snapshot. Raises MeshdError: nothing complete, nobody there, no room.
    """
    await asyncio.to_thread(check_destination, dest)
    transport = GrpcTransport()
    try:
        if isinstance(source, SwarmLink):
            addresses = await _find_peers(source, transport)
            return await _from_peers(source.run_id, addresses, transport, dest, watermark)
        state_dir = source
        daemon = await asyncio.to_thread(DaemonFile.read, state_dir)
        if daemon is not None and daemon.alive():
            return await _from_peers(daemon.run_id, [daemon.address], transport, dest, watermark)
        return await asyncio.to_thread(_from_disk, state_dir, dest, watermark)
    finally:
        await transport.close()


def _from_disk(state_dir: Path, dest: Path, watermark: int | None) -> int:
    """From the bundles that a daemon left. The run that was worked on last counts."""
    with lock_state_dir(state_dir):
        folders = [path.parent for path in (state_dir / "runs").glob(f"*/{RESOLVED}")]
        folders.sort(key=lambda folder: (folder / BUNDLES).stat().st_mtime, reverse=True)
        if not folders:
            raise DataError(
                f"{state_dir} holds no run. Fix: --state-dir of a peer of the run, or give a swarm link"
            )
        run = load_run(folders[0])
        assert run is not None
        store = BundleStore(folders[0] / BUNDLES)
        store.drop_damaged()
        complete = complete_watermarks(store.names(), run.stages, run.spec.stop_tokens)
        chosen = _choose(complete, watermark, str(state_dir))
        _write(run, store, chosen, dest)
        return chosen


async def _find_peers(link: SwarmLink, transport: Transport) -> list[str]:
    """Addresses of the run's peers, by a look into its registry."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="meshd-") as folder:
        identity, _ = await asyncio.to_thread(Identity.load_or_create, Path(folder) / "identity.key")
        if link.file is not None:
            static = await StaticRegistry.start(link.file, link.run_id, identity.peer_id, transport, clock)
            return [peer.address for peer in await static.refresh()]
        # It only reads: nobody dials it, so it may listen where nobody can.
        registry = await DhtRegistry.start(
            identity, link.run_id, endpoint=Endpoint("0.0.0.0"), bootstrap=link.addresses, stages=256
        )
        try:
            return await _first_peers(registry, clock)
        finally:
            await registry.close()


async def _first_peers(registry: DhtRegistry, clock: Clock) -> list[str]:
    deadline = clock.monotonic() + _SEARCH_S
    while clock.monotonic() < deadline:
        peers = await registry.refresh()
        if peers:
            return [peer.address for peer in peers]
        await clock.sleep(1.0)
    raise NetworkError(
        f"no peer of the run was found in {_SEARCH_S:.0f} s: {registry.problem or 'none is announced'}"
    )


async def _from_peers(
    run_id: str, addresses: Sequence[str], transport: Transport, dest: Path, watermark: int | None
) -> int:
    run = await _run_of(run_id, addresses, transport)
    bundles: set[str] = set()
    for address in addresses:
        try:
            reply = await transport.list_bundles(address, pb.ListRequest(run_id=run_id))
        except MeshdError as error:
            event(log, "peer_skipped", level=logging.WARNING, address=address, reason=str(error))
            continue
        bundles.update(reply.bundles)
    complete = complete_watermarks(sorted(bundles), run.stages, run.spec.stop_tokens)
    chosen = _choose(complete, watermark, "the swarm")
    with disk_faults(dest.parent):
        dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as folder:
        store = await asyncio.to_thread(BundleStore, Path(folder))
        resolved = run.resolved
        wanted: dict[str, str | None] = {"run/tokenizer": resolved.tokenizer_sha256}
        for stage, digest in enumerate(resolved.base_sha256):
            wanted[f"base/{stage}"] = digest
            wanted[f"snapshot/{stage}/{chosen}"] = None
        for name, expected in wanted.items():
            await fetch_bundle(
                name,
                addresses,
                transport,
                store,
                run_id,
                clock=SystemClock(),
                rng=random.Random(),
                expected_sha256=expected,
            )
        await asyncio.to_thread(_write, run, store, chosen, dest)
    return chosen


async def _run_of(run_id: str, addresses: Sequence[str], transport: Transport) -> ResolvedRun:
    failures = []
    for address in addresses:
        try:
            reply = await transport.get_run(address, pb.GetRunRequest(run_id=run_id))
            run = ResolvedRun.model_validate_json(reply.resolved_run)
        except (MeshdError, ValidationError) as error:
            failures.append(f"{address}: {error}")
            continue
        if run.run_id == run_id:
            return run
        failures.append(f"{address}: its run spec is not the one in the link")
    raise NetworkError("nobody gave the run spec: " + "; ".join(failures))


def _choose(complete: Sequence[int], watermark: int | None, where: str) -> int:
    if not complete:
        raise DataError(
            f"{where} has no snapshot of all stages yet. Fix: wait for the first one (snapshot.every_tokens)"
        )
    if watermark is None:
        return complete[-1]
    if watermark not in complete:
        known = ", ".join(map(str, complete))
        raise DataError(
            f"--watermark {watermark}: {where} has no complete snapshot there. Fix: one of {known}"
        )
    return watermark


def _write(run: ResolvedRun, store: BundleStore, watermark: int, dest: Path) -> None:
    def stages() -> Iterator[ChainMap[str, Tensor]]:
        for stage in range(run.stages):
            # Snapshots hold what was trained; what was frozen is the base's.
            snapshot = read_params(store, f"snapshot/{stage}/{watermark}")
            yield ChainMap(snapshot, read_params(store, f"base/{stage}"))

    facts = {
        "run_id": run.run_id,
        "run_name": run.spec.name,
        "base_model": run.spec.model.source,
        "tokens": watermark,
        "contributors": [
            store.manifest(f"snapshot/{stage}/{watermark}").facts.get("contributors", [])
            for stage in range(run.stages)
        ],
    }
    export(stages(), store.path("run/tokenizer", "config.json").parent, dest, facts)
