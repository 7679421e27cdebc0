"""An hour of a swarm whose peers come and go, with a slow link: those who stay hold no more than before (C09)."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import psutil
import pytest
from google.protobuf.message import Message
from holdings import holdings
from swarm import SERVING, Swarm, swarm, tiny_spec

from meshd.peer.peer import Peer
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery

MINUTE = 60.0
# How long a payload is on its way: so an hour is a few hundred microbatches. The slow link takes four times as long.
PAYLOAD_S, SLOW_S = 11.0, 14.0


# What grows with what the run has done, up to a bound of its own that an hour does not reach; and why.
BOUNDED = {
    "SeenAttempts._seen": 65_536,  # capacity
    "Injector.losses": 1000,  # a deque's length
    "Injector.losses bytes": 1000 * 40,
    "StatusBoard._heard bytes": 7 * 1000 * 40,  # of those that are there: as many as each keeps itself
    "StatusBoard._gone bytes": 2 * 1000 * 40,  # the newest of all that have gone
    "StatusBoard.evaluations": 100,  # one for each watermark of the run
    "StatusBoard.evaluations bytes": 100 * 40,
    "TokenCounter._tokens": 3
    * 256,  # every origin that has ever committed (MAX_ORIGINS): their sum is the run's progress
    "Onward.run:counts": 3 * 256,
    "Onward.run:counts bytes": 3 * 256 * 150,
    "Debts._debts": 2 * 256,  # peers that went, until they are counted as lost for good
    "<_Debt>": 2 * 256,
    "_Debt.unkept": 2 * 65_536,
    "Injector._unkept": 4096,  # additions since the last exchange or save
    "Roster._missing": 3 * 256,  # peers that were lost, asked again for an hour
    "<_Missing>": 3 * 256,
    "Wear._first": 3 * 8,  # deques' lengths
    "Wear._last": 3 * 8,
}


@dataclass
class Links:
    """The tap: payloads take their time, those between two peers even longer."""

    slow: frozenset[str]
    payloads: Counter[frozenset[str]] = field(default_factory=Counter)

    def __call__(self, source: str, target: str, message: Message) -> list[Delivery]:
        if not isinstance(message, pb.LinkMessage) or not message.HasField("chunk"):
            return [Delivery(message)]
        pair = frozenset((source, target))
        self.payloads[pair] += 1
        return [Delivery(message, SLOW_S if pair == self.slow else PAYLOAD_S)]


@dataclass(frozen=True)
class Held:
    """sizes: by place, of the peers that stay. process: of all together."""

    sizes: Counter[str]
    process: dict[str, int]


async def look(s: Swarm, names: list[str]) -> Held:
    peers: list[Peer] = [s.peers[name] for name in names]
    others = [peer for peer in s.peers.values() if peer not in peers]
    tasks = [s.running[name] for name in names]
    for _ in range(3):
        gc.collect()
    # As many priors as neighbours have at the moment: they are counted, not measured.
    stores = [s.stage_peer(name)._intake.pipeline.stage.around.priors for name in names if name != "seed"]  # type: ignore[union-attr]
    priors = [prior for store in stores for prior in store._priors.values()]
    assert len(priors) <= len(stores) * (3 + 2 * len(s.peers))
    sizes = holdings([*peers, *tasks], [s, s.network, s.registry, s.tasks, s.clock, *others, *priors])
    sizes.pop("PriorStore._priors", None)
    files = [path for name in names for path in s.folder(name).rglob("*") if path.is_file()]
    process = {
        "tasks": len(asyncio.all_tasks()),
        "calls": len(s.network._calls),
        "files": len(files),
        "file_bytes": sum(path.stat().st_size for path in files),
        "blocks": sys.getallocatedblocks(),
        "rss_bytes": psutil.Process().memory_info().rss,
    }
    return Held(sizes, process)


def grown(first: Held, *last: Held) -> dict[str, tuple[int, int]]:
    """What has become larger, transients left out: by what there was first and the least that there is now."""
    found = {}
    for place in sorted({place for held in last for place in held.sizes}):
        now, before = min(held.sizes[place] for held in last), first.sizes[place]
        slack = 64 << 10 if place.endswith(" bytes") else 3
        if now > BOUNDED.get(place, 1.25 * before + slack):
            found[place] = (before, now)
    return found


def working(s: Swarm, name: str) -> bool:
    return s.peers[name].me.state in SERVING


async def churn(s: Swarm, numbers: count[int], kills: cycle[bool], staying: list[str]) -> None:
    """Replace a third of the peers by new identities, those longest there first: some killed, some leave."""
    stages = [name for name in s.peers if name != "seed"]
    for name in [name for name in stages if name not in staying][: len(stages) // 3]:
        stage = int(name[0] == "b")
        if next(kills):
            await s.kill(name)
        else:
            s.peers[name].leave()
            await s.finished(name)
        s.network.kill(f"{name}:1")
        del s.peers[name], s.running[name]
        s.start(f"{name[0]}{next(numbers)}", stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_hour_of_churn_leaves_memory_as_it_was(tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        stop={"steps": 100_000},
        pipeline={"in_flight": 1},
        wire={"forward": "spectral:bits=2", "backward": "spectral:bits=1", "prior_tokens": 256},
        gossip={"every": 3},
        snapshot={"every_tokens": 25 * 32, "keep": 2},
        data={"microbatch": 1, "held_out_sequences": 2},
    )
    staying = ["seed", "a0", "b0"]
    looks: list[Held] = []
    links = Links(frozenset(("a0:1", "b0:1")))

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = links
            numbers, kills = count(10), cycle([True, False, True])
            await s.gathered(["a0", "a1", "a2"], ["b0", "b1", "b2", "b3"])
            start = s.clock.monotonic()
            for ten in range(6):
                await s.clock.sleep(max(0.0, start + ten * 10 * MINUTE + 2 * MINUTE - s.clock.monotonic()))
                await churn(s, numbers, kills, staying)
                await s.until(lambda: all(working(s, name) for name in s.peers))
                await s.peers["seed"].status.answer(pb.StatusRequest(swarm=True))
                await s.clock.sleep(max(0.0, start + (ten + 1) * 10 * MINUTE - s.clock.monotonic()))
                await s.peers["seed"].status.answer(pb.StatusRequest(swarm=True))
                looks.append(await look(s, staying))
                print(f"{10 * (ten + 1)} min: {s.tokens('a0')} tokens, {looks[-1].process}")
            # There was something to hold on to, and over the slow link, too.
            assert all(s.version(name) > 5 for name in s.peers if name != "seed")
            assert links.payloads[links.slow] > 20
            assert s.account("a0").holds

    run_virtual(scenario())
    first, last = looks[0], looks[-1]
    assert grown(first, looks[-2], last) == {}
    process, before = last.process, first.process
    for count_of in ("tasks", "calls", "files", "file_bytes"):
        assert process[count_of] <= 1.25 * before[count_of] + 3, f"{count_of}: {before} became {process}"
    assert process["blocks"] <= 1.05 * before["blocks"]
    assert process["rss_bytes"] <= 1.25 * before["rss_bytes"]
