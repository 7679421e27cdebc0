"""What a peer knew of its swarm when it last ran: so that a restarted seed is found where it was, and finds the others
without any of their links. A hint like any other: whoever is dialled proves who it is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from meshd.discovery.addresses import PeerAddress, readable
from meshd.state.disk import disk_faults

_NAME = "swarm.json"
_MOST = 64


@dataclass(frozen=True)
class Remembered:
    """dht_port: this peer's libp2p port, 0 when unknown. peers: libp2p addresses of others, at most 64."""

    dht_port: int = 0
    peers: tuple[PeerAddress, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Remembered:
        """From the folder of a run. A missing or unreadable file is no memory, and no harm. Blocking."""
        try:
            values = json.loads((folder / _NAME).read_text())
            port, texts = int(values["dht_port"]), [str(text) for text in values["peers"]]
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return cls(port if 0 <= port < 65536 else 0, tuple(readable(texts[:_MOST])))

    def write(self, folder: Path) -> None:
        """Whole or not at all. Blocking. Raises ResourceError."""
        draft = folder / f"{_NAME}.new"
        values = {"dht_port": self.dht_port, "peers": [str(address) for address in self.peers[:_MOST]]}
        with disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(values, indent=1) + "\n")
            os.replace(draft, folder / _NAME)
