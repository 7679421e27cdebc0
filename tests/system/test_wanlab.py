"""The WAN lab on real namespaces, links and daemons; what a killed one leaves; the kernel's bucket beside ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, launcher, nothing_left, until, write_spec

from meshd.swarm.wan.names import PREFIX, Owner, owner_of
from meshd.swarm.wan.network import Network, clear_leftovers
from meshd.swarm.wan.rates import Link

SPEED = Path(__file__).with_name("link_speed.py")
LAB = (sys.executable, "-m", "meshd.swarm.wan")
FOREIGN = f"{PREFIX}not-a-lab"


def _lacking() -> str:
    """Why there can be no lab here; empty where there can."""
    if sys.platform != "linux":
        return "not Linux"
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no `ip` and `tc` commands (iproute2)"
    probe = f"{PREFIX}probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode != 0:
        return "network namespaces are not allowed here"
    tbf = [
        "tc",
        "-n",
        probe,
        "qdisc",
        "add",
        "dev",
        "lo",
        "root",
        "tbf",
        "rate",
        "1mbit",
        "burst",
        "9k",
        "limit",
        "9k",
    ]
    limited = subprocess.run(tbf, capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return "" if limited else "the kernel has no token bucket (tbf)"


LACKING = _lacking()

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(LACKING), reason=LACKING),
]


def spaces() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def of(pid: int) -> set[str]:
    """Namespaces of the lab that runs, or ran, under this pid."""
    return {name for name in spaces() if (owner := owner_of(name)) is not None and owner.pid == pid}


def inside(name: str) -> list[psutil.Process]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    return [psutil.Process(int(pid)) for pid in done.stdout.split()]


@contextmanager
def space(name: str) -> Iterator[None]:
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def spec(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> Path:
    """A run that does not end by itself."""
    return write_spec(tmp_path / "run.toml", tiny_model, adapt_text, stop={"steps": 100_000})


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    clear_leftovers()


def started(lab: Daemon) -> list[psutil.Process]:
    """The lab's seed, once it runs in its namespace."""
    hub = until(
        lambda: next((n for n in of(lab.pid) if n.endswith("-seed")), None), "a namespace", more=lab.text
    )
    return until(lambda: inside(hub), "the seed is in its namespace", more=lab.text)  # type: ignore[no-any-return]


def test_a_lab_measures_a_swarm_of_real_daemons_and_leaves_nothing(tmp_path: Path, spec: Path) -> None:
    options = ["--rate", "4mbit", "--delay-ms", "5", "--pace", "--warmup", "1", "--seconds", "3"]
    with launcher(tmp_path) as launch:
        command = [*LAB, str(spec), *options, "--directory", str(tmp_path / "lab")]
        lab = launch.spawn("lab", command, tmp_path / "lab")
        started(lab)
        assert lab.ended(400) == 0, lab.text()
        assert of(lab.pid) == set()
        assert not (Path("/run") / f"{PREFIX}-{lab.pid}").exists()
        assert launch.sessions() == []
    text = lab.text()
    rows = {
        row[0]: row
        for line in text.splitlines()
        if (row := line.split()) and row[-1].isdecimal() and "%" in line
    }
    assert set(rows) == {"seed", "stage0-0", "stage1-0"}
    for row in rows.values():
        sent, busy = float(row[1]), float(row[4].rstrip("%"))
        assert sent > 0
        assert 0 < busy <= 103, "no link carries more than it can; a full bucket may pass at the start"
    assert re.search(r"[\d,]+ tokens in [\d.]+ s: [\d,.]+ tokens/s, [\d,]+ bytes per token", text)
    shown = (tmp_path / "lab" / "peer.toml").read_text()
    assert shown == "[link]\ndelay_ms = 5.0\njitter_ms = 0.0\nrate_bps = 3800000\n"
    for log in (tmp_path / "lab" / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_lab_that_is_stopped_leaves_nothing(tmp_path: Path, spec: Path, number: int) -> None:
    with launcher(tmp_path) as launch:
        command = [*LAB, str(spec), "--rate", "4mbit", "--directory", str(tmp_path / "lab")]
        lab = launch.spawn("lab", command, tmp_path / "lab")
        seed = started(lab)
        lab.signal(number)
        assert lab.ended() == 130, lab.text()
        assert nothing_left(seed)
        assert of(lab.pid) == set()


def test_after_a_lab_was_killed_the_next_clears_what_it_left_and_nothing_else(
    tmp_path: Path, spec: Path
) -> None:
    alive = Network(Owner.this(), {"seed": Link(), "stage0-0": Link()})
    with launcher(tmp_path) as launch, space(FOREIGN):
        try:
            alive.make()
            mine = launch.spawn("sleep", [*alive.command("seed"), "sleep", "600"], tmp_path)
            until(lambda: inside(Owner.this().name("seed")), "a process of a lab that is alive")
            command = [*LAB, str(spec), "--directory", str(tmp_path / "lab")]
            killed = launch.spawn("killed", command, tmp_path / "lab")
            left = started(killed)
            killed.signal(signal.SIGKILL)
            killed.ended()
            names, before = of(killed.pid), of(os.getpid())
            assert len(names) == 4  # a bridge, a seed, two stages
            following = launch.spawn(
                "next", [*LAB, str(spec), "--directory", str(tmp_path / "next")], tmp_path
            )
            started(following)
            following.signal(signal.SIGTERM)
            assert following.ended() == 130, following.text()
            assert f"cleared what a killed lab had left: {', '.join(sorted(names))}" in following.text()
            assert "Traceback" not in following.text()
            assert nothing_left(left)
            assert not [n for n in Path("/run").iterdir() if n.name.startswith(f"{PREFIX}-{killed.pid}-")]
            assert of(killed.pid) == of(following.pid) == set()
            assert of(os.getpid()) == before
            assert len(before) == 3
            assert mine.process.poll() is None
            assert FOREIGN in spaces()
        finally:
            alive.remove()
        mine.ended()


def test_the_shaper_and_the_kernels_bucket_make_the_same_link(tmp_path: Path) -> None:
    """One after the other in one run, the same bytes over the same kind of link."""
    rate, chunks = 16_000_000, 112
    links = {"sink": Link(), "kernel": Link(up_bps=rate), "shaper": Link()}
    network = Network(Owner.this(), links)
    with launcher(tmp_path) as launch:
        try:
            network.make()
            command = [sys.executable, str(SPEED)]
            serve = [*network.command("sink"), *command, "serve", network.address("sink")]
            sink = launch.spawn("sink", serve, tmp_path)
            address = sink.wait_log(r"10\S+:\d+")[0]
            measured, passed = {}, {}
            for peer, own in (("kernel", 0), ("shaper", rate)):
                before = network.counts()[peer]
                arguments = ["send", address, str(chunks), str(own)]
                sender = launch.spawn(peer, [*network.command(peer), *command, *arguments], tmp_path)
                assert sender.ended() == 0, sender.text()
                measured[peer] = json.loads(sink.wait_log(r"\{.*\}")[0])
                passed[peer] = network.counts()[peer] - before
        finally:
            network.remove()
    assert measured["shaper"]["rate_bps"] == pytest.approx(measured["kernel"]["rate_bps"], rel=0.15)
    assert measured["shaper"]["rate_bps"] <= rate * 1.03
    # What a message is said to weigh is what the kernel counted, with acknowledgements and pings.
    for peer in measured:
        assert passed[peer].up == pytest.approx(measured[peer]["bytes"], rel=0.03)
