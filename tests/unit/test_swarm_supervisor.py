"""The local swarm's supervisor against a fake `meshd` (fake_meshd.py): real processes, no model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest

from meshd.clock import SystemClock
from meshd.errors import MeshdError
from meshd.proto import meshd_pb2 as pb
from meshd.proto import meshd_pb2_grpc as rpc
from meshd.swarm.process import RestartPolicy
from meshd.swarm.supervisor import Supervisor, SwarmPlan
from meshd.transport.base import LinkLost

FAKE = Path(__file__).with_name("fake_meshd.py")
ROOT = FAKE.parents[2]


class StatusOnly:
    """The one call of a Transport that the supervisor makes."""

    async def status(self, address: str, request: pb.StatusRequest) -> pb.StatusReply:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                return await rpc.PeerStub(channel).Status(request)
        except grpc.aio.AioRpcError as error:
            raise LinkLost(f"{address}: {error.code().name}") from None


class Swarm:
    """A supervisor over the fake command, what it told, and every process that it started."""

    def __init__(self, folder: Path, replicas: tuple[int, ...], **plan: object) -> None:
        self.plan = SwarmPlan(
            folder / "run.toml",
            replicas,
            folder / "out",
            command=(sys.executable, str(FAKE)),
            poll_s=0.05,
            policy=RestartPolicy(limit=2, base_s=0.01),
            **plan,  # type: ignore[arg-type]
        )
        self.told: list[str] = []
        self.replies: list[pb.StatusReply] = []
        self.supervisor = Supervisor(self.plan, StatusOnly(), SystemClock(), self.told.append)  # type: ignore[arg-type]

    async def run(self):  # type: ignore[no-untyped-def]
        return await self.supervisor.run(self.replies.append)

    def starts(self, peer: str) -> list[list[str]]:
        return [json.loads(p.read_text()) for p in sorted(self.plan.state(peer).glob("start-*"))]

    def running(self) -> list[psutil.Process]:
        """Processes of this swarm that are alive now, found by the test's folder in their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.plan.directory) in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


def test_anchors_join_besides(tmp_path: Path) -> None:
    plan = SwarmPlan(tmp_path / "run.toml", (1, 2), tmp_path, command=("meshd",), anchors=2)
    assert plan.joiners() == ["stage0-0", "stage1-0", "stage1-1", "anchor-0", "anchor-1"]
    assert list(plan.peers()) == plan.joiners()[:3]
    assert plan.arguments("anchor-1", "meshd:fake")[:5] == ["meshd", "join", "meshd:fake", "--role", "anchor"]
    assert "--stage" not in plan.arguments("anchor-1", "meshd:fake")


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def play(**peers: object) -> None:
        monkeypatch.setenv(
            "FAKE_SCRIPT", json.dumps({name.replace("_", "-"): act for name, act in peers.items()})
        )

    return play


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


async def test_a_swarm_runs_to_its_end_and_leaves_nothing_running(
    tmp_path: Path, acts: Callable[..., None]
) -> None:
    """C30."""
    acts(seed={"finish_when": 3})
    swarm = Swarm(tmp_path, (1, 2))
    before = set(psutil.pids())
    outcome = await swarm.run()
    assert outcome.status.finished
    assert outcome.restarts == 0
    assert swarm.plan.checkpoint.joinpath("config.json").exists()
    assert swarm.starts("seed") == [
        ["run", str(tmp_path / "run.toml"), "--role", "seed", "--state-dir", str(swarm.plan.state("seed")),
         "--name", "seed", "--threads", "1"]
    ]  # fmt: skip
    assert swarm.starts("stage1-1")[0][:6] == ["join", "meshd:fake", "--role", "stage", "--stage", "1"]
    assert all(
        swarm.plan.state(peer).joinpath("left").exists() for peer in ("stage0-0", "stage1-0", "stage1-1")
    )
    assert swarm.running() == []
    assert not [pid for pid in set(psutil.pids()) - before if _is_child(pid)]
    assert not [line for line in swarm.told if "exit" in line]


