"""Where a model is cut, and which places a microbatch visits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from meshd.errors import ConfigError

Tied = Literal["none", "ring", "freeze"]


@dataclass(frozen=True)
class Hop:
    """One place that a microbatch visits.

    `stage` says which stage's peer serves it; `first` to `last` (exclusive) are the layers it runs; `embed` means
    that it takes token ids, `head` that it applies the final norm and the head and gives logits.
    """

    index: int
    stage: int
    first: int
    last: int
    embed: bool
    head: bool


def hops(layers: int, cut: Sequence[int], tied: Tied) -> list[Hop]:
    """The places a microbatch visits, in order: one per stage, and in a ring one more, the head, back on stage 0.

    cut: first layer of every stage but the first, as `check_cut` accepts it. A single stage holds embedding and head
    anyway, so it has one hop whatever `tied` says. DESIGN section 2.8.
    """
    check_cut(layers, cut)
    bounds = [0, *cut, layers]
    ring = tied == "ring" and len(cut) > 0
    end = len(cut)
    out = [
        Hop(stage, stage, first, last, embed=stage == 0, head=stage == end and not ring)
        for stage, (first, last) in enumerate(pairwise(bounds))
    ]
    if ring:
        out.append(Hop(end + 1, 0, layers, layers, embed=False, head=True))
    return out


def check_cut(layers: int, cut: Sequence[int]) -> None:
    """Refuse a cut that does not give every stage at least one of `layers` layers. Raises ConfigError."""
    if len(cut) + 1 > layers:
        raise ConfigError(
            "model.cut" if cut else "model.stages",
            list(cut),
            f"{len(cut) + 1} stages are more than the model's {layers} layers",
            f"use at most {layers} stages",
        )
    for before, after in pairwise([0, *cut, layers]):
        if before >= after:
            raise ConfigError(
                "model.cut",
                list(cut),
                f"layer {after} follows layer {before}, so a stage would be empty",
                f"give {len(cut)} ascending numbers from 1 to {layers - 1}: the first layer of each later stage",
            )


def check_stages(layers: int, stages: int) -> None:
    """Refuse more stages than layers. Raises ConfigError."""
    if not 1 <= stages <= layers:
        raise ConfigError(
            "model.stages",
            stages,
            f"the model has {layers} layers and every stage needs one",
            f"use 1 to {layers} stages",
        )


def balance(
    costs: Sequence[float],
    stages: int,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    last_scale: float = 1.0,
) -> list[int]:
    """The cut whose slowest stage is fastest.

    costs: seconds (or any unit) of each layer. first_extra and last_extra: what the first and last stage do besides
    their layers. last_scale: factor on the layers of the last stage (it need not recompute: its forward pass is
    followed at once by its backward pass). Returns the first layer of every stage but the first. Among equally fast
    cuts it gives earlier stages fewer layers. Exact, O(stages * layers^2). Raises ConfigError on more stages than
    layers.
    """
    layers = len(costs)
    check_stages(layers, stages)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, first: int, last: int) -> float:
        cost = prefix[last] - prefix[first]
        if stage == stages - 1:
            cost = cost * last_scale + last_extra
        return cost + first_extra if stage == 0 else cost

    # best[s][n]: the slowest of stages 0..s when they hold layers 0..n-1; start[s][n]: first layer of stage s there.
    best = [[float("inf")] * (layers + 1) for _ in range(stages)]
    start = [[0] * (layers + 1) for _ in range(stages)]
    for n in range(1, layers + 1):
        best[0][n] = stage_cost(0, 0, n)
    for stage in range(1, stages):
        for n in range(stage + 1, layers + 1):
            for first in range(stage, n):
                slowest = max(best[stage - 1][first], stage_cost(stage, first, n))
                if slowest < best[stage][n]:
                    best[stage][n], start[stage][n] = slowest, first
    cut, n = [], layers
    for stage in range(stages - 1, 0, -1):
        n = start[stage][n]
        cut.append(n)
    return cut[::-1]
