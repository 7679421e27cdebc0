"""What a DHT node of meshd stores and believes: signed records of this run, under the right key, and nothing else.

hivemind's own signature validator lets anybody write under an untagged subkey with any end (DESIGN section 10).
"""

from __future__ import annotations

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from meshd.clock import Clock
from meshd.discovery.records import Opener
from meshd.proto import meshd_pb2 as pb

_END_TOLERANCE_S = 0.01


def dht_key(run_id: str, stage: int) -> str:
    """The DHT key of the records of one stage; stage -1: peers without one (seeds, joiners)."""
    return f"meshd/{run_id}/{stage}"


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Called by hivemind for every value that others store here or answer with. Never raises."""

    def __init__(self, run_id: str, clock: Clock) -> None:
        self._run_id, self._clock = run_id, clock
        self._opener = Opener(run_id)

    def validate(self, record: DHTRecord) -> bool:
        opened = self._opener.open(_unpack(record.value) or b"", self._clock.time(), expired_ok=True)
        if isinstance(opened, str):
            return False
        key: bytes = DHTID.generate(source=dht_key(self._run_id, opened.stage)).to_bytes()
        subkey: bytes = record.subkey
        end: float = record.expiration_time
        return (
            key == record.key
            and subkey == _pack_str(opened.peer_id)
            and abs(opened.expires - end) <= _END_TOLERANCE_S
        )

    def open(self, value: object, now: float) -> pb.Record | str:
        """The record in a value that the DHT has found, or the reason why it is refused."""
        return self._opener.open(value, now) if isinstance(value, bytes) else "not bytes"


def _unpack(value: bytes) -> bytes | None:
    """The content of a msgpack byte string of up to 64 KiB; None for anything else, without decoding it."""
    if value[:1] == b"\xc4":
        size, content = value[1:2], value[2:]
    elif value[:1] == b"\xc5":
        size, content = value[1:3], value[3:]
    else:
        return None
    return content if int.from_bytes(size, "big") == len(content) else None


def _pack_str(text: str) -> bytes:
    """msgpack of a text of 32 to 255 bytes."""
    data = text.encode()
    return b"\xd9" + len(data).to_bytes(1, "big") + data
