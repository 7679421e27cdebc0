"""Who holds which stage, as a snapshot of peer records tells it: what all of placement is computed from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshd.proto import meshd_pb2 as pb

# A peer that has said that it is about to move has long arrived, or given it up, after so long. Without a bound, one
# that hangs would keep all others from moving.
MOVING_S = 180.0
_SETTLED = (pb.PEER_STATE_SYNCING, pb.PEER_STATE_WORKING)
_CLAIMING = (pb.PEER_STATE_STARTING, pb.PEER_STATE_JOINING, *_SETTLED)


@dataclass(frozen=True, slots=True)
class Claim:
    """One peer's hold on a stage.

    stage: where it counts; of a peer that is about to move, the stage it goes to. settled: it has begun to get the
    stage's state. working: its stage can rely on it. tokens_per_s: its capacity, 0 while unknown. memory_bytes: what it
    has free for a stage, 0 when it has not said. claimed, moving_since: seconds since the epoch, by its clock.
    """

    peer_id: str
    stage: int
    settled: bool
    working: bool
    tokens_per_s: float
    claimed: float
    memory_bytes: int
    pinned: bool
    moving_since: float = 0.0

    def fits(self, need: int) -> bool:
        """Whether a stage that needs so many bytes fits there, as far as is known."""
        return not self.memory_bytes or need <= self.memory_bytes


def claims_of(records: Iterable[pb.Record], stages: int, now: float) -> list[Claim]:
    """The claims in a snapshot. A claim is a lease: expired ones, those of leaving peers and of peers without a stage
    are left out."""
    found = (
        _claim(record, now) for record in records if record.role == pb.ROLE_STAGE and record.expires > now
    )
    return [claim for claim in found if claim is not None and 0 <= claim.stage < stages]


def _claim(record: pb.Record, now: float) -> Claim | None:
    moving = record.moving_since > 0 and now - record.moving_since < MOVING_S
    if record.state not in _CLAIMING and not (moving and record.state == pb.PEER_STATE_DRAINING):
        return None
    return Claim(
        record.peer_id,
        record.moving_to if moving else record.stage,
        record.state in _SETTLED,
        record.state == pb.PEER_STATE_WORKING and not moving,
        record.capacity_tokens_per_s,
        record.claimed,
        record.memory_bytes,
        record.pinned,
        record.moving_since if moving else 0.0,
    )


def staying(record: pb.Record) -> pb.Record:
    """The record as if its peer had not said that it is about to move."""
    copy = pb.Record()
    copy.CopyFrom(record)
    copy.moving_since = 0.0
    return copy


def order(claim: Claim, needs: Sequence[int]) -> tuple[bool, int, float, str]:
    """The one order over claims on which all peers agree: the first of a stage keeps it.

    Those who cannot go elsewhere come first: pinned by their user, then those whom the fewest stages fit. Then the
    earlier claim. Nothing in it changes while a claim lasts, and what is proved about stale snapshots hangs on that.
    """
    return (
        not claim.pinned,
        sum(claim.fits(need) for need in needs),
        claim.claimed,
        claim.peer_id,
    )


def typical_rate(claims: Iterable[Claim]) -> float:
    """What a replica of unknown capacity counts for: the mean of the known ones."""
    known = [claim.tokens_per_s for claim in claims if claim.tokens_per_s > 0]
    return sum(known) / len(known) if known else 1.0


def rated(claims: Iterable[Claim]) -> list[Claim]:
    """The claims, unknown capacities replaced by the typical one."""
    claims = list(claims)
    rate = typical_rate(claims)
    return [claim if claim.tokens_per_s > 0 else replace(claim, tokens_per_s=rate) for claim in claims]


@dataclass
class Load:
    """What one stage has: replicas, and their capacity together in label tokens per second. The pipeline's is that of
    its slowest stage."""

    replicas: int = 0
    tokens_per_s: float = 0.0

    def add(self, tokens_per_s: float) -> None:
        self.replicas += 1
        self.tokens_per_s += tokens_per_s


def loads_of(claims: Iterable[Claim], stages: int) -> list[Load]:
    """By stage. The claims must be `rated`."""
    loads = [Load() for _ in range(stages)]
    for claim in claims:
        loads[claim.stage].add(claim.tokens_per_s)
    return loads