def _is_child(pid: int) -> bool:
    try:
        return os.getpid() in [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.NoSuchProcess:
        return False


async def test_a_peer_that_dies_is_started_again(tmp_path: Path, acts: Callable[..., None]) -> None:
    """C17: nobody has to write a restart script."""
    acts(seed={"finish_when": 2}, stage1_0={"exit": [1, -9]})
    swarm = Swarm(tmp_path, (1, 1))
    outcome = await swarm.run()
    assert outcome.restarts == 2
    assert len(swarm.starts("stage1-0")) == 3
    assert len(swarm.starts("stage0-0")) == 1
    assert (
        "stage1-0: ended with exit code 1: restart 1 of 2 in 0.01 s (its last words: stage1-0 fails for the test)"
        in swarm.told
    )
    assert any(
        line.startswith("stage1-0: was killed by SIGKILL: restart 2 of 2 in 0.02 s") for line in swarm.told
    )


async def test_a_seed_that_cannot_start_ends_the_swarm_with_its_log(
    tmp_path: Path, acts: Callable[..., None]
) -> None:
    acts(seed={"exit": [2]})
    swarm = Swarm(tmp_path, (1,))
    with pytest.raises(MeshdError, match="the seed ended with exit code 2: a new start would fail") as caught:
        await swarm.run()
    assert "seed fails for the test" in str(caught.value)
    assert caught.value.exit_code == 2
    assert swarm.running() == []


async def test_a_swarm_goes_on_without_its_anchors(tmp_path: Path, acts: Callable[..., None]) -> None:
    """Whether they leave or are given up."""
    acts(seed={"finish_when": 2}, anchor_0={"exit": [2]}, anchor_1={"exit": [0]}, stage0_0={}, stage1_0={})
    swarm = Swarm(tmp_path, (1, 1), anchors=2)
    outcome = await swarm.run()
    assert outcome.status.finished
    assert len(swarm.starts("anchor-0")) == len(swarm.starts("anchor-1")) == 1


async def test_a_stage_without_replicas_ends_the_swarm_and_one_with_some_does_not(
    tmp_path: Path, acts: Callable[..., None]
) -> None:
    acts(seed={"finish_when": 2}, stage1_0={"exit": [5]})
    outcome = await Swarm(tmp_path / "a", (1, 2)).run()
    assert outcome.status.finished

    acts(stage1_0={"exit": [5]}, stage1_1={"exit": [1, 1, 1]})
    swarm = Swarm(tmp_path / "b", (1, 2))
    with pytest.raises(MeshdError, match=r"stage1-\d, the last replica of stage 1,"):
        await swarm.run()
    assert swarm.running() == []


@pytest.mark.parametrize(
    ("leaver", "problem"),
    [
        ("seed", "the seed left before the run had finished: somebody ended it"),
        ("stage1_0", "all replicas of stage 1 have left before the run had finished"),
    ],
)
async def test_who_leaves_in_good_order_before_the_end_ends_the_swarm_without_an_export(
    leaver: str, problem: str, tmp_path: Path, acts: Callable[..., None]
) -> None:
    acts(**{leaver: {"leave_when": 2}})
    swarm = Swarm(tmp_path, (1, 1), grace_s=1.0)
    with pytest.raises(MeshdError, match=problem):
        await swarm.run()
    assert not swarm.plan.checkpoint.exists()
    assert swarm.running() == []


async def test_a_failed_export_says_why(tmp_path: Path, acts: Callable[..., None]) -> None:
    acts(seed={"finish_when": 1}, export_fails=True)
    swarm = Swarm(tmp_path, (1,))
    with pytest.raises(MeshdError, match="no snapshot is complete"):
        await swarm.run()
    assert swarm.running() == []


async def test_stopping_early_stops_every_peer_in_order(tmp_path: Path, acts: Callable[..., None]) -> None:
    """C30: Ctrl-C, and what a peer left behind itself."""
    acts(stage0_0={"child": True})
    swarm = Swarm(tmp_path, (1, 1))
    task = asyncio.ensure_future(swarm.run())
    await until(lambda: bool(swarm.replies) and len(swarm.replies[-1].peers) == 2)
    pids = [process.pid for process in swarm.running()]
    families = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(pids) == 3
    assert families
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert swarm.running() == []
    left = [
        swarm.plan.state(peer).joinpath("left").stat().st_mtime_ns
        for peer in ("stage0-0", "stage1-0", "seed")
    ]
    assert left == sorted(left), "injectors leave first, the seed last"
    assert not [child for child in families if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


async def test_a_peer_that_ignores_the_signal_is_killed_when_in_a_hurry(
    tmp_path: Path, acts: Callable[..., None]
) -> None:
    acts(stage0_0={"stubborn": True})
    swarm = Swarm(tmp_path, (1,), grace_s=1000.0)
    task = asyncio.ensure_future(swarm.run())
    await until(lambda: bool(swarm.replies) and len(swarm.replies[-1].peers) == 1)
    task.cancel()
    await asyncio.sleep(0)
    assert len(swarm.running()) == 2
    swarm.supervisor.hurry.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert swarm.running() == []


def test_the_restart_policy_backs_off_and_gives_up() -> None:
    policy = RestartPolicy(limit=3, base_s=1, cap_s=3)
    assert [policy.decide(1, restarts)[0] for restarts in range(4)] == [1, 2, 3, None]
    assert policy.decide(0, 0) == (None, "left")
    assert policy.decide(2, 0)[0] is None
    assert policy.decide(-11, 0) == (1, "was killed by SIGSEGV: restart 1 of 3 in 1 s")
