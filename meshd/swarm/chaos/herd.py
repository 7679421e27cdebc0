"""The daemons of one run under chaos: started as a person would start them, hit by faults, started again, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil

from meshd.clock import Clock
from meshd.errors import MeshdError, ResourceError
from meshd.observe.daemonfile import DaemonFile
from meshd.swarm.chaos.faults import Fault
from meshd.swarm.chaos.network import Network
from meshd.swarm.chaos.traces import Traces
from meshd.swarm.orphan import PARENT_VARIABLE
from meshd.swarm.process import FINAL_CODES, Child, log_tail, signal_name
from meshd.swarm.supervisor import SEED, SwarmPlan

log = logging.getLogger(__name__)

# A daemon that was asked to leave and has not for so long is killed; that is counted as an exit of its own.
LEAVE_S = 90.0
_UP_S = 180.0
_AGAIN_S = 2.0


@dataclass
class Member:
    """One peer and its present process. hit: the fault that its next end is due to. leaving: its next end is wanted for
    good. up: set while a process runs."""

    name: str
    child: Child | None = None
    hit: Fault | None = None
    leaving: bool = False
    up: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def family(self) -> list[psutil.Process]:
        """The daemon's process and its p2pd."""
        if self.child is None:
            return []
        try:
            process = psutil.Process(self.child.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int) -> None:
        """To the daemon and its p2pd: what happens to a machine happens to both."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def ask(self) -> None:
        """SIGTERM to the daemon alone: it ends its p2pd when it has left."""
        for process in self.family()[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()


class Herd:
    """All peers of one run. `exits`: ends that no fault and no call here had asked for, in words."""

    def __init__(
        self,
        plan: SwarmPlan,
        traces: Traces,
        clock: Clock,
        tell: Callable[[str], None],
        options: list[str],
        network: Network | None = None,
    ) -> None:
        """options: of every `meshd run` and `meshd join`, besides the plan's. network: what the peers are on; None: all
        on this machine's loopback, and no link can be cut."""
        self.plan, self._traces, self._clock, self._tell, self._options = plan, traces, clock, tell, options
        self._network = network
        self.members = {name: Member(name) for name in (SEED, *plan.peers())}
        self.exits: list[str] = []
        self.ending = False
        """Set when peers may leave by themselves, for the run has ended."""
        self._link: str | None = None
        self._hurry = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within the block all peers run (from the seed's first word on), and are started again when they end. At its
        end, or its failure, whatever still runs is killed: the state has served."""
        async with asyncio.TaskGroup() as tasks:
            keepers = [tasks.create_task(self._keep(self.members[SEED]))]
            try:
                self._link = await self._seed_link()
                for name in self.plan.peers():
                    keepers.append(tasks.create_task(self._keep(self.members[name])))
                yield
            finally:
                self._hurry.set()
                for keeper in keepers:
                    keeper.cancel()

    async def strike(self, fault: Fault) -> float:
        """Carry out one fault; a freeze to its end. Returns when it began, seconds since the epoch."""
        member = self.members[fault.peer]
        async with asyncio.timeout(_UP_S):
            await member.up.wait()
        began = time.time()
        self._tell(f"{fault.peer}: {fault.words}")
        if fault.kind == "restart":
            member.hit = fault
            member.ask()
        elif fault.kind == "kill":
            member.hit = fault
            member.signal(signal.SIGKILL)
        elif fault.kind == "freeze":
            await self._freeze(member, fault)
        else:
            assert self._network is not None
            await asyncio.to_thread(self._network.cut, fault.peer)
            await self._clock.sleep(fault.cut_s)
            await asyncio.to_thread(self._network.mend, fault.peer)
        return began

    async def _freeze(self, member: Member, fault: Fault) -> None:
        member.signal(signal.SIGSTOP)
        try:
            await self._clock.sleep(fault.frozen_s)
        finally:
            if fault.fatal:
                member.hit = fault
                member.signal(signal.SIGKILL)
            else:
                member.signal(signal.SIGCONT)

    async def leave(self, *names: str) -> None:
        """Have these peers leave for good, all at once."""
        for name in names:
            member = self.members[name]
            member.leaving = True
            member.ask()
        await self.left(*names)

    async def left(self, *names: str) -> None:
        """Wait until these peers, who were asked or whose run has ended, have left; whoever does not is killed."""
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(self._left(self.members[name]))

    async def _left(self, member: Member) -> None:
        asked = self._clock.monotonic()
        try:
            async with asyncio.timeout(LEAVE_S):
                await member.gone.wait()
            self._tell(f"{member.name}: left after {self._clock.monotonic() - asked:.1f} s")
        except TimeoutError:
            self.exits.append(f"{member.name} did not leave within {LEAVE_S:.0f} s")
            member.leaving = True
            member.signal(signal.SIGKILL)
            await member.gone.wait()

    def daemon(self, name: str) -> DaemonFile | None:
        """How the peer's present process is reached; None while it is starting, or down. Blocking."""
        child = self.members[name].child
        found = DaemonFile.read(self.plan.state(name))
        return found if child is not None and found is not None and found.pid == child.pid else None

    async def _seed_link(self) -> str:
        seed = self.members[SEED]
        while not seed.gone.is_set():
            found = await asyncio.to_thread(self.daemon, SEED)
            if found is not None:
                return found.link
            await self._clock.sleep(0.25)
        raise MeshdError(f"the seed could not be started. End of its log:\n{self._last_words(SEED)}")

    async def _keep(self, member: Member) -> None:
        """Run one peer, and again after every end that is not for good."""
        try:
            while True:
                code = await self._run_once(member)
                pause_s = self._judge(member, code)
                if pause_s is None:
                    return
                await self._clock.sleep(pause_s)
        finally:
            member.gone.set()

    async def _run_once(self, member: Member) -> int:
        link = None if member.name == SEED else self._link
        command = [*self.plan.arguments(member.name, link), *self._options]
        if self._network is not None:
            listen = ["--listen", self._network.address(member.name)]
            command = [*self._network.command(member.name), *command, *listen]
        environment = {
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            "TMPDIR": str(self._traces.temporary),
            "OMP_NUM_THREADS": str(self.plan.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        try:
            child = await Child.start(command, self.plan.log(member.name), environment)
        except OSError as error:
            raise ResourceError(f"{member.name} cannot be started: {error}") from None
        try:
            # On the loop: a millisecond, before anything else can be started.
            self._traces.started(child.pid)
            member.child = child
            member.up.set()
            return await child.wait()
        finally:
            member.child = None
            member.up.clear()
            await child.stop(LEAVE_S, self._hurry)

    def _judge(self, member: Member, code: int) -> float | None:
        """Seconds until the next start, None: no more. Notes an end that nobody asked for."""
        hit, member.hit = member.hit, None
        if (member.leaving or self.ending) and code == 0:
            return None
        if hit is not None and code == (0 if hit.kind == "restart" else -signal.SIGKILL):
            return hit.away_s
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        why = f"{member.name} ended by itself: {how}" + (f", asked for a {hit.kind}" if hit else "")
        self.exits.append(why)
        self._tell(f"{why}\n{self._last_words(member.name)}")
        return None if member.leaving or code in FINAL_CODES else _AGAIN_S

    def _last_words(self, name: str) -> str:
        return log_tail(self.plan.log(name), lines=4)
