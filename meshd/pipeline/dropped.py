"""Why a microbatch is not coming back."""

from __future__ import annotations

from meshd.errors import MeshdError
from meshd.proto import meshd_pb2 as pb

Reason = pb.Drop.Reason

# Another replica may do better; the rest is final for this microbatch.
_RETRIABLE = {
    Reason.REASON_CORRUPT,
    Reason.REASON_LEAVING,
    Reason.REASON_FAILED,
    Reason.REASON_NO_SNAPSHOT,
}


class Dropped(MeshdError):
    """A microbatch was given up, here or further down. partial: some stage has added its gradient already."""

    def __init__(self, reason: Reason, text: str, partial: bool = False) -> None:
        super().__init__(f"{Reason.Name(reason).removeprefix('REASON_').lower()}: {text}")
        self.reason, self.text, self.partial = reason, text, partial

    @property
    def retriable(self) -> bool:
        return self.reason in _RETRIABLE


class Corrupt(Dropped):
    """What came back of a microbatch cannot be used: its bytes are not what they should be."""

    def __init__(self, text: str) -> None:
        super().__init__(Reason.REASON_CORRUPT, text, partial=True)


class Busy(MeshdError):
    """The replica has no room now."""


class NoPrior(Busy):
    """The replica lacks the codec prior that the frame names, and is getting it."""


class Refused(MeshdError):
    """The replica will never take this attempt."""
