"""A network namespace for every peer, joined by a bridge in one of its own, every link limited by the kernel.

Nothing of it touches the machine's own network: the bridge has a namespace, too, and interfaces live and die with
their namespaces. Linux, root and iproute2 are needed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshd.errors import ResourceError
from meshd.swarm.wan.names import Owner, leftovers
from meshd.swarm.wan.rates import Link, queue_arguments

MAX_PEERS = 200

_HUB = "hub"
_BRIDGE = "bridge"
_PEER_PORT = "eth0"
_SUBNET = "10.77.0"
_SPACES = Path("/run/netns")
# Of temporary folders: only root writes here.
_FOLDERS = Path("/run")
_TIMEOUT_S = 20.0
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Counts:
    """What has passed a link, bytes with all headers of all packets; dropped: packets that found its queue full."""

    up: int = 0
    down: int = 0
    dropped: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.up - other.up, self.down - other.down, self.dropped - other.dropped)


def check_ground() -> None:
    """Raises ResourceError where no lab can be built."""
    if sys.platform != "linux":
        raise ResourceError(
            "the WAN lab needs Linux: elsewhere, shape links in the peers' configs (docs/lab.md)"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ResourceError(f"no `{'` and no `'.join(missing)}` command here. Fix: install iproute2")
    if os.geteuid() != 0:
        raise ResourceError(
            "the WAN lab makes network namespaces. Fix: run it as root (sudo scripts/wanlab ...)"
        )


def clear_leftovers() -> list[str]:
    """Take away what labs have left that were killed, their processes included; the names. Blocking."""
    spaces = [path.name for path in _SPACES.iterdir()] if _SPACES.is_dir() else []
    cleared = leftovers(spaces, lambda owner: owner.alive)
    _remove(cleared)
    for name in leftovers([path.name for path in _FOLDERS.iterdir()], lambda owner: owner.alive):
        shutil.rmtree(_FOLDERS / name, ignore_errors=True)
    return cleared


@dataclass(frozen=True)
class Network:
    """The network of one lab. links: by peer name. All calls block for some milliseconds per peer."""

    owner: Owner
    links: Mapping[str, Link]

    def make(self) -> Path:
        """Make it; a temporary folder of its own (sockets have short paths). Raises ResourceError; `remove` is to be
        called in any case."""
        folder = _FOLDERS / self.owner.name()
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise ResourceError(f"cannot make {folder}: {error.strerror}") from None
        hub = self._space(_HUB)
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "-n", hub, "addr", "add", f"{_SUBNET}.254/24", "dev", _BRIDGE)
        for device in (_BRIDGE, "lo"):
            _run("ip", "-n", hub, "link", "set", device, "up")
        for peer, link in self.links.items():
            self._add(hub, peer, link)
        return folder

    def _add(self, hub: str, peer: str, link: Link) -> None:
        space, port = self._space(peer), self._port(peer)
        _run("ip", "netns", "add", space)
        _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", _PEER_PORT, "netns", space)
        _run("ip", "-n", space, "addr", "add", f"{self.address(peer)}/24", "dev", _PEER_PORT)
        # What leaves the peer is limited on its side, what goes to it on the bridge's.
        for where, device, rate in ((space, _PEER_PORT, link.up_bps), (hub, port, link.down_bps)):
            _run("tc", "-n", where, "qdisc", "replace", "dev", device, "root", *queue_arguments(rate))
        _run("ip", "-n", hub, "link", "set", port, "master", _BRIDGE, "up")
        for device in (_PEER_PORT, "lo"):
            _run("ip", "-n", space, "link", "set", device, "up")

    def remove(self) -> None:
        """Take it away, with every process that runs in it. Does nothing about what is not there."""
        names = [self._space(part) for part in (*self.links, _HUB)]
        _remove([name for name in names if (_SPACES / name).exists()])
        shutil.rmtree(_FOLDERS / self.owner.name(), ignore_errors=True)

    def address(self, peer: str) -> str:
        """Where a peer listens."""
        return f"{_SUBNET}.{list(self.links).index(peer) + 1}"

    def command(self, peer: str) -> list[str]:
        """What a peer's command begins with: it becomes that command, under the same process id."""
        return ["ip", "netns", "exec", self._space(peer)]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within the block the calling thread, and with it the threads and processes that it starts, are at the bridge:
        they reach every peer. To be entered by the main thread, before others use the network."""
        with open("/proc/self/ns/net") as before, open(_SPACES / self._space(_HUB)) as hub:
            _enter(hub.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def counts(self) -> dict[str, Counts]:
        """What has passed every link so far."""
        # tc's numbers: those of the interfaces count the headers of packets that go in one piece only once.
        down = _queues(self._space(_HUB))
        found = {}
        for peer in self.links:
            bytes_up, dropped_up = _queues(self._space(peer))[_PEER_PORT]
            bytes_down, dropped_down = down[self._port(peer)]
            found[peer] = Counts(bytes_up, bytes_down, dropped_up + dropped_down)
        return found

    def _space(self, part: str) -> str:
        return self.owner.name(part)

    def _port(self, peer: str) -> str:
        return f"p{list(self.links).index(peer)}"


def _queues(space: str) -> dict[str, tuple[int, int]]:
    """Bytes sent and packets dropped by the queue of each interface in a namespace."""
    shown = json.loads(_run("tc", "-n", space, "-s", "-j", "qdisc", "show"))
    return {queue["dev"]: (queue["bytes"], queue["drops"]) for queue in shown if queue.get("root")}


def _remove(spaces: list[str]) -> None:
    """End all processes in these namespaces, and take the namespaces away."""
    for space in spaces:
        _end_processes(space)
        with suppress(ResourceError):
            _run("ip", "netns", "del", space)


def _end_processes(space: str) -> None:
    """Kill what runs in a namespace, until nothing does."""
    end = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end:
        try:
            pids = [int(pid) for pid in _run("ip", "netns", "pids", space).split()]
        except ResourceError:
            return  # a name without a namespace: its owner was killed while it made it
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _enter(descriptor: int) -> None:
    """Python has os.setns from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise ResourceError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> str:
    """Its output. Raises ResourceError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"`{' '.join(command)}`: {error}") from None
    if done.returncode != 0:
        raise ResourceError(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout
