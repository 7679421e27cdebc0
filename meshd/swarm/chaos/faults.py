"""Which faults hit which peers, and when. Pure: the random source comes in, so that a seed repeats a schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

Kind = Literal["kill", "freeze", "restart", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)

T = TypeVar("T")

# A frozen peer is noticed within about 5 s: some freezes end before that, most after.
FREEZE_S = (3.0, 16.0)
# How long a killed peer stays away, as a volunteer's machine that starts again.
AWAY_S = (0.0, 15.0)
# A cut link is noticed within about 10 s.
CUT_S = (12.0, 25.0)


@dataclass(frozen=True)
class Fault:
    """One fault. at_s: seconds after the swarm has begun to train.

    kill: SIGKILL to the daemon and its p2pd, started again after `away_s`. freeze: SIGSTOP to both for `frozen_s`,
    then SIGCONT, or with `fatal` SIGKILL, and started again after `away_s`. restart: SIGTERM, started again once it has
    left. cut: its link is down for `cut_s`, then up again.
    """

    at_s: float
    peer: str
    kind: Kind
    frozen_s: float = 0.0
    cut_s: float = 0.0
    fatal: bool = False
    away_s: float = 0.0

    @property
    def words(self) -> str:
        if self.kind == "freeze":
            return f"freeze of {self.frozen_s:.0f} s, then {'kill' if self.fatal else 'on'}"
        return f"link cut for {self.cut_s:.0f} s" if self.kind == "cut" else self.kind


def schedule(
    peers: Sequence[str],
    duration_s: float,
    period_s: float,
    rng: random.Random,
    kinds: Sequence[Kind] = KINDS,
) -> list[Fault]:
    """A fault every `period_s` from the first period's end on, before `duration_s`.

    Peers and kinds are drawn without return until all had their turn, so that none is spared by chance; no peer is hit
    twice in a row. Raises ValueError without peers or for a period that is not above 0.
    """
    if not peers or period_s <= 0:
        raise ValueError(f"{len(peers)} peers, a period of {period_s} s")
    victims, chosen = _turns(peers, rng), _turns(kinds, rng)
    faults = []
    at_s = period_s
    while at_s < duration_s:
        kind = next(chosen)
        freeze = kind == "freeze"
        fatal = freeze and rng.random() < 0.3
        faults.append(
            Fault(
                at_s,
                next(victims),
                kind,
                frozen_s=rng.uniform(*FREEZE_S) if freeze else 0.0,
                cut_s=rng.uniform(*CUT_S) if kind == "cut" else 0.0,
                fatal=fatal,
                away_s=rng.uniform(*AWAY_S) if kind == "kill" or fatal else 0.0,
            )
        )
        at_s += period_s
    return faults


def _turns(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    """`items` in random order, again and again; none twice in a row where there is a choice."""
    last: T | None = None
    while True:
        order = rng.sample(list(items), len(items))
        if len(order) > 1 and order[0] == last:
            order.append(order.pop(0))
        yield from order
        last = order[-1]
