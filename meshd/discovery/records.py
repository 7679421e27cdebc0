"""Signed peer records: sealing, opening, and the book of what is known. Pure: bytes and time come in as arguments.

A record is a hint that anyone in the DHT may replay or forge, so each is bound to its writer's key, to the run, and to
a short life (DESIGN sections 6 and 10).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict

from google.protobuf.message import DecodeError

from meshd import PROTOCOL_VERSION
from meshd.identity import Identity, peer_id_of, verify
from meshd.proto import meshd_pb2 as pb

MAX_ENVELOPE_BYTES = 10 * 1024
MAX_AHEAD_S = 600.0  # the longest a record may live
SKEW_S = 5.0  # clocks of honest peers differ by no more; larger skew is reported at the handshake
MAX_PEERS = 20_000
_CONTEXT = b"meshd-record-v1:"
_MAX_NAME, _MAX_MADDRS, _MAX_ADDRESS, _MAX_ORIGINS = 64, 8, 256, 256
_CHECKED_SIGNATURES = 4096  # remembered, so that a renewal is verified once and not once per DHT answer


def seal(record: pb.Record, identity: Identity) -> bytes:
    """The serialized RecordEnvelope of `record`, signed. Raises ValueError when it is too large or not one's own."""
    if record.peer_id != identity.peer_id:
        raise ValueError(f"record of {record.peer_id} cannot be signed by {identity.peer_id}")
    if problem := content_problem(record):
        raise ValueError(f"record cannot be announced: {problem}")
    body = record.SerializeToString(deterministic=True)
    envelope = pb.RecordEnvelope(
        record=body, public_key=identity.public_key, signature=identity.sign(_CONTEXT + body)
    ).SerializeToString()
    if len(envelope) > MAX_ENVELOPE_BYTES:
        raise ValueError(f"record of {len(envelope)} bytes is larger than {MAX_ENVELOPE_BYTES}")
    return envelope


