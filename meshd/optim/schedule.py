"""When a stage steps and how far: learning rate, step gate and the global token counter. Pure.

Everything follows globally committed label tokens (DESIGN section 2.6), so that a stage with one replica and a stage
with five take equally many, equally large steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from meshd.config.runspec import OptimSpec, RunSpec
from meshd.proto import meshd_pb2 as pb


def learning_rate(optim: OptimSpec, step: int, total_steps: int) -> float:
    """Learning rate of inner step `step` (from 0): linear warm-up, then the schedule's shape down to
    `min_lr_ratio * lr` at `total_steps`, constant after."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    span = max(1, total_steps - optim.warmup_steps)
    done = min(1.0, (step - optim.warmup_steps) / span)
    if optim.schedule == "constant":
        return optim.lr
    shape = 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)


class StepGate:
    """Decides when a replica has added its share of a global batch.

    A replica's share is batch_tokens / live replicas. Microbatches do not divide shares evenly: what goes over a
    share counts toward the next, so that over time a stage steps exactly once per batch_tokens added by its replicas
    together.

    A microbatch is never split. Where it holds more tokens than a share (`outgrown`), a replica steps on each one, and
    no gate could do better: its steps are larger than they should be, as if batch_tokens were replicas * microbatch,
    and fewer in the same proportion. What goes by global tokens (learning rate, snapshots, the run's end) stays right.
    """

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._credit = 0.0

    def add(self, tokens: int, live_replicas: int) -> bool:
        """Count a microbatch's label tokens. True: step now."""
        share = self._batch_tokens / max(1, live_replicas)
        self._credit += tokens
        if self._credit < share:
            return False
        # A share that shrank (a replica joined) must not turn into a burst of steps on few tokens.
        self._credit = min(self._credit - share, share)
        return True


def outgrown(spec: RunSpec, live_replicas: int) -> str | None:
    """What to tell the operator when a stage has too many replicas for the run's batch, else None. Pure."""
    together, batch = live_replicas * spec.data.microbatch, spec.optim.inner_batch
    if together <= batch:
        return None
    return (
        f"{live_replicas} replicas step on a microbatch of {spec.data.microbatch} sequences each, {together} together, "
        f"where optim.inner_batch = {batch}: steps are {together / batch:.3g} times as large and as few. Fix: "
        f"optim.inner_batch = {together} or more, a smaller data.microbatch, or fewer replicas of this stage"
    )


class TokenCounter:
    """Grow-only counter of globally committed label tokens: one entry per origin, merged by maximum."""

    # What a message may bring. Runs have a handful of stage-0 replicas; their successors after churn add up slowly.
    MAX_ORIGINS = 256
    # A peer id is 52 characters. Counts travel in every offer: long names would make messages too large to send.
    MAX_ORIGIN_LENGTH = 128
    # Far above any run; so the sum over all origins fits the wire's 64 bits whatever a message claims.
    MAX_TOKENS = 1 << 55

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self._tokens.values())

    def get(self, origin: str) -> int:
        return self._tokens.get(origin, 0)

    def advance(self, origin: str, tokens: int) -> None:
        """Set an origin's count to at least `tokens`."""
        if tokens > self._tokens.get(origin, 0):
            self._tokens[origin] = tokens

    def merge(self, counts: Iterable[pb.Count]) -> None:
        """Take over what a peer knows. What is out of bounds is ignored: memory and messages stay bounded."""
        for count in counts:
            if not 0 < len(count.origin) <= self.MAX_ORIGIN_LENGTH or count.tokens > self.MAX_TOKENS:
                continue
            if count.origin in self._tokens or len(self._tokens) < self.MAX_ORIGINS:
                self.advance(count.origin, count.tokens)

    def to_proto(self) -> list[pb.Count]:
        return [pb.Count(origin=origin, tokens=tokens) for origin, tokens in sorted(self._tokens.items())]

    def state(self) -> Mapping[str, int]:
        return dict(self._tokens)
