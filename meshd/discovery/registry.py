"""Who is in the swarm: the interface, independent of where records live (DHT, static file, memory)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshd.proto import meshd_pb2 as pb


class Registry(Protocol):
    """Short-lived signed records of peers. Hints only: truth is established at the handshake (DESIGN section 6)."""

    async def announce(self, record: pb.Record) -> None:
        """Publish or renew this peer's record; it lives until `record.expires`. The registry signs it.

        Raises NetworkError when it could not be stored anywhere; the caller tries again at the next renewal.
        """

    async def withdraw(self) -> None:
        """Take this peer's record back, as far as possible. Never raises."""

    async def refresh(self) -> Sequence[pb.Record]:
        """Read the swarm anew (may take up to seconds), update `peers` and return it."""

    @property
    def peers(self) -> Sequence[pb.Record]:
        """Valid, unexpired records of the run at the last refresh, this peer's own left out. Never blocks.

        A record without a state or protocol is of a peer that others say should be there, and that has not answered.
        """

    def heard(self, record: pb.Record) -> None:
        """Take in what a peer of this run has said of itself over gRPC: while the registry cannot be read, or others
        cannot write to it, those who are known stay known. A record that does not fit is left out."""

    @property
    def problem(self) -> str:
        """What is wrong with the registry now, in one line for people; empty when nothing is."""

    async def close(self) -> None: ...