class Opener:
    """Checks envelopes of one run. Remembers the signatures it has verified, not the records."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._verified: OrderedDict[bytes, None] = OrderedDict()

    def open(self, data: bytes, now: float, *, expired_ok: bool = False) -> pb.Record | str:
        """The record in a serialized RecordEnvelope, or the reason why it is refused.

        now: seconds since the epoch. expired_ok: do not refuse a record for being past its end (the DHT's own check
        judges a whole dictionary, and a neighbour's clock may be a little behind).
        """
        if len(data) > MAX_ENVELOPE_BYTES:
            return f"{len(data)} bytes, more than {MAX_ENVELOPE_BYTES}"
        try:
            envelope = pb.RecordEnvelope.FromString(data)
            record = pb.Record.FromString(envelope.record)
        except DecodeError:
            return "not a record envelope"
        if len(envelope.public_key) != 32:
            return "public key is not 32 bytes"
        if peer_id_of(envelope.public_key) != record.peer_id:
            return "peer id does not belong to the public key"
        if record.run_id != self._run_id:
            return f"belongs to run {record.run_id[:40]!r}"
        if problem := content_problem(record):
            return problem
        if record.expires > now + MAX_AHEAD_S + SKEW_S:
            return f"expires {record.expires - now:.0f} s ahead, more than {MAX_AHEAD_S:.0f}"
        if not expired_ok and record.expires <= now:
            return f"expired {now - record.expires:.1f} s ago"
        if not self._signature_ok(envelope, data):
            return "signature does not fit"
        return record

    def _signature_ok(self, envelope: pb.RecordEnvelope, data: bytes) -> bool:
        digest = hashlib.sha256(data).digest()
        if digest in self._verified:
            self._verified.move_to_end(digest)
            return True
        if not verify(envelope.public_key, envelope.signature, _CONTEXT + envelope.record):
            return False
        self._verified[digest] = None
        if len(self._verified) > _CHECKED_SIGNATURES:
            self._verified.popitem(last=False)
        return True


def open_envelope(data: bytes, run_id: str, now: float) -> pb.Record | str:
    """The valid record of run `run_id` in a serialized RecordEnvelope, or the reason why it is refused."""
    return Opener(run_id).open(data, now)


class RecordBook:
    """The newest record of each peer. A record never replaces one of a later (incarnation, version)."""

    def __init__(self) -> None:
        self._records: dict[str, pb.Record] = {}

    def add(self, record: pb.Record, now: float) -> str | None:
        """Take in a verified record. The reason when it is refused: older than what is known, or the book is full."""
        known = self._records.get(record.peer_id)
        if known is None and len(self._records) >= MAX_PEERS:
            self._prune(now)
            if len(self._records) >= MAX_PEERS:
                return f"{MAX_PEERS} peers are known already"
        if known is not None and _age_key(record) < _age_key(known):
            return (
                f"version {record.version} of incarnation {record.incarnation} is older than "
                f"version {known.version} of incarnation {known.incarnation}, which is known"
            )
        self._records[record.peer_id] = record
        return None

    def live(self, now: float, *, without: str) -> tuple[pb.Record, ...]:
        """Unexpired records by peer id, but for peer `without` and peers that have taken theirs back."""
        self._prune(now)
        return tuple(
            record
            for peer_id, record in sorted(self._records.items())
            if peer_id != without and record.expires > now and not is_withdrawn(record)
        )

    def _prune(self, now: float) -> None:
        # A record stays known past its end for as long as an older one could still be replayed.
        gone = [peer_id for peer_id, record in self._records.items() if record.expires + MAX_AHEAD_S < now]
        for peer_id in gone:
            del self._records[peer_id]


def hello_of(mine: pb.Record, wall_clock: float = 0.0) -> pb.HelloRequest:
    """How the peer of a record greets another. wall_clock: its time; 0: not said, they have met."""
    return pb.HelloRequest(
        run_id=mine.run_id,
        protocol=PROTOCOL_VERSION,
        peer_id=mine.peer_id,
        name=mine.name,
        role=mine.role,
        stage=mine.stage,
        incarnation=mine.incarnation,
        wall_clock=wall_clock,
    )


def withdrawn(record: pb.Record) -> pb.Record:
    """The record that takes `record` back: the next version, without a state. It must outlive what it replaces."""
    gone = pb.Record()
    gone.CopyFrom(record)
    gone.state = pb.PEER_STATE_UNSPECIFIED
    gone.version += 1
    gone.expires += 0.001  # the DHT keeps the value that lives longer
    del gone.committed[:]
    return gone


def is_withdrawn(record: pb.Record) -> bool:
    return record.state == pb.PEER_STATE_UNSPECIFIED


def _age_key(record: pb.Record) -> tuple[int, int]:
    return record.incarnation, record.version


def content_problem(record: pb.Record) -> str | None:
    """What in the record's fields is out of its bounds (meshd.proto), or None."""
    if record.role not in (pb.ROLE_STAGE, pb.ROLE_SEED, pb.ROLE_ANCHOR):
        return f"unknown role {record.role}"
    if record.state not in pb.PeerState.values():
        return f"unknown state {record.state}"
    if record.stage < -1:
        return f"stage {record.stage}"
    if len(record.name) > _MAX_NAME:
        return f"name of {len(record.name)} characters, more than {_MAX_NAME}"
    if len(record.maddrs) > _MAX_MADDRS:
        return f"{len(record.maddrs)} libp2p addresses, more than {_MAX_MADDRS}"
    if any(len(address) > _MAX_ADDRESS for address in (record.address, *record.maddrs)):
        return f"an address longer than {_MAX_ADDRESS} characters"
    if len(record.committed) > _MAX_ORIGINS:
        return f"counts of {len(record.committed)} origins, more than {_MAX_ORIGINS}"
    rates = {"tokens_per_s": record.tokens_per_s, "capacity_tokens_per_s": record.capacity_tokens_per_s}
    times = (record.expires, record.claimed, record.moving_since)
    if not all(map(math.isfinite, (*rates.values(), *times))):
        return "a number that is not finite"
    for name, rate in rates.items():
        if rate < 0:
            return f"{name} = {rate}"
    return None
