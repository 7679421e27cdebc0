"""A swarm of real daemons on this machine: one seed and the replicas of each stage, each its own process.

The supervisor is no part of the swarm: it starts `meshd` commands as a person would, follows the seed's status over
gRPC, restarts what dies (C17), and leaves nothing running (C30).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshd.clock import Clock
from meshd.errors import MeshdError, NetworkError, ResourceError, ungrouped
from meshd.observe.daemonfile import DaemonFile
from meshd.observe.status import fetch_status
from meshd.proto import meshd_pb2 as pb
from meshd.swarm.orphan import PARENT_VARIABLE
from meshd.swarm.process import Child, RestartPolicy, log_tail
from meshd.transport.base import Transport

SEED = "seed"


@dataclass(frozen=True)
class SwarmPlan:
    """What to start.

    run_file: the run spec. replicas: peers of each stage. directory: holds `peers/NAME` (state directories),
    `logs/NAME.log` and `checkpoint`. threads: of each process. command: how `meshd` is called. grace_s: how long a
    peer may take to save and leave before it is killed. poll_s: seconds between looks at the seed. anchors: how many
    there are besides.
    """

    run_file: Path
    replicas: tuple[int, ...]
    directory: Path
    threads: int = 1
    command: tuple[str, ...] = (sys.executable, "-m", "meshd")
    grace_s: float = 30.0
    poll_s: float = 1.0
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    anchors: int = 0

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    def state(self, peer: str) -> Path:
        return self.directory / "peers" / peer

    def log(self, peer: str) -> Path:
        return self.directory / "logs" / f"{peer}.log"

    def peers(self) -> dict[str, int]:
        """Stage by peer name, of all that hold one."""
        return {
            f"stage{stage}-{number}": stage
            for stage, count in enumerate(self.replicas)
            for number in range(count)
        }

    def joiners(self) -> list[str]:
        """Names of all but the seed."""
        return [*self.peers(), *(f"anchor-{number}" for number in range(self.anchors))]

    def arguments(self, peer: str, link: str | None) -> list[str]:
        """The command line of `peer`; link: where it joins, None for the seed."""
        options = ["--state-dir", str(self.state(peer)), "--name", peer, "--threads", str(self.threads)]
        if link is None:
            return [*self.command, "run", str(self.run_file), "--role", "seed", *options]
        stage = self.peers().get(peer)
        role = ["anchor"] if stage is None else ["stage", "--stage", str(stage)]
        return [*self.command, "join", link, "--role", *role, *options]


@dataclass(frozen=True)
class Outcome:
    """How the swarm ended. status: the seed's last word. restarts: of all peers together. elapsed_s: from the first
    start to the end of training."""

    status: pb.StatusReply
    restarts: int
    elapsed_s: float


class Supervisor:
    """Runs one plan, once.

    tell: called with one line for people at every event. hurry: set it to have what stops killed at once.
    """

    def __init__(
        self, plan: SwarmPlan, transport: Transport, clock: Clock, tell: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.hurry = asyncio.Event()
        self._transport = transport
        self._clock = clock
        self._tell = tell
        self._restarts = 0
        self._gone: set[str] = set()
        self._seed_left = asyncio.Event()
        self._stage_left_at: float | None = None
        # Set while the peer does not run.
        self._ended = {peer: asyncio.Event() for peer in (SEED, *plan.joiners())}
        for event in self._ended.values():
            event.set()

    async def run(self, on_status: Callable[[pb.StatusReply], None]) -> Outcome:
        """Start the swarm, follow it to its end, export, stop all. Cancel it to stop early.

        on_status: called with every reply of the seed. Raises MeshdError when the seed cannot be started, when the
        last replica of a stage is given up, or when the export fails.
        """
        # The first cause speaks; the rest are its consequences, or have been told.
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                kept = [group.create_task(self._keep(SEED))]
                outcome = await self._lead(group, kept, on_status)
                # On an exception the group cancels them itself.
                for task in kept:
                    task.cancel()
        return outcome

    async def _lead(
        self,
        group: asyncio.TaskGroup,
        kept: list[asyncio.Task[None]],
        on_status: Callable[[pb.StatusReply], None],
    ) -> Outcome:
        started = self._clock.monotonic()
        self._tell("seed: preparing model and data")
        daemon = await self._seed_daemon()
        self._tell(
            f"seed: up after {self._clock.monotonic() - started:.0f} s; join with: meshd join {daemon.link}"
        )
        kept += [group.create_task(self._keep(peer)) for peer in self.plan.joiners()]
        status = await self._follow(on_status)
        elapsed = self._clock.monotonic() - started
        await self._export()
        return Outcome(status, self._restarts, elapsed)

    async def _seed_daemon(self) -> DaemonFile:
        """Wait until the seed has written how to reach it. A seed that fails for good ends the group, and with it
        this wait."""
        while True:
            found = await asyncio.to_thread(DaemonFile.read, self.plan.state(SEED))
            if found is not None and found.alive():
                return found
            self._check_seed()
            await self._clock.sleep(self.plan.poll_s / 4)

    async def _follow(self, on_status: Callable[[pb.StatusReply], None]) -> pb.StatusReply:
        """Ask the seed every second until the run has finished; the last reply. Raises MeshdError when it cannot finish
        any more: the seed, or all replicas of a stage, have left before."""
        silent = False
        while True:
            found = await asyncio.to_thread(DaemonFile.read, self.plan.state(SEED))
            try:
                if found is None:
                    raise NetworkError("the seed is starting")
                reply = await fetch_status(self._transport, found.address)
                silent = False
                on_status(reply)
                if reply.finished:
                    return reply
            except NetworkError as error:
                self._check_seed()
                if not silent:
                    self._tell(f"seed: no status ({error}); the run goes on, asking again")
                silent = True
            self._check_stages()
            await self._clock.sleep(self.plan.poll_s)

    def _check_seed(self) -> None:
        if self._seed_left.is_set():
            log = self.plan.log(SEED)
            raise MeshdError(
                "the seed left before the run had finished: somebody ended it. What was trained is in "
                f"{self.plan.directory}; starting the swarm again goes on from there. End of {log}:\n{log_tail(log)}"
            )

    def _check_stages(self) -> None:
        """At the end of a run its peers leave, some seconds before the seed says that it is over."""
        if self._stage_left_at is None or self._clock.monotonic() - self._stage_left_at < self.plan.grace_s:
            return
        peers = self.plan.peers()
        left = sorted(
            set(peers.values()) - {stage for peer, stage in peers.items() if peer not in self._gone}
        )
        raise MeshdError(
            f"all replicas of stage {left[0]} have left before the run had finished: somebody ended them. What was "
            f"trained is in {self.plan.directory}; starting the swarm again goes on from there"
        )

    async def _keep(self, peer: str) -> None:
        """Run one peer, and start it again as the policy says, until it is cancelled or given up."""
        restarts = 0
        while True:
            link = None if peer == SEED else (await self._seed_daemon()).link
            code = await self._run_once(peer, link)
            delay, why = self.plan.policy.decide(code, restarts)
            said = f" (its last words: {log_tail(self.plan.log(peer), lines=1).strip()})" if code != 0 else ""
            self._tell(f"{peer}: {why}{said}")
            if delay is None:
                self._give_up(peer, code, why)
                return
            restarts += 1
            self._restarts += 1
            await self._clock.sleep(delay)

    async def _run_once(self, peer: str, link: str | None) -> int:
        child = await self._start(peer, self.plan.arguments(peer, link))
        ended = self._ended[peer]
        ended.clear()
        try:
            return await child.wait()
        except asyncio.CancelledError:
            # Injectors leave first, while those who finish their microbatches are there; the seed leaves last.
            for other, event in self._ended.items():
                if self._turn(other) < self._turn(peer):
                    await event.wait()
            raise
        finally:
            try:
                await child.stop(self.plan.grace_s, self.hurry)
            finally:
                ended.set()

    def _turn(self, peer: str) -> int:
        return 2 if peer == SEED else min(self.plan.peers().get(peer, 0), 1)

    async def _start(self, peer: str, command: Sequence[str]) -> Child:
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        try:
            if peer == SEED:
                # Or the file of an earlier daemon would be taken for this one's.
                await asyncio.to_thread(DaemonFile.remove, self.plan.state(peer))
            return await Child.start(command, self.plan.log(peer), environment)
        except OSError as error:
            raise ResourceError(f"{peer} cannot be started: {error}") from None

    def _give_up(self, peer: str, code: int, why: str) -> None:
        """A peer will not come back. Raises MeshdError when the run cannot go on without it."""
        self._gone.add(peer)
        if peer == SEED:
            self._seed_left.set()
        elif peer not in self.plan.peers():
            return  # an anchor: the swarm trains on without
        elif any(
            other not in self._gone
            for other, stage in self.plan.peers().items()
            if stage == self._stage(peer)
        ):
            return
        if code != 0:
            log = self.plan.log(peer)
            what = "the seed" if peer == SEED else f"{peer}, the last replica of stage {self._stage(peer)},"
            failure = MeshdError(f"{what} {why}. End of {log}:\n{log_tail(log)}")
            failure.exit_code = code if code > 0 else 1
            raise failure
        if peer != SEED and self._stage_left_at is None:
            self._stage_left_at = self._clock.monotonic()

    def _stage(self, peer: str) -> int:
        return self.plan.peers()[peer]

    async def _export(self) -> None:
        """Write the checkpoint with `meshd export`. Raises MeshdError with the end of its log."""
        self._tell(f"exporting to {self.plan.checkpoint}")
        command = [
            *self.plan.command,
            "export",
            str(self.plan.checkpoint),
            "--state-dir",
            str(self.plan.state(SEED)),
        ]
        child = await self._start("export", command)
        try:
            code = await child.wait()
        finally:
            await child.stop(self.plan.grace_s, self.hurry)
        if code != 0:
            log = self.plan.log("export")
            raise MeshdError(f"the export ended with exit code {code}. End of {log}:\n{log_tail(log)}")
