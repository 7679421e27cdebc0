"""Bounds that every transport keeps (proto/meshd/v1: a message is at most 4 MiB)."""

from __future__ import annotations

from google.protobuf.message import Message

MAX_MESSAGE_BYTES = 4 << 20

# What waits of a stream in each direction besides the chunk that gRPC has in hand. No more: what lies here is past the
# reach of PrioritySender.
BUFFER_BYTES = 1 << 20

# A unary call (Hello, Status, Manifest, ...) without an answer for so long is a lost link.
UNARY_TIMEOUT_S = 10.0

# After a clean close a dialler waits so long for the peer to end its side, then breaks the stream.
CLOSE_GRACE_S = 2.0


def checked_size(message: Message) -> int:
    """Serialized size, bytes. ValueError when it may not be sent: large payloads travel as chunks."""
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        kind = type(message).__name__
        raise ValueError(
            f"{kind} of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}: send payloads in chunks"
        )
    return size
