"""A network namespace for every peer, joined by a bridge: so that a peer's link can be cut while its process lives.

Linux, root and iproute2 are needed; where one is missing there are no cut links. Names and addresses follow from the
directory of the run, so that the next start finds what a killed one has left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20.0


class NoNetwork(Exception):
    """Namespaces cannot be made here; the text says why."""


@dataclass(frozen=True)
class Network:
    """`peers` on one bridge. The host, and with it who watches, is on it too. All calls block for some milliseconds."""

    tag: str
    peers: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path, peers: Sequence[str]) -> Network:
        """The network of the runs in `directory`; nothing is made yet."""
        return cls(hashlib.sha256(str(directory).encode()).hexdigest()[:6], tuple(peers))

    def make(self) -> None:
        """Make it anew. Raises NoNetwork; what was made until then is taken away."""
        if os.name != "posix" or os.geteuid() != 0:
            raise NoNetwork("not root")
        if shutil.which("ip") is None:
            raise NoNetwork("no `ip` command (iproute2)")
        self.remove()
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for peer in self.peers:
                self._add(peer)
        except NoNetwork:
            self.remove()
            raise

    def _add(self, peer: str) -> None:
        space, port = self._space(peer), self._port(peer)
        _ip("netns", "add", space)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", port, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{self.address(peer)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Take away what is there of it. Never raises for what is not there."""
        for arguments in (
            *(("netns", "del", self._space(peer)) for peer in self.peers),
            *(("link", "del", self._port(peer)) for peer in self.peers),
            ("link", "del", self._bridge),
        ):
            subprocess.run(["ip", *arguments], capture_output=True, timeout=_TIMEOUT_S, check=False)

    def address(self, peer: str) -> str:
        """Where a peer listens."""
        return f"{self._subnet}.{self.peers.index(peer) + 1}"

    def command(self, peer: str) -> list[str]:
        """What a peer's command begins with: it becomes that command, under the same process id."""
        return ["ip", "netns", "exec", self._space(peer)]

    def cut(self, peer: str) -> None:
        """From now on nothing reaches the peer, and nothing comes from it. Nobody is told."""
        _ip("link", "set", self._port(peer), "down")

    def mend(self, peer: str) -> None:
        _ip("link", "set", self._port(peer), "up")

    @property
    def _bridge(self) -> str:
        return f"mc{self.tag}"

    @property
    def _subnet(self) -> str:
        return f"10.{100 + int(self.tag[:2], 16) % 100}.{int(self.tag[2:4], 16)}"

    def _space(self, peer: str) -> str:
        return f"mc{self.tag}-{peer}"

    def _port(self, peer: str) -> str:
        return f"mc{self.tag}p{self.peers.index(peer)}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NoNetwork(f"`ip {' '.join(arguments)}`: {done.stderr.strip() or done.returncode}")
