"""Swarm links and peer addresses: what is read, what is refused in which words, and C03."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.discovery.addresses import (
    EXAMPLE,
    PeerAddress,
    Reach,
    check_announce,
    presentable,
    reach,
    socket_maddr,
)
from meshd.discovery.link import SwarmLink
from meshd.errors import ConfigError

RUN = "0123456789abcdef0123456789abcdef01234567"
ID = EXAMPLE.rpartition("/")[2]


def address(host: str, protocol: str = "ip4") -> PeerAddress:
    return PeerAddress.parse(f"/{protocol}/{host}/tcp/31330/p2p/{ID}")


@pytest.mark.parametrize(
    "text",
    [
        f"meshd:{RUN}@{EXAMPLE}",
        f"meshd:{RUN}@{EXAMPLE},/ip6/2001:db8::1/tcp/1/p2p/{ID},/dns4/seed.example.org/tcp/65535/p2p/{ID}",
        f"meshd:{RUN}@file:/etc/meshd/registry.toml",
    ],
)
def test_links_are_read_and_written_back(text: str) -> None:
    assert str(SwarmLink.parse(f"  {text}\n")) == text


def test_parts_of_a_link() -> None:
    link = SwarmLink.parse(f"meshd:{RUN}@{EXAMPLE}")
    assert link == SwarmLink(RUN, (PeerAddress("ip4", "203.0.113.7", 31330, ID),))
    assert SwarmLink.parse(f"meshd:{RUN}@file:peers.toml") == SwarmLink(RUN, file=Path("peers.toml"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://example.org", "does not begin with `meshd:`"),
        ("meshd:", "run id '' is not 40 hex digits"),
        (f"meshd:{RUN[:-1]}@{EXAMPLE}", f"run id '{RUN[:-1]}' is not 40 hex digits"),
        (f"meshd:{RUN.upper()}@{EXAMPLE}", "lower case"),
        (f"meshd:{RUN}", "`@` and at least one address are missing"),
        (f"meshd:{RUN}@", "`@` and at least one address are missing"),
        (f"meshd:{RUN}@file:", "names no file"),
        (f"meshd:{RUN}@1.2.3.4:31330", "address 1, '1.2.3.4:31330': not of the form"),
        (f"meshd:{RUN}@{EXAMPLE},", "address 2, ''"),
        (f"meshd:{RUN}@/ip4/1.2.3/tcp/1/p2p/{ID}", "'1.2.3' is not an ip4 address"),
        (f"meshd:{RUN}@/ip5/1.2.3.4/tcp/1/p2p/{ID}", "'ip5' is not one of ip4, ip6, dns"),
        (f"meshd:{RUN}@/dns4/a_-/tcp/1/p2p/{ID}", "'a_-' is not a host name"),
        (f"meshd:{RUN}@/ip4/1.2.3.4/tcp/0/p2p/{ID}", "port '0' is not a number from 1 to 65535"),
        (f"meshd:{RUN}@/ip4/1.2.3.4/tcp/x/p2p/{ID}", "port 'x'"),
        (f"meshd:{RUN}@/ip4/1.2.3.4/tcp/1/p2p/{ID[:-1]}", f"peer id '{ID[:-1]}'"),
        (f"meshd:{RUN}@/ip4/1.2.3.4/tcp/1/p2p/0{ID[1:]}", "'0' does not occur in a peer id"),
    ],
)
def test_wrong_links_name_the_part_and_show_an_example(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SwarmLink.parse(text)
    assert problem in str(caught.value)
    assert EXAMPLE in caught.value.fix


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", Reach.LOOPBACK),
        ("::1", Reach.LOOPBACK),
        ("localhost", Reach.LOOPBACK),
        ("10.1.2.3", Reach.NETWORK),
        ("192.168.1.2", Reach.NETWORK),
        ("100.64.0.1", Reach.NETWORK),
        ("169.254.1.1", Reach.NETWORK),
        ("fe80::1", Reach.NETWORK),
        ("seed", Reach.NETWORK),
        ("8.8.8.8", Reach.PUBLIC),
        ("2606:4700::1", Reach.PUBLIC),
    ],
)
def test_reach(host: str, expected: Reach) -> None:
    assert reach(host) is expected


@pytest.mark.parametrize(
    ("announced", "bootstrap"),
    [
        ("127.0.0.1", address("127.0.0.1")),
        ("127.0.0.1", address("localhost", "dns4")),
        ("192.168.1.2", address("192.168.1.9")),
        ("8.8.8.8", address("9.9.9.9")),
        ("me.example.org", address("9.9.9.9")),
        ("8.8.8.8", address("127.0.0.1")),
    ],
)
def test_c03_addresses_that_the_swarm_can_dial_pass(announced: str, bootstrap: PeerAddress) -> None:
    check_announce([announced], [bootstrap], announced)


@pytest.mark.parametrize(
    ("announced", "bootstrap", "fix"),
    [
        ("127.0.0.1", address("9.9.9.9"), "the public address of this machine"),
        ("192.168.1.2", address("9.9.9.9"), "the public address of this machine"),
        ("localhost", address("9.9.9.9"), "the public address of this machine"),
        ("127.0.0.1", address("seed.example.org", "dns4"), "the address of this machine in that network"),
    ],
)
def test_c03_addresses_that_the_swarm_cannot_dial_are_refused(
    announced: str, bootstrap: PeerAddress, fix: str
) -> None:
    with pytest.raises(ConfigError, match=bootstrap.host) as caught:
        check_announce([announced], [address("127.0.0.1"), bootstrap], announced)
    assert (caught.value.field, caught.value.value) == ("announce", announced)
    assert fix in caught.value.fix


def test_c03_without_announce_the_listen_address_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_announce(["127.0.0.1"], [address("9.9.9.9")], None)
    assert caught.value.field == "listen"
    assert caught.value.fix.startswith("announce = ")


def test_any_address_that_reaches_far_enough_will_do() -> None:
    check_announce(["127.0.0.1", "8.8.8.8"], [address("9.9.9.9")], None)
    check_announce([], [address("9.9.9.9")], None)
    check_announce(["127.0.0.1"], [], None)


def test_the_link_shows_the_farthest_address_first_and_no_loopback() -> None:
    shown = presentable([address("127.0.0.1"), address("10.0.0.1"), address("8.8.8.8")])
    assert [a.host for a in shown] == ["8.8.8.8", "10.0.0.1"]
    assert [a.host for a in presentable([address("127.0.0.1")])] == ["127.0.0.1"]
    assert len(presentable([address(f"10.0.0.{i}") for i in range(1, 20)])) == 8


def test_socket_maddr() -> None:
    assert socket_maddr("1.2.3.4", 5) == "/ip4/1.2.3.4/tcp/5"
    assert socket_maddr("::1", 5) == "/ip6/::1/tcp/5"
    assert socket_maddr("seed", 5) == "/dns/seed/tcp/5"
