"""What a daemon needs of its machine, taken or refused within a second: before torch and transformers load, which takes
ten, and before a run is prepared, which takes minutes. Nothing heavy is imported here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshd.config.peer import PeerConfig
from meshd.discovery.leftovers import end_leftovers
from meshd.identity import Identity
from meshd.observe.log import event
from meshd.state.lock import lock_state_dir
from meshd.transport.ports import bindable_port

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What one daemon stands on: its config, its state directory, which it alone holds, and who it is."""

    config: PeerConfig
    state_dir: Path
    identity: Identity


@contextmanager
def hold_ground(config: PeerConfig) -> Iterator[Ground]:
    """Hold the state directory and read the identity in it, made if need be; see that named ports are free.

    Raises ResourceError: the directory cannot be written or is another daemon's, the identity cannot be read, a port is
    taken (it may still be by the time it is listened on).
    """
    state_dir = config.state_dir.expanduser()
    with lock_state_dir(state_dir):
        identity, created = Identity.load_or_create(state_dir / "identity.key")
        if created:
            event(log, "identity_created", path=identity.path, peer_id=identity.peer_id)
        bindable_port(config.listen, config.port, "port")
        if config.dht_port:
            for pid in end_leftovers(identity.path):
                log.info("ended p2pd process %s, left by a daemon that was killed", pid)
        bindable_port(config.listen, config.dht_port, "dht_port")
        if config.http_port != "off":
            bindable_port(config.http_listen, config.http_port, "http_port")
        yield Ground(config, state_dir, identity)
