"""How much a peer's device could pass: what placement goes by. What does pass says nothing about a peer: in a running
pipeline it is the same at every stage, that of the slowest. Pure."""

from __future__ import annotations

from collections import deque

# Over so much time, and so many microbatches, whichever is longer.
_WINDOW_S = 60.0
_ENOUGH = 8


class Capacity:
    """Tokens per second of which the device was at work, over the last minute or more. All that it did counts,
    evaluations and snapshots too: they are part of serving the stage. Links are not looked at."""

    def __init__(self, tokens: int) -> None:
        """tokens: of one microbatch."""
        self._tokens = tokens
        self._seen: deque[tuple[float, float, float]] = deque()  # time, microbatches, busy seconds
        self.tokens_per_s = 0.0
        """0 until enough was seen; then the last that is known, however long nothing has passed."""

    def look(self, now: float, microbatches: float, busy_s: float) -> None:
        """Note the totals so far of microbatches passed and of seconds at work, at the time `now` (monotonic)."""
        seen = self._seen
        if seen and microbatches == seen[-1][1]:
            if len(seen) == 1:
                # What was done before the first one is not of its making.
                seen[0] = (now, microbatches, busy_s)
            return
        seen.append((now, microbatches, busy_s))
        while len(seen) > 2 and now - seen[1][0] >= _WINDOW_S and microbatches - seen[1][1] >= _ENOUGH:
            seen.popleft()
        _, before, busy_before = seen[0]
        passed, took = microbatches - before, busy_s - busy_before
        if passed >= _ENOUGH and took > 0:
            self.tokens_per_s = self._tokens * passed / took
