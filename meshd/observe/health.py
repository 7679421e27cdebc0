"""Health is useful work in the last minute, or a stated good reason to wait; not that a process runs (C14, C15). Pure:
the time comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshd.observe.status import STATES, duration
from meshd.proto import meshd_pb2 as pb

# Without useful work for so long, and without a good reason, a peer that works is not healthy.
USEFUL_S = 60.0
# Model, data and state are to be here within so long of the start; a large download is told by its log.
READY_S = 900.0

# Counters that rise with useful work, and the words for it.
USEFUL: Mapping[str, str] = {
    "microbatches_added": "added a gradient",
    "gossip_exchanges": "averaged with a replica",
    "activation_sent_bytes": "carried a microbatch",
    "gradient_sent_bytes": "carried a microbatch",
    "evaluation_sent_bytes": "carried an evaluation",
    "evaluations_scored": "scored an evaluation",
    "snapshots_kept": "kept a snapshot",
    "gossip_followed": "followed a replica",
    "anchor_passes": "ran a clean pass",
}


@dataclass(frozen=True)
class Health:
    """ok: whether the peer is of use, or waits for a good reason; why: in one sentence, either way."""

    ok: bool
    why: str


@dataclass(frozen=True)
class Situation:
    """What there is to judge by. Times are monotonic seconds.

    state: as the peer announces it, since `state_since`. doing: in its own words. useful: its last useful work, done
    `useful_at` (None: none yet). waiting: a good reason to do nothing now; empty: there is none. excused_at: when there
    last was one: from then on it has its minute again.
    """

    state: pb.PeerState
    state_since: float
    doing: str
    useful: str = ""
    useful_at: float | None = None
    waiting: str = ""
    excused_at: float | None = None


def judge(situation: Situation, now: float) -> Health:
    """Whether a peer is healthy at `now`, and why."""
    word = STATES.get(situation.state, ("unknown", ""))[0]
    since = now - situation.state_since
    if situation.state in (pb.PEER_STATE_FINISHED, pb.PEER_STATE_DRAINING):
        return Health(True, f"{word}: {situation.doing}")
    if situation.state != pb.PEER_STATE_WORKING:
        return Health(since <= READY_S, f"{word} for {duration(since)}: {situation.doing}")
    quiet, done = since, "nothing done yet"
    if situation.useful_at is not None:
        ago = now - situation.useful_at
        quiet, done = min(since, ago), f"{situation.useful} {duration(ago)} ago"
    if quiet <= USEFUL_S:
        return Health(True, f"{word}: {done}")
    if situation.waiting:
        return Health(True, f"waiting: {situation.waiting} ({done})")
    if situation.excused_at is not None:
        quiet = min(quiet, now - situation.excused_at)
    return Health(quiet <= USEFUL_S, f"no useful work for {duration(quiet)} ({done}): {situation.doing}")


def reason_to_wait(missing: Sequence[int], over: bool, evaluating: bool, alone: str, own: str = "") -> str:
    """Why a working peer may do nothing now; empty: it may not.

    missing: other stages that nobody serves. over: the run has its tokens. evaluating: the base model is evaluated,
    before training. alone: what keeps this peer from seeing anybody; own: what its role says.
    """
    if over:
        return "the run has its tokens, its result is being kept"
    if alone:
        # Whoever runs this peer can do something about it: no good reason.
        return ""
    if missing:
        stages = "stage " + str(missing[0]) if len(missing) == 1 else "stages " + ", ".join(map(str, missing))
        return f"nobody serves {stages}: the swarm pauses until somebody does"
    if evaluating:
        return "the base model is being evaluated, before training"
    return own


@dataclass
class Progress:
    """When counters of useful work last rose, seen by looking at them again and again."""

    useful: str = ""
    at: float | None = None
    _before: dict[str, float] = field(default_factory=dict)

    def look(self, values: Mapping[str, float], now: float) -> None:
        """values: all metrics by name. What has risen since the last look counts as done `now`."""
        for name, words in USEFUL.items():
            value = values.get(name, 0.0)
            if value > self._before.get(name, 0.0):
                self.useful, self.at = words, now
            self._before[name] = value
