"""The parts of the WAN lab that are pure: names and whose they are, rates, the window that is measured, the plan."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from meshd.config.runspec import DataSpec, ModelSpec, RunSpec, StopSpec
from meshd.errors import ConfigError, ResourceError
from meshd.swarm.wan import network
from meshd.swarm.wan.__main__ import parser
from meshd.swarm.wan.lab import LabOptions, WanPlan
from meshd.swarm.wan.names import Owner, leftovers, owner_of
from meshd.swarm.wan.network import Counts, Network, check_ground
from meshd.swarm.wan.rates import Link, parse_rate, queue_arguments, show_rate
from meshd.swarm.wan.window import Look, Result, Step, Window


def test_leftovers_are_those_of_labs_that_are_no_more() -> None:
    gone, alive = Owner(10, 500), Owner(11, 600)
    foreign = [
        "mwan-10",
        "mwan-10-500-",
        "mwan-x-500-seed",
        "xmwan-10-500-seed",
        "mwan-10-500-Seed",
        "mc12-seed",
    ]
    names = [gone.name("hub"), gone.name("stage0-0"), gone.name(), alive.name("hub"), *foreign]
    assert leftovers(names, lambda owner: owner == alive) == names[:3]
    # The same pid, another process.
    assert leftovers(names, lambda owner: owner == Owner(10, 501)) == names[:4]
    assert owner_of(alive.name("stage1-0")) == alive


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_owner_is_alive_until_its_process_has_ended() -> None:
    assert Owner.this().alive
    assert not Owner(os.getpid(), Owner.this().started + 1).alive
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    assert owner is not None
    assert owner.alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.alive, "a zombie holds nothing"
    child.communicate()
    assert not owner.alive


def test_rates_are_read_as_tc_writes_them() -> None:
    for text, rate in {"20mbit": 20_000_000, "1.5Gbit": 1_500_000_000, "64kbit": 64_000, "none": 0}.items():
        assert parse_rate(text) == rate
        assert parse_rate(show_rate(rate)) == rate


@pytest.mark.parametrize(
    "text", ["", "20", "20mb", "-1mbit", "mbit", "1e9bit", "2 mbit", "infbit", "9kbit", "101gbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rate: write 500kbit|out of range: 10kbit to 100gbit"):
        parse_rate(text)


@pytest.mark.parametrize("rate", [10_000, 1_000_000, 200_000_000, 10_000_000_000])
def test_the_kernel_is_given_room_for_packets_on_any_link(rate: int) -> None:
    kind, *pairs = queue_arguments(rate)
    told = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert (kind, told["rate"]) == ("tbf", f"{rate}bit")
    assert int(told["burst"]) >= 2 * 1514
    assert int(told["limit"]) >= int(told["burst"]) + 16 * 1514
    assert int(told["limit"]) <= max(30_000, rate / 8 * 0.121)
    assert queue_arguments(0) == ["pfifo"]


def steps(window: Window, looks: list[tuple[float, int]]) -> list[tuple[float, Step]]:
    return [(at, step) for at, tokens in looks if (step := window.look(at, tokens)) is not Step.WAIT]


def test_the_window_reaches_from_commit_to_commit() -> None:
    looks = [(float(at), at // 4 * 100) for at in range(40)]
    # The first commit is seen at 4; the next after the warm-up of 5 is at 12; 10 s later it is 22, the next at 24.
    assert steps(Window(5.0, 10.0, None), looks)[:2] == [(12.0, Step.START), (24.0, Step.STOP)]
    assert steps(Window(0.0, None, 250), looks)[:2] == [(4.0, Step.START), (16.0, Step.STOP)]


def test_a_swarm_that_stands_still_is_not_waited_for_for_ever() -> None:
    looks = [(0.0, 0), (1.0, 100), *((float(at), 100) for at in range(2, 40))]
    assert steps(Window(0.0, 10.0, None), looks)[:2] == [(1.0, Step.START), (21.0, Step.STOP)]
    assert steps(Window(0.0, 10.0, None), [(float(at), 700) for at in range(40)]) == [], (
        "nothing committed yet"
    )


RESULT = Result(
    {"seed": Link(), "stage0-0": Link(8_000_000, 16_000_000)},
    Look(100.0, 1000, {"seed": Counts(), "stage0-0": Counts(50, 60, 1)}),
    Look(110.0, 2000, {"seed": Counts(2_000_000), "stage0-0": Counts(5_000_050, 10_000_060, 8)}),
)


def test_what_passed_is_what_came_between_the_looks() -> None:
    assert RESULT.tokens_per_s == 100.0
    assert RESULT.bytes_per_token == 7000.0
    assert RESULT.passed("stage0-0") == Counts(5_000_000, 10_000_000, 7)
    assert RESULT.busy("stage0-0") == (0.5, 0.5)
    assert RESULT.busy("seed") == (None, None)
    assert RESULT.summary() == (
        "1,000 tokens in 10.0 s: 100.0 tokens/s, 7,000 bytes per token over all uplinks"
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(RESULT.table())
    rows = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert rows[-1] == ["stage0-0", "5.000", "MB", "8mbit", "50.0%", "10.000", "MB", "16mbit", "50.0%", "7"]


def test_every_peer_starts_in_its_namespace_and_listens_on_its_address(tmp_path: Path) -> None:
    made = Network(Owner(7, 8), dict.fromkeys(["seed", "stage0-0", "stage1-0"], Link()))
    plan = WanPlan(
        tmp_path / "run.toml", (1, 1), tmp_path, command=("meshd",), network=made, options=("--config", "p")
    )
    command = plan.arguments("stage1-0", "meshd:link")
    assert command[:7] == ["ip", "netns", "exec", "mwan-7-8-stage1-0", "meshd", "join", "meshd:link"]
    assert command[-4:] == ["--listen", "10.77.0.3", "--config", "p"]
    assert plan.arguments("seed", None)[:6] == ["ip", "netns", "exec", "mwan-7-8-seed", "meshd", "run"]


def lab(replicas: tuple[int, ...]) -> LabOptions:
    spec = RunSpec(
        model=ModelSpec(source="/m", stages=2), data=DataSpec(sources=["/d"]), stop=StopSpec(steps=1)
    )
    return LabOptions(Path("/r"), spec, Path("/d"), replicas, Link(), {}, 1.0, 1.0, None)


def test_peers_that_do_not_fit_the_run_are_refused() -> None:
    assert lab((2, 3)).replicas == (2, 3)
    with pytest.raises(ConfigError, match="200 at most"):
        lab((100, 100))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "20mb"], "is not a rate: write 500kbit"),
        (["--up", "1bit"], "out of range: 10kbit"),
        (["--seconds", "-1"], "not a number of seconds"),
        (["--seconds", "nan"], "not a number of seconds"),
        (["--seconds", "1", "--tokens", "1"], "not allowed with"),
    ],
)
def test_wrong_options_are_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["run.toml", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_help_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["--help"])
    assert caught.value.code == 0
    assert "send at 95% of it" in " ".join(capsys.readouterr().out.split())


def test_a_machine_that_will_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_ground()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ResourceError, match="run it as root"):
        check_ground()
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(ResourceError, match="no `tc` command here"):
        check_ground()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ResourceError, match="needs Linux"):
        check_ground()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_not_there_is_no_trouble_to_remove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "_SPACES", tmp_path / "netns")
    monkeypatch.setattr(network, "_FOLDERS", tmp_path)
    (tmp_path / Owner(os.getpid(), Owner.this().started + 1).name()).mkdir()
    (tmp_path / Owner.this().name()).mkdir()
    assert network.clear_leftovers() == []
    assert [path.name for path in tmp_path.iterdir()] == [Owner.this().name()]
    Network(Owner.this(), {"seed": Link()}).remove()
    assert list(tmp_path.iterdir()) == []
