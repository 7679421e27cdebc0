"""What the services need of a network. gRPC implements it (`grpc_server.serve`, `grpc_client.GrpcTransport`), and so
does a network in memory for tests and simulation (`memory.MemoryNetwork`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from meshd.errors import NetworkError
from meshd.proto import meshd_pb2 as pb

M = TypeVar("M")

# Largest payload piece in one message (DESIGN section 10: 1 MiB streams fastest, larger messages stall the loop).
CHUNK_BYTES = 1 << 20


class LinkLost(NetworkError):
    """The stream to a peer broke, timed out or was refused. The message says which peer and why, in one line."""


class Duplex(Protocol[M]):
    """An ordered stream of messages to and from one peer. Cancelling a wait in it, or a time-out around one, loses
    nothing and leaves the stream whole."""

    @property
    def remote(self) -> str:
        """Address of the other side, for messages to people."""

    async def send(self, message: M) -> None:
        """Hand over one message. Waits while the peer is slow (at most a few messages are buffered).

        Raises LinkLost when the stream is broken or either side has closed it; when the peer's handler refused, the
        kind of the refusal (see Transport). ValueError for a message over 4 MiB. Safe to call from several tasks:
        messages are never interleaved within themselves, and keep the order of the calls.
        """

    def __aiter__(self) -> AsyncIterator[M]:
        """Messages from the peer, in order. Ends when the peer closed its side; raises LinkLost when the stream
        broke, the kind of the refusal when the peer's handler refused (after what it had sent before)."""

    async def close(self) -> None:
        """Say no more; what was sent still arrives. Idempotent. The dialler may go on reading until the peer ends its
        side; a handler's iteration ends with its own close."""


class Handlers(Protocol):
    """The serving side of a daemon. Requests are checked for size before they come here, for content here.

    A handler refuses by raising MeshdError: MismatchError becomes FAILED_PRECONDITION, ResourceError
    RESOURCE_EXHAUSTED, NetworkError UNAVAILABLE, KeyError-like absence `NotHere` NOT_FOUND, any other INTERNAL; the
    text crosses. A handler of a unary call or of `fetch` is cancelled when its dialler is gone; one of a stream is told
    by the stream (LinkLost), so it must always be reading or sending.
    """

    async def hello(self, request: pb.HelloRequest) -> pb.HelloReply: ...
    async def get_run(self, request: pb.GetRunRequest) -> pb.GetRunReply: ...
    async def status(self, request: pb.StatusRequest) -> pb.StatusReply: ...
    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        """Serve one upstream neighbour until its stream ends; returning closes the stream (what was sent arrives)."""

    async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None: ...
    async def offer(self, request: pb.PriorOffer) -> pb.PriorAnswer: ...
    async def list_bundles(self, request: pb.ListRequest) -> pb.ListReply: ...
    async def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply: ...
    def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        """An async generator; it is closed when the dialler leaves early."""


class Transport(Protocol):
    """The dialling side. Every call raises LinkLost when the peer is not reached or goes away, MismatchError when it
    refuses for run or protocol, ResourceError when it is out of places, NotHere when it lacks what was asked for.
    A peer that failed otherwise is a LinkLost, with its text."""

    async def hello(self, address: str, request: pb.HelloRequest) -> pb.HelloReply: ...
    async def get_run(self, address: str, request: pb.GetRunRequest) -> pb.GetRunReply: ...
    async def status(self, address: str, request: pb.StatusRequest) -> pb.StatusReply: ...
    def link(self, address: str) -> AbstractAsyncContextManager[Duplex[pb.LinkMessage]]:
        """Open a Pipeline.Link stream to `address` ("host:port").

        Entering waits for the connection (LinkLost when there is none). Leaving closes the stream and gives the peer
        2 s to end its side; leaving with an error breaks the stream at once.
        """

    def gossip(self, address: str) -> AbstractAsyncContextManager[Duplex[pb.GossipMessage]]: ...
    async def offer(self, address: str, request: pb.PriorOffer) -> pb.PriorAnswer: ...
    async def list_bundles(self, address: str, request: pb.ListRequest) -> pb.ListReply: ...
    async def manifest(self, address: str, request: pb.ManifestRequest) -> pb.ManifestReply: ...
    def fetch(self, address: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        """An async generator. LinkLost after 30 s without a chunk (C05). Wrap it in contextlib.aclosing if it may be
        left before its end."""

    async def close(self) -> None: ...


class NotHere(NetworkError):
    """The peer answered, and does not have what was asked for."""
