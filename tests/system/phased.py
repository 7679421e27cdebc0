"""`meshd`, in a process that ends or stops itself where it is told to: `phased.py ORDERS ARGUMENTS...`.

ORDERS is a directory. A file PEER in it (PEER: the value of --name) holds the name of a phase and of a signal: at the
next moment of that phase the process takes the file away, and sends itself the signal, in the thread that does it.
While there is a file `slow`, the last stage takes its time, so that a run lasts as long as a test needs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshd.gossip.exchange
import meshd.gossip.service
import meshd.transport.chunks
from meshd.cli import main
from meshd.gossip.exchange import Exchange
from meshd.optim.inner import InnerOptimizer
from meshd.pipeline import upstream
from meshd.pipeline.downstream import Downstream
from meshd.pipeline.journal import Journal
from meshd.pipeline.runtime import StageRuntime
from meshd.pipeline.upstream import Intake
from meshd.proto import meshd_pb2 as pb
from meshd.state import stage_state
from meshd.transport.chunks import Assembler

SLOW_S = 0.8
# So that payloads (16 KiB) and exchanges have a middle.
CHUNK, SEGMENT = 4096, 1 << 17

ORDERS = Path(sys.argv.pop(1))
NAME = sys.argv[sys.argv.index("--name") + 1]


def at(phase: str) -> None:
    """A moment of a phase."""
    order = ORDERS / NAME
    try:
        wanted, name = order.read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if wanted == phase.replace(" ", "-"):
        order.unlink()
        os.kill(os.getpid(), getattr(signal, name))


def watch_messages() -> None:
    verdict, add, split = Intake.verdict, Assembler.add, upstream.split
    within, give_back = Downstream._within, upstream._Link._give_back

    def offered(intake: Intake, offer: pb.Offer) -> Any:
        if not offer.evaluate:
            at("offered")
        answer = verdict(intake, offer)
        if not offer.evaluate and answer[0] == pb.Answer.VERDICT_ACCEPTED:
            at("accepted")
        return answer

    def added(assembler: Assembler, chunk: Any) -> None:
        add(assembler, chunk)
        if not assembler.complete and 2 * len(assembler._data) >= assembler._size:
            at("half streamed")

    def halved(id: pb.MicrobatchId, hop: int, payload: bytes) -> Iterator[pb.Chunk]:
        for chunk in split(id, hop, payload):
            if chunk.offset >= len(payload) // 2:
                at("backward half streamed")
            yield chunk

    async def waiting(link: Downstream, seconds: float, future: Any, what: str) -> Any:
        if what == "return a microbatch":
            at("sent on")
            future.get_loop().call_later(0.1, lambda: future.done() or at("waiting"))
        return await within(link, seconds, future, what)

    async def given_back(link: Any, *rest: Any) -> None:
        await give_back(link, *rest)
        at("returned")

    Intake.verdict = offered  # type: ignore[method-assign]
    Assembler.add = added  # type: ignore[method-assign]
    upstream.split = halved  # type: ignore[attr-defined]
    Downstream._within = waiting  # type: ignore[method-assign]
    upstream._Link._give_back = given_back  # type: ignore[method-assign]


def watch_computing() -> None:
    forward, head, backward = StageRuntime.forward, StageRuntime.head, StageRuntime.backward
    step, commit, segment = InnerOptimizer.step, Journal.commit, Exchange._segment
    write = stage_state.write_tensors

    def forwarding(runtime: StageRuntime, *rest: Any) -> Any:
        at("computing forward")
        return forward(runtime, *rest)

    def heading(runtime: StageRuntime, *rest: Any) -> Any:
        at("computing forward")
        if (ORDERS / "slow").exists():
            time.sleep(SLOW_S)
        result = head(runtime, *rest)
        at("computing backward")
        return result

    def returning(runtime: StageRuntime, *rest: Any) -> Any:
        at("computing backward")
        return backward(runtime, *rest)

    def stepping(optimizer: InnerOptimizer, *rest: Any) -> Any:
        report = step(optimizer, *rest)
        at("inner step")
        return report

    def committing(journal: Journal, *rest: Any) -> None:
        commit(journal, *rest)
        at("committed")

    async def exchanging(exchange: Exchange, number: int, *rest: Any) -> Any:
        squares = await segment(exchange, number, *rest)
        at("gossip half done")
        return squares

    def writing(path: Path, *rest: Any) -> None:
        write(path, *rest)
        at("snapshot half written")

    StageRuntime.forward = forwarding  # type: ignore[method-assign]
    StageRuntime.head = heading  # type: ignore[method-assign]
    StageRuntime.backward = returning  # type: ignore[method-assign]
    InnerOptimizer.step = stepping  # type: ignore[method-assign]
    Journal.commit = committing  # type: ignore[method-assign]
    Exchange._segment = exchanging  # type: ignore[method-assign]
    stage_state.write_tensors = writing  # type: ignore[assignment]


if __name__ == "__main__":
    for module in (meshd.transport.chunks, meshd.gossip.exchange):
        module.CHUNK_BYTES = CHUNK  # type: ignore[attr-defined]
    for other in (meshd.gossip.exchange, meshd.gossip.service):
        other.SEGMENT_BLOCKS = SEGMENT
    watch_messages()
    watch_computing()
    main()
