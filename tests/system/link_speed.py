"""One end of a measured link, as a process of its own.

link_speed.py serve HOST                       # prints its address, then a line of JSON per stream that ended
link_speed.py send ADDRESS CHUNKS RATE_BPS     # chunks of 64 KiB; RATE_BPS: of its shaper, 0 for none
"""

import asyncio
import json
import random
import sys
import time

from meshd.clock import SystemClock
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex
from meshd.transport.grpc_client import GrpcTransport
from meshd.transport.grpc_server import serve
from meshd.transport.shaper import LinkShape, wire_bytes
from meshd.transport.uplink import Uplink

CHUNK_BYTES = 1 << 16
# Of the chunks, so many are not timed: buckets are full at the start, and TCP is slow.
UNTIMED = 16


class Sink:
    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        """Reports what came, and how fast from chunk UNTIMED on, bytes with headers."""
        count, weight, before, began, ended = 0, 0, 0, 0.0, 0.0
        async for message in duplex:
            count += 1
            weight += wire_bytes(message.ByteSize())
            ended = time.monotonic()
            if count == UNTIMED:
                began, before = ended, weight
        rate_bps = (weight - before) * 8 / (ended - began)
        print(json.dumps({"bytes": weight, "rate_bps": rate_bps}), flush=True)


async def listen(host: str) -> None:
    async with serve(Sink(), host) as server:  # type: ignore[arg-type]  # nothing else is called
        print(server.address, flush=True)
        await asyncio.Event().wait()


async def send(address: str, chunks: int, rate_bps: int) -> None:
    transport = GrpcTransport(uplink=Uplink.of(LinkShape(rate_bps=rate_bps), SystemClock(), random.Random(1)))
    async with transport.link(address) as link:
        for number in range(chunks):
            await link.send(pb.LinkMessage(chunk=pb.Chunk(offset=number, data=random.randbytes(CHUNK_BYTES))))
        await link.close()
        async for _ in link:
            pass
    await transport.close()


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    asyncio.run(listen(where) if what == "serve" else send(where, *map(int, rest)))
