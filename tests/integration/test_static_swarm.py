"""A run over the file registry: whole daemons on gRPC in one process, their peers listed by the operator."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

from swarm import tiny_spec

from meshd.config.peer import PeerConfig
from meshd.config.runspec import RunSpec
from meshd.daemon import run_daemon
from meshd.discovery.link import SwarmLink
from meshd.ground import hold_ground
from meshd.identity import Identity
from meshd.observe.daemonfile import DaemonFile
from meshd.peer.export import export_checkpoint
from meshd.peer.resolve import resolve

LONG_S = 120.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on. All are held until the last is found, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


async def test_a_run_over_a_registry_file_trains_and_ends(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    names = {"seed": 'role = "seed"', "zero": "stage = 0", "one": "stage = 1"}
    configs, listing = {}, ""
    for (name, what), port in zip(names.items(), free_ports(3), strict=True):
        state = tmp_path / name
        state.mkdir()
        identity, _ = Identity.load_or_create(state / "identity.key")
        listing += f'[[peer]]\nid = "{identity.peer_id}"\naddress = "127.0.0.1:{port}"\n{what}\n'
        role = "seed" if name == "seed" else "stage"
        configs[name] = PeerConfig(state_dir=state, role=role, name=name, port=port, device="cpu")
    file = tmp_path / "peers.toml"
    file.write_text(listing)
    spec = tiny_spec(tiny_model, adapt_text, stop={"steps": 4})
    # The operator's daemon makes the run at its start, or finds it made: so the link is known here already.
    operator = Identity.load_or_create(tmp_path / "seed" / "identity.key")[0].peer_id
    run, _ = await asyncio.to_thread(resolve, spec, tmp_path / "seed", operator)
    link = SwarmLink(run.run_id, file=file)

    async def daemon_of(
        name: str, spec: RunSpec | None, link: SwarmLink | None, registry: Path | None
    ) -> int:
        with hold_ground(configs[name]) as ground:
            return await run_daemon(ground, spec, link, registry)

    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
        seed = tasks.create_task(daemon_of("seed", spec, None, file))
        stages = [tasks.create_task(daemon_of(name, None, link, None)) for name in ("zero", "one")]
        # They leave by themselves once they have heard from the seed that it keeps the result.
        assert await asyncio.gather(*stages) == [0, 0]
        daemon = DaemonFile.read(tmp_path / "seed")
        assert daemon is not None
        assert daemon.link == str(link), "what the operator passes on"
        assert await export_checkpoint(link, tmp_path / "result") == spec.stop_tokens
        seed.cancel()
    assert (tmp_path / "result" / "config.json").exists()
