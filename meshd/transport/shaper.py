"""When bytes that wait for a peer's uplink may go, and when they arrive. Pure: time and chance are passed in."""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, field

from meshd.transport.sender import Priority

# What an idle link may catch up on, seconds of its rate: so long a busy event loop may be late without the link
# standing idle for it.
BURST_S = 0.05

# One piece in so many goes to who has waited longest, whatever its priority: a link full of activations would starve
# a newcomer's state for ever.
FAIR_SHARE = 16

# Bytes of a packet: headers of Ethernet, IP and TCP (with timestamps), and what it carries at most.
_PACKET_HEADERS = 66
_PACKET_PAYLOAD = 1448
# gRPC's header of a message, and HTTP/2's of a frame of at most 16 KiB.
_MESSAGE_HEADER = 5
_FRAME_HEADER = 9
_FRAME_PAYLOAD = 1 << 14

# Who preempts whom is decided again after so much: a packet, or a millisecond of the link if that is more.
_PIECE_BYTES = _PACKET_PAYLOAD
_PIECE_S = 0.001

# Arithmetic leaves fractions of a byte.
_NOTHING = 1e-3


@dataclass(frozen=True)
class LinkShape:
    """What an uplink is made to look like. delay_s: one way. jitter_s: up to so much more, by chance. rate_bps: bits/s;
    0: as fast as it goes."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bps: float = 0.0

    @property
    def off(self) -> bool:
        return not (self.delay_s or self.jitter_s or self.rate_bps)

    @property
    def longest_delay_s(self) -> float:
        return self.delay_s + self.jitter_s


def wire_bytes(size: int) -> int:
    """What a message of `size` bytes weighs on a link, headers included: what the kernel's token bucket counts, without
    encryption."""
    message = size + _MESSAGE_HEADER
    stream = message + _FRAME_HEADER * -(-message // _FRAME_PAYLOAD)
    return stream + _PACKET_HEADERS * -(-stream // _PACKET_PAYLOAD)


@dataclass(order=True)
class Ticket:
    """A message that waits for its turn. left_at: when its last byte had left; None while it waits."""

    priority: Priority
    number: int
    asked_at: float = field(compare=False)
    remaining: float = field(compare=False)
    left_at: float | None = field(default=None, compare=False)


class Bucket:
    """A token bucket, and the tickets that wait for its tokens: the lowest priority first, among equals the oldest.

    Bytes flow by the time that has passed, not by when somebody looks: a late look changes nothing. Times of the calls
    must not go back.
    """

    def __init__(self, rate_bps: float, now: float) -> None:
        self._rate = rate_bps / 8  # bytes/s
        self._depth = self._rate * BURST_S
        self._piece = max(_PIECE_BYTES, self._rate * _PIECE_S)
        self._level = self._depth
        self._at = now
        self._waiting: list[Ticket] = []
        self._through: list[Ticket] = []
        self._asked = 0
        self._pieces = 0

    @property
    def best(self) -> Ticket | None:
        """Whose turn it is, should nobody else ask."""
        return self._waiting[0] if self._waiting else None

    def ask(self, size: int, priority: Priority, now: float) -> Ticket:
        """Queue `size` bytes; they may be through at once."""
        self._flow(now)
        self._asked += 1
        ticket = Ticket(priority, self._asked, now, float(size))
        insort(self._waiting, ticket)
        self._flow(now)
        return ticket

    def withdraw(self, ticket: Ticket, now: float) -> None:
        """Its bytes are not wanted any more; those that have left are gone."""
        self._flow(now)
        if ticket.left_at is None:
            self._waiting.remove(ticket)
            self._flow(now)

    def advance(self, now: float) -> list[Ticket]:
        """Let go what may go until `now`; the tickets that are through since the last call."""
        self._flow(now)
        through, self._through = self._through, []
        return through

    def _flow(self, now: float) -> None:
        self._level += max(0.0, now - self._at) * self._rate
        self._at = max(self._at, now)
        while self._waiting:
            ticket = self._next()
            piece = min(self._piece, ticket.remaining)
            if self._level < piece - _NOTHING:
                return
            self._level -= piece
            ticket.remaining -= piece
            self._pieces += 1
            if ticket.remaining <= _NOTHING:
                # What is in the bucket now has come since then.
                ticket.left_at = max(ticket.asked_at, self._at - max(0.0, self._level) / self._rate)
                self._waiting.remove(ticket)
                self._through.append(ticket)
        self._level = min(self._level, self._depth)

    def through_at(self, ticket: Ticket) -> float:
        """The earliest time at which it can be through."""
        return self._at + max(0.0, ticket.remaining - self._level) / self._rate

    def _next(self) -> Ticket:
        if self._pieces % FAIR_SHARE == FAIR_SHARE - 1:
            return min(self._waiting, key=lambda ticket: ticket.number)
        return self._waiting[0]


class Arrivals:
    """When the messages of one stream arrive: none before one that was sent earlier."""

    def __init__(self, shape: LinkShape, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self._latest = 0.0

    def of(self, left_at: float) -> float:
        """The arrival of what left at `left_at`."""
        delay = self._shape.delay_s + self._shape.jitter_s * self._rng.random()
        self._latest = max(self._latest, left_at + delay)
        return self._latest
