"""libp2p addresses (`/ip4/1.2.3.4/tcp/31330/p2p/12D3Koo...`): reading them, and how far they can be reached from."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import psutil

from meshd.errors import ConfigError
from meshd.identity import public_key_of

EXAMPLE = "/ip4/203.0.113.7/tcp/31330/p2p/12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOSTNAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


class Reach(IntEnum):
    """From how far an address can be dialled. A DNS name may be anything but loopback: NETWORK."""

    LOOPBACK = 0
    NETWORK = 1
    PUBLIC = 2


@dataclass(frozen=True)
class PeerAddress:
    """One address of one peer."""

    protocol: str  # ip4, ip6, dns, dns4, dns6
    host: str
    port: int
    peer_id: str

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Read `/PROTOCOL/HOST/tcp/PORT/p2p/PEERID`. Raises ValueError that names the part that is wrong."""
        parts = text.split("/")
        if len(parts) != 7 or parts[0] or parts[3] != "tcp" or parts[5] != "p2p":
            raise ValueError("not of the form /ip4/HOST/tcp/PORT/p2p/PEERID")
        protocol, host, port, peer_id = parts[1], parts[2], parts[4], parts[6]
        _check_host(protocol, host)
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            raise ValueError(f"port {port!r} is not a number from 1 to 65535")
        try:
            public_key_of(peer_id)
        except ValueError as error:
            raise ValueError(f"peer id {peer_id!r}: {error}") from error
        return cls(protocol, host, int(port), peer_id)

    def __str__(self) -> str:
        return f"{socket_maddr_text(self.protocol, self.host, self.port)}/p2p/{self.peer_id}"


def _check_host(protocol: str, host: str) -> None:
    try:
        if protocol == "ip4":
            ipaddress.IPv4Address(host)
        elif protocol == "ip6":
            ipaddress.IPv6Address(host)
        elif protocol not in ("dns", "dns4", "dns6"):
            raise ValueError(f"{protocol!r} is not one of ip4, ip6, dns, dns4, dns6")
        elif not _HOSTNAME.fullmatch(host):
            raise ValueError(f"{host!r} is not a host name")
    except ipaddress.AddressValueError as error:
        raise ValueError(f"{host!r} is not an {protocol} address: {error}") from error


def socket_maddr_text(protocol: str, host: str, port: int) -> str:
    return f"/{protocol}/{host}/tcp/{port}"


def socket_maddr(host: str, port: int) -> str:
    """`/ip4|ip6|dns/HOST/tcp/PORT` of a numeric address or a host name."""
    try:
        protocol = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        protocol = "dns"
    return socket_maddr_text(protocol, host, port)


def reach(host: str) -> Reach:
    """How far `host` (numeric or a name) can be reached from."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Reach.LOOPBACK if host == "localhost" or host.endswith(".localhost") else Reach.NETWORK
    if address.is_loopback:
        return Reach.LOOPBACK
    return Reach.PUBLIC if address.is_global else Reach.NETWORK


def check_announce(
    announced: Sequence[str], bootstrap: Sequence[PeerAddress], set_by_user: str | None
) -> None:
    """Refuse to join a remote swarm under an address that its peers cannot dial (C03).

    announced: hosts under which others would dial this peer; a DNS name passes, whoever set it knows what it means.
    Raises ConfigError that names what to set.
    """
    farthest = max(bootstrap, key=lambda address: reach(address.host), default=None)
    if farthest is None or not announced:
        return
    needed, best = reach(farthest.host), max(announced, key=reach)
    if reach(best) >= needed or (reach(best) is Reach.NETWORK and not _numeric(best)):
        return
    if needed is Reach.PUBLIC:
        problem = f"the swarm is on the internet ({farthest.host}), and no peer there can dial {best}"
        fix = 'announce = "the public address of this machine or router", with the port forwarded to it'
    else:
        problem = f"the swarm is on other machines ({farthest.host}), and {best} is this machine only"
        local = local_address_towards(farthest.host) if _numeric(farthest.host) else None
        fix = f'announce = "{local}"' if local else 'announce = "the address of this machine in that network"'
        fix += ', and listen = "0.0.0.0"'
    raise ConfigError("announce" if set_by_user else "listen", set_by_user or best, problem, fix)


def local_address_towards(host: str) -> str | None:
    """This machine's address on the way to the numeric address `host`; no packet is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def readable(texts: Iterable[str]) -> list[PeerAddress]:
    """Those of `texts`, from a record or from p2pd, that are direct addresses; others (relays) are left out."""
    addresses = []
    for text in texts:
        with contextlib.suppress(ValueError):
            addresses.append(PeerAddress.parse(text))
    return addresses


def by_peer(addresses: Iterable[PeerAddress]) -> dict[str, tuple[PeerAddress, ...]]:
    """The addresses of each peer, by peer id."""
    groups: dict[str, tuple[PeerAddress, ...]] = {}
    for address in addresses:
        groups[address.peer_id] = (*groups.get(address.peer_id, ()), address)
    return groups


def announced_hosts(listen: str, announce: str | None) -> list[str]:
    """Hosts under which others would dial: what is announced, or all that is listened on."""
    if announce is not None:
        return [announce]
    if not _numeric(listen) or not ipaddress.ip_address(listen).is_unspecified:
        return [listen]
    return [
        a.address.partition("%")[0] for group in psutil.net_if_addrs().values() for a in group if a.netmask
    ]


def presentable(visible: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    """For the link: without loopback if there is better, the farthest-reaching first, at most 8."""
    remote = [address for address in visible if reach(address.host) is not Reach.LOOPBACK]
    ranked = sorted(remote or visible, key=lambda address: (-reach(address.host), str(address)))
    return tuple(ranked[:8])
