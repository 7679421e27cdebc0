"""Rates of links: how people write them, and what the kernel's token bucket (`tc tbf`) is told. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshd.config.peer import MIN_RATE_BPS

MAX_RATE_BPS = 100_000_000_000

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")
_UNITS = {None: 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}

# What a bucket lets through at once, and what it lets wait, in seconds of its rate. Smaller queues than these two and
# sixteen packets starve TCP on slow links; larger ones are the delay that home routers are known for.
_BURST_S, _QUEUE_S = 0.02, 0.1
_PACKET_BYTES = 1514


def parse_rate(text: str) -> int:
    """`20mbit` as bits/s; 0 for `none`. Raises ValueError with what to write."""
    if text == "none":
        return 0
    match = _RATE.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a rate: write 500kbit, 20mbit, 1.5gbit or none")
    rate = round(float(match[1]) * _UNITS[match[2]])
    if not MIN_RATE_BPS <= rate <= MAX_RATE_BPS:
        raise ValueError(
            f"{text!r} is out of range: {show_rate(MIN_RATE_BPS)} to {show_rate(MAX_RATE_BPS)}, or none for no limit"
        )
    return rate


def show_rate(rate_bps: float) -> str:
    """`20mbit`; `none` for 0."""
    if not rate_bps:
        return "none"
    for unit, factor in (("g", 1e9), ("m", 1e6), ("k", 1e3)):
        if rate_bps >= factor:
            return f"{rate_bps / factor:.4g}{unit}bit"
    return f"{rate_bps:.4g}bit"


def queue_arguments(rate_bps: int) -> list[str]:
    """What `tc qdisc ... root` is told for a link of this rate; 0: one that is counted and not limited."""
    if not rate_bps:
        return ["pfifo"]
    burst = max(2 * _PACKET_BYTES, round(rate_bps / 8 * _BURST_S))
    limit = burst + max(16 * _PACKET_BYTES, round(rate_bps / 8 * _QUEUE_S))
    return ["tbf", "rate", f"{rate_bps}bit", "burst", str(burst), "limit", str(limit)]


@dataclass(frozen=True)
class Link:
    """One peer's link, bits/s; 0: no limit."""

    up_bps: int = 0
    down_bps: int = 0
