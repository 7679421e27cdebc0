"""Entering a DHT: who is dialled, what came of it, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from meshd.discovery.addresses import PeerAddress, by_peer
from meshd.discovery.p2pd import DIAL_BACKOFF, P2pd  # before hivemind: it sets what grpc reads at import
from meshd.errors import NetworkError

from hivemind.dht.node import DHTNode  # isort: skip
from hivemind.dht.protocol import ValidationError  # isort: skip
from hivemind.p2p import PeerID  # isort: skip

log = logging.getLogger(__name__)

_MAX_TOLD = 64  # peers met outside the DHT that are waiting to be dialled


@dataclass(frozen=True)
class Timing:
    """Bounds and intervals, seconds."""

    call_s: float = 10.0  # one DHT read or write, whole
    dial_s: float = 5.0  # one connection, and one ping over it
    retry_s: float = 1.0  # first wait after a failure; doubles, with jitter
    retry_max_s: float = 30.0
    remix_s: float = 60.0  # between attempts to reach bootstrap addresses that the routing table lacks


@dataclass(frozen=True)
class Doorway:
    """This side of a dial: the running daemon and node, and the addresses that it announces."""

    p2pd: P2pd
    node: DHTNode
    maddrs: Sequence[PeerAddress]


class Entrance:
    """The addresses through which a node enters: its bootstrap, and peers it was told of. Not its connections."""

    def __init__(self, bootstrap: Sequence[PeerAddress], timing: Timing) -> None:
        self._bootstrap = by_peer(bootstrap)
        self._told: dict[str, tuple[PeerAddress, ...]] = {}
        self._failing: dict[str, str] = {}  # addresses of a bootstrap peer -> reason, at the last attempt
        self._timing = timing
        self.searching = False
        """Whether the last attempt had peers to dial that did not answer."""

    @property
    def problem(self) -> str:
        """Which bootstrap addresses failed at the last attempt, and why; empty when none did."""
        return "; ".join(f"cannot reach {addresses}: {reason}" for addresses, reason in self._failing.items())

    def tell(self, addresses: Iterable[PeerAddress], seen: Collection[str]) -> bool:
        """Note peers that are not among `seen` peer ids, for the next attempt. Whether any is new."""
        new = False
        for peer_id, group in by_peer(addresses).items():
            if peer_id not in seen and peer_id not in self._told and len(self._told) < _MAX_TOLD:
                self._told[peer_id] = group
                new = True
        return new

    def forget(self, seen: Collection[str]) -> None:
        """The DHT shows these peers: no need to dial them."""
        for peer_id in seen:
            self._told.pop(peer_id, None)

    async def dial_missing(self, door: Doorway, fallback: Sequence[PeerAddress]) -> list[str]:
        """Dial every bootstrap peer, peer told of and fallback that the routing table lacks, all at once.

        Returns the peer ids, among those told of, that were reached: the DHT had not shown them. An address that
        fails is logged when its reason is new, and tried again at the next attempt; peers told of are tried once.
        """
        have = {peer.to_base58() for peer in door.node.protocol.routing_table.peer_id_to_uid}
        have.add(door.p2pd.peer_id)
        told, self._told = self._told, {}
        targets = {**by_peer(fallback), **told, **self._bootstrap}
        async with asyncio.TaskGroup() as group:
            dials = {
                peer_id: group.create_task(self._dial(door, peer_id, addresses))
                for peer_id, addresses in targets.items()
                if peer_id not in have
            }
        reasons = {peer_id: dial.result() for peer_id, dial in dials.items()}
        self._note({peer_id: reason for peer_id, reason in reasons.items() if peer_id in self._bootstrap})
        self.searching = any(reason is not None for reason in reasons.values())
        return [peer_id for peer_id, reason in reasons.items() if reason is None and peer_id in told]

    def _note(self, reasons: dict[str, str | None]) -> None:
        failing = {}
        for peer_id, reason in reasons.items():
            addresses = ", ".join(map(str, self._bootstrap[peer_id]))
            if reason is not None:
                if (
                    reason == DIAL_BACKOFF
                ):  # says only that it was tried lately: what was found then still holds
                    reason = self._failing.get(addresses, reason)
                failing[addresses] = reason
                if self._failing.get(addresses) != reason:
                    log.warning("cannot reach bootstrap address %s: %s. Trying on", addresses, reason)
            elif addresses in self._failing:
                log.info("reached bootstrap address %s", addresses)
        self._failing = failing

    async def _dial(self, door: Doorway, peer_id: str, addresses: Sequence[PeerAddress]) -> str | None:
        """Connect to one peer and enter its DHT. None, or the reason why not, in one line."""
        node, peer = door.node, PeerID.from_base58(peer_id)
        try:
            await door.p2pd.connect(peer_id, addresses, self._timing.dial_s)
            async with asyncio.timeout(self._timing.dial_s):
                try:
                    node_id = await node.protocol.call_ping(peer, validate=True, strict=True)
                except ValidationError as error:
                    log.warning("%s answers, but %s", addresses[0], _objection(str(error), door))
                    node_id = await node.protocol.call_ping(peer)
            if node_id is None:
                return f"connected, but no DHT answer within {self._timing.dial_s:.0f} s"
            async with asyncio.timeout(self._timing.call_s):
                await node.protocol.update_routing_table(node_id, peer, responded=True)
                await node.find_nearest_nodes([node.node_id])
        except TimeoutError:
            return "connected, but its DHT answers too slowly"
        except NetworkError as error:
            return str(error)
        return None


def _objection(text: str, door: Doorway) -> str:
    """What hivemind's check of a new neighbour found, for people (C03, C04, C12)."""
    if "local time" in text:
        return "its clock and this machine's differ by more than 3 s. Fix: timedatectl set-ntp true"
    own = ", ".join(map(str, door.maddrs))
    return f"it cannot dial this peer at {own}. Fix: announce an address it can reach, and open port {door.p2pd.port}"
