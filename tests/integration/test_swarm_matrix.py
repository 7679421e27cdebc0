"""Every phase of a microbatch under every fault: nothing is lost that is not counted, nothing is added twice, and
nothing stays in memory."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import LAST, OF_PEERS, ORIGIN, PAIRS, REPLICAS, Fault, Moment, Phase, Phases
from frozen import run_freezing
from swarm import SERVING, Account, Additions, Swarm, held_out_loss, swarm, tiny_spec
from transformers import AutoModelForCausalLM

from meshd.config.runspec import RunSpec
from meshd.peer.peer import Peer
from meshd.pipeline import downstream, onward, upstream
from meshd.pipeline.downstream import Cargo, Downstream, Passed
from meshd.pipeline.journal import Journal
from meshd.pipeline.runtime import StageRuntime, Work
from meshd.pipeline.service import Pipeline
from meshd.proto import meshd_pb2 as pb
from meshd.transport.chunks import Assembler
from meshd.wire import Draft, Frame

# One way, virtual seconds: a microbatch is away for five, so that a run of minutes is a few dozen of them.
DELAY = 0.6
NAMES = (ORIGIN, *REPLICAS, LAST)
LINKS = [(ORIGIN, "a1"), (ORIGIN, "b1"), ("a1", LAST), ("b1", LAST)]

Attempt = tuple[str, int, int, str, int, int]  # peer, incarnation, hop, origin, sequence, attempt


class Books:
    """What peers do, seen from outside, so that what they count can be held against it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, added: Additions) -> None:
        self._added = added
        self.forwards: Counter[Attempt] = Counter()
        # By (who sent, its incarnation) and (who computed, its incarnation): additions that came back, and were not
        # said to be kept.
        self.owed: dict[tuple[str, int], dict[tuple[str, int], set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        self.returns: Counter[tuple[str, str]] = Counter()
        self.unknown: set[int] = set()
        """Sequences of microbatches that were sent whole over some link and did not come back over it."""
        self.drops: dict[int, bool] = {}
        self.own: dict[int, int] = {}
        """The origin's own additions by sequence, of its present incarnation."""
        self.dead: list[Peer] = []
        self.accounts: list[Account] = []
        self.died_open = self.died_lost = 0
        self._watch(monkeypatch)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward, carry, take = StageRuntime.forward, Downstream.carry, Downstream._take
        drop, through = Journal.drop, Pipeline.through

        def forwarded(runtime: StageRuntime, hop: int, work: Any, *rest: Any) -> Any:
            self.forwards[work.key] += 1
            return forward(runtime, hop, work, *rest)

        async def carried(link: Downstream, offer: pb.Offer, cargo: Cargo) -> Any:
            result: Any = None
            try:
                result = await carry(link, offer, cargo)
            finally:
                if result is None and cargo.frame is None:
                    self.unknown.add(offer.id.sequence)
            if isinstance(result, Passed):
                opened, peer = link._open, link._address.partition(":")[0]
                self.owed[opened.peer_id, opened.incarnation][peer, result.incarnation].add(result.addition)
                self.returns[opened.peer_id, peer] += 1
            return result

        async def taken(link: Downstream, message: pb.LinkMessage) -> None:
            if message.HasField("kept"):
                opened, peer = link._open, link._address.partition(":")[0]
                numbers = self.owed[opened.peer_id, opened.incarnation][peer, message.kept.incarnation]
                numbers.difference_update({n for n in numbers if n <= message.kept.upto})
            await take(link, message)

        def dropped(journal: Journal, sequence: int, partial: bool) -> int:
            self.drops[sequence] = partial
            return drop(journal, sequence, partial)

        async def passed(pipeline: Pipeline, hop: int, id: pb.MicrobatchId, work: Work) -> Passed:
            result = await through(pipeline, hop, id, work)
            if hop == 0:
                self.own[id.sequence] = result.addition
            return result

        monkeypatch.setattr(StageRuntime, "forward", forwarded)
        monkeypatch.setattr(Downstream, "carry", carried)
        monkeypatch.setattr(Downstream, "_take", taken)
        monkeypatch.setattr(Journal, "drop", dropped)
        monkeypatch.setattr(Pipeline, "through", passed)

    def died(self, s: Swarm, name: str) -> None:
        """A peer is being killed."""
        self.dead.append(s.peers[name])
        if name == ORIGIN:
            account = s.account(name)
            self.accounts.append(account)
            self.died_open += len(account.open)
            kept = s.stage_peer(name).runtime.keeping.kept
            self.died_lost += sum(addition > kept for addition in self.own.values())
            self.own.clear()

    def check(self, s: Swarm) -> None:
        """What the peers have counted is what was seen."""
        account = s.account(ORIGIN)
        assert account.holds
        assert account.open == {}
        items = Counter[int]()
        for one in (*self.accounts, account):
            items += one.items
        assert max(items.values()) == 1, "no data is committed twice"
        assert account.dropped == len(self.drops) + self.died_open
        added = {key[4] for key in self._added.seen}
        for sequence, partial in self.drops.items():
            assert partial == (sequence in added | self.unknown), sequence
        assert account.partial == sum(self.drops.values()) + self.died_open
        ledger = s.peers[ORIGIN].metrics.value
        assert ledger("ledger_lost_after_commit") == self.died_lost
        assert ledger("ledger_in_flight") == 0
        for name in NAMES:
            me = s.peers[name].me
            again = [
                key for key, times in self.forwards.items() if key[:2] == (name, me.incarnation) and times > 1
            ]
            assert s.counted("microbatches_replayed", name) == len(again), name
            lost = sum(
                len(numbers)
                for (peer, incarnation), numbers in self.owed[name, me.incarnation].items()
                if incarnation != s.peers[peer].me.incarnation
            )
            assert s.counted("lost_after_commit", name) == lost, name


def held(s: Swarm) -> Counter[str]:
    """What peers have in memory of microbatches and exchanges, in objects; and bytes of their queues and stores."""
    gc.collect()
    kinds = (Work, Frame, Draft, Cargo, Assembler, downstream._Pending, upstream._Held, onward._Trip)
    found = Counter[str]()
    for thing in gc.get_objects():
        if type(thing) in kinds:
            found[type(thing).__name__] += 1
    for name in NAMES:
        role = s.stage_peer(name)
        assert role._intake is not None
        found[f"{name} holds"] = role._intake._held + role._intake._held_bytes
        found[f"{name} is to send"] = sum(link._sender.queued_bytes for link in role._intake._links)
    return +found


def on_the_way(s: Swarm) -> int:
    """Bytes between peers."""
    calls = s.network._calls.values()
    return sum(call.up.queue.queued_bytes + call.down.queue.queued_bytes for call in calls)


def at_work(s: Swarm) -> Counter[str]:
    """Tasks by what they do, and open streams between peers."""
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    for call in s.network._calls.values():
        tasks[f"{call.client} to {call.server}"] += 1
    return tasks


async def level(s: Swarm) -> Counter[str]:
    """Tasks and streams while no microbatch is under way, when nothing may be in memory of any. Without what comes and
    goes by the clock: of some looks, the least of each."""
    await s.until(lambda: in_flight(s) == 0, 2000.0)
    await s.clock.sleep(6.0)
    # An exchange of before may have begun late: partners that failed are left alone for a while.
    await s.until(lambda: not any(call.up._kind is pb.GossipMessage for call in s.network._calls.values()))
    assert held(s) == Counter()
    # Peers tell and ask each other small things at any time; what nobody takes would be there whenever one looks.
    await s.until(lambda: on_the_way(s) == 0, 10.0)
    least = at_work(s)
    for _ in range(8):
        await s.clock.sleep(0.7)
        least &= at_work(s)
    return least


def in_flight(s: Swarm) -> int:
    injector = s.stage_peer(ORIGIN)._injector
    return 1 if injector is None else injector.in_flight


def pause(s: Swarm) -> None:
    """The origin injects no more, until `resume`."""
    injector = s.stage_peer(ORIGIN)._injector
    assert injector is not None
    injector._limit = 0


def resume(s: Swarm) -> None:
    injector = s.stage_peer(ORIGIN)._injector
    assert injector is not None
    injector._limit = s.run.spec.pipeline.in_flight


def all_work(s: Swarm) -> bool:
    """Whether every peer works and has heard that the others do, as they are now."""

    def knows(name: str) -> bool:
        peer = s.peers[name]
        if peer.status.directory is None or peer.me.state not in SERVING:
            return False
        heard = {(r.peer_id, r.incarnation) for r in peer.status.directory.peers if r.state in SERVING}
        return heard >= {(other, s.peers[other].me.incarnation) for other in NAMES if other != name}

    return all(map(knows, NAMES))


async def used(s: Swarm, books: Books, links: Sequence[tuple[str, str]] = LINKS) -> None:
    """Wait until microbatches have come back over these links from now on."""
    before = books.returns.copy()
    await s.until(lambda: all(books.returns[link] > before[link] for link in links))


async def strike(s: Swarm, phases: Phases, books: Books, phase: Phase, fault: Fault) -> Moment:
    """One fault, and the swarm at work again as before."""
    moment = await phases.strike(phase, fault)
    await s.until(lambda: all_work(s) and in_flight_known(s))
    if fault in OF_PEERS:
        await used(s, books, [link for link in LINKS if moment.peer in link])
    else:
        # What is lost of a message is waited for long, sometimes; nothing else needs to be computed meanwhile.
        pause(s)
        await s.until(lambda: in_flight(s) == 0, 2000.0)
        resume(s)
    return moment


def in_flight_known(s: Swarm) -> bool:
    role = s.peers[ORIGIN].role
    return getattr(role, "_injector", None) is not None


def spec_for(tiny_model: Path, adapt_text: Path) -> RunSpec:
    return tiny_spec(
        tiny_model,
        adapt_text,
        data={"held_out_sequences": 32},
        optim={"inner_batch": 8},
        model={"tied": "freeze", "stages": 3, "cut": [2, 4]},
        pipeline={"in_flight": 2},
        gossip={"timeout_s": 6.0},
        snapshot={"evaluate": False, "every_tokens": 6 * 4 * 32},
        stop={"steps": 100_000},
    )


def whole_model(s: Swarm) -> Any:
    model = AutoModelForCausalLM.from_pretrained(s.run.spec.model.source, dtype=torch.float32)
    named = dict(model.named_parameters())
    for name in (ORIGIN, REPLICAS[0], LAST):
        for key, value in s.parameters(name).items():
            named[key].data.copy_(value)
    return model


# Those that a microbatch itself goes through between its origin and the last stage.
OF_MICROBATCHES = [
    phase for phase in Phase if phase not in (Phase.COMMITTED, Phase.STEP, Phase.GOSSIP, Phase.SNAPSHOT)
]


def check_phases(phases: Phases) -> None:
    """While nothing was disturbed, every microbatch went through every phase once."""
    met: dict[object, Counter[Phase]] = defaultdict(Counter)
    for (phase, of), times in phases.met.items():
        if phase in OF_MICROBATCHES:
            met[of][phase] += times
    assert met
    assert all(one == Counter(OF_MICROBATCHES) for one in met.values())


def run_pairs(pairs: Sequence[tuple[Phase, Fault]], spec: RunSpec, root: Path, monkeypatch: Any) -> None:
    """One swarm, and these faults one after the other."""
    added = Additions(monkeypatch)
    phases, books = Phases(monkeypatch), Books(monkeypatch, added)

    async def main() -> None:
        async with swarm(spec, root) as s:
            phases.on_kill = lambda name: books.died(s, name)
            phases.attach(s)
            s.delay(DELAY, *NAMES)
            await s.gathered([ORIGIN], [*REPLICAS], [LAST])
            base = held_out_loss(whole_model(s), s.data(), spec)
            await used(s, books)
            pause(s)
            before = await level(s)
            check_phases(phases)
            resume(s)
            for phase, fault in pairs:
                await strike(s, phases, books, phase, fault)
                added.check()
            await used(s, books)
            pause(s)
            after = await level(s)
            assert (after - before, before - after) == (Counter(), Counter())
            books.check(s)
            assert held_out_loss(whole_model(s), s.data(), spec) < base - 0.05

    run_freezing(main())
    added.check()


# A cross-section: each phase once and each fault at least once.
SOME = [
    (Phase.OFFERED, Fault.DROP),
    (Phase.HALF_STREAMED, Fault.REORDER),
    (Phase.ACCEPTED, Fault.CORRUPT),
    (Phase.FORWARD, Fault.KILL),
    (Phase.SENT_ON, Fault.DUPLICATE),
    (Phase.WAITING, Fault.CUT),
    (Phase.BACKWARD_HALF, Fault.CORRUPT),
    (Phase.BACKWARD, Fault.FREEZE),
    (Phase.RETURNED, Fault.DUPLICATE),
    (Phase.COMMITTED, Fault.PAUSE),
    (Phase.STEP, Fault.PAUSE),
    (Phase.GOSSIP, Fault.DROP),
    (Phase.SNAPSHOT, Fault.PAUSE),
]


def test_each_phase_and_each_fault_once(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [phase for phase, _ in SOME] == list(Phase)
    assert {fault for _, fault in SOME} == set(Fault)
    run_pairs(SOME, spec_for(tiny_model, adapt_text), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_every_phase_of_a_microbatch_under(
    fault: Fault, tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [pair for pair in PAIRS if pair[1] is fault]
    run_pairs(pairs, spec_for(tiny_model, adapt_text), tmp_path, monkeypatch)
