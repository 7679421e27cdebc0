"""The parts of chaos that are pure: the schedule of faults, the reading of what a run leaves, the bars."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from meshd.config.load import load_run_spec
from meshd.config.runspec import DataSpec, ModelSpec, RunSpec, StopSpec
from meshd.errors import DataError
from meshd.pipeline.journal import Journal
from meshd.swarm.chaos.evidence import Account, Event, detected, read_journal, read_log, summed, tracebacks
from meshd.swarm.chaos.faults import KINDS, Fault, schedule
from meshd.swarm.chaos.network import Network, NoNetwork
from meshd.swarm.chaos.spec import ENDLESS, ending_at, write_spec
from meshd.swarm.chaos.traces import Traces
from meshd.swarm.chaos.trial import Struck, Trial
from meshd.swarm.chaos.verdict import Scored, bars, noticing, rows

PEERS = ["seed", "stage0-0", "stage0-1", "stage1-0", "stage1-1", "stage2-0"]


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_hits_everybody_with_every_kind_and_nobody_twice_in_a_row(seed: int) -> None:
    faults = schedule(PEERS, 480.0, 45.0, random.Random(seed))
    assert [fault.at_s for fault in faults] == [45.0 * n for n in range(1, 11)]
    assert {fault.peer for fault in faults[: len(PEERS)]} == set(PEERS), "the seed included"
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)
    assert all(one.peer != other.peer for one, other in pairwise(faults))
    assert all((fault.frozen_s > 0) == (fault.kind == "freeze") for fault in faults)
    assert all((fault.cut_s > 0) == (fault.kind == "cut") for fault in faults)
    some = schedule(PEERS, 480.0, 45.0, random.Random(seed), ["kill", "restart"])
    assert {fault.kind for fault in some} == {"kill", "restart"}
    assert faults == schedule(PEERS, 480.0, 45.0, random.Random(seed))


def test_the_journal_is_read_as_its_writer_means_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for item in range(5):
            journal.inject(item)
        journal.commit(0, 256)
        journal.commit(3, 256)
        journal.drop(1, partial=True)
        assert read_journal(path) == Account(5, 2, 1, 1, 512, in_flight=2)
        assert not read_journal(path).holds, "two are still out"
        journal.drop(2, partial=False)
        journal.drop(4, partial=False)
    with path.open("ab") as file:
        file.write(b"C 9")  # torn
    assert read_journal(path) == Account(5, 2, 3, 1, 512)
    assert read_journal(path).holds
    with Journal(path) as journal:
        journal.inject(7)
    again = read_journal(path)
    assert (again.injected, again.committed, again.dropped, again.in_flight) == (6, 2, 3, 1)


def test_data_committed_twice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("B 0 0 0 0 0 0 0\nI 4\nI 4\nC 0 10\nC 1 10\n")
    assert read_journal(path) == Account(2, 2, tokens=20, twice=1)
    assert not read_journal(path).holds
    path.write_text("B 0 0 0 0 0 0 0\nC 3 10\n")
    with pytest.raises(DataError, match="journal"):
        read_journal(path)


def test_counters_are_summed_over_processes_and_absent_ones_are_not_zero() -> None:
    assert summed([{"a": 1.0, "b": 2.0}, {"a": 3.0}], "a") == 4
    assert summed([{"a": 1.0}], "lost_after_commit") is None
    assert summed([], "a") is None


def test_the_first_notice_of_another_peer_counts() -> None:
    def said(by: str, time: float, name: str = "link_lost", peer: str = "stage1-0") -> Event:
        return Event(by, time, name, {"peer": peer, "reason": "lost"})

    events = [
        said("stage0-1", 104.0),
        said("stage0-0", 101.5),
        said("stage1-0", 100.1),  # the victim itself
        said("stage0-0", 99.0),  # before
        said("seed", 100.5, name="peer_gone"),
        said("stage0-0", 100.2, peer="stage1-1"),
    ]
    found = detected(events, "stage1-0", 100.0, 60.0)
    assert found is not None
    assert (found.seconds, found.by) == (1.5, "stage0-0")
    assert detected(events, "stage2-0", 100.0, 60.0) is None
    assert detected(events, "stage1-0", 100.0, 1.0) is None


def test_logs_are_read_past_lines_that_are_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    good = {"time": "2026-01-01T00:00:00.250+00:00", "event": "link_lost", "peer": "x"}
    bad = {**good, "event": "a bug", "traceback": "Traceback ...\nValueError: no"}
    log.write_text(f"plain words\n{json.dumps(good)}\n{json.dumps(bad)}\n{json.dumps(good)[:20]}")
    events = read_log("attic", log)
    assert [event.name for event in events] == ["link_lost", "a bug"]
    assert events[0].time % 1 == pytest.approx(0.25)
    assert tracebacks("attic", log) == ["attic: ValueError: no"]
    assert read_log("attic", tmp_path / "none") == []


# ---- bars -----------------------------------------------------------------------------------------------------------

SOUND = Trial(
    account=Account(1000, 970, 30, 12, 248_320),
    tokens_per_s=700.0,
    watermark=240_000,
    checkpoint=Path(),
    data=Path(),
    replayed=9,
    lost_after_commit=None,
    struck=(),
    exits=(),
    bugs=(),
    leftovers=0,
)


def scored(scenario: str = "chaos", loss: float | None = 4.01, **change: object) -> Scored:
    return Scored(scenario, 6, replace(SOUND, **change), loss)  # type: ignore[arg-type]


PLAIN = [scored(f"undisturbed {n}", loss, tokens_per_s=1000.0) for n, loss in enumerate((4.0, 4.02, 3.99), 1)]


def missed(chaos: Scored, plain: list[Scored] = PLAIN) -> list[str]:
    return [bar.name for bar in bars(chaos, plain) if not bar.met]


def test_a_sound_run_meets_all_bars() -> None:
    assert missed(scored()) == []
    row = rows(scored(), PLAIN)[0]
    assert list(row)[:13] == [
        "scenario", "peers", "injected", "committed", "dropped", "in_flight", "partial", "replayed",
        "lost_after_commit", "throughput_share", "loss", "loss_undisturbed", "leftover_processes",
    ]  # fmt: skip
    assert row["throughput_share"] == 0.7
    assert row["loss_undisturbed"] == [4.0, 4.02, 3.99]
    assert row["lost_after_commit"] is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"account": Account(1000, 970, 30, in_flight=1)}, "every microbatch"),
        ({"account": Account(1000, 969, 30)}, "every microbatch"),
        ({"account": Account(1000, 970, 30, twice=1)}, "every microbatch"),
        ({"account": Account()}, "every microbatch"),
        ({"account": Account(1000, 949, 51)}, "at most 5%"),
        ({"tokens_per_s": 600.0}, "throughput"),
        ({"loss": 4.03}, "held-out loss"),
        ({"loss": None}, "held-out loss"),
        ({"leftovers": 1}, "no process"),
        ({"exits": ("stage0-0 ended by itself: exit code 1",)}, "no peer ended"),
        ({"bugs": ("seed: ValueError: no",)}, "no peer ended"),
    ],
)
def test_each_bar_can_be_missed(change: dict[str, object], name: str) -> None:
    (found,) = missed(scored(**change))  # type: ignore[arg-type]
    assert found.startswith(name)


def test_without_undisturbed_runs_two_bars_are_not_measured() -> None:
    unknown = [bar.name for bar in bars(scored(), []) if bar.met is None]
    assert [name.split()[0] for name in unknown] == ["throughput", "held-out"]


def test_an_undisturbed_run_that_loses_a_microbatch_is_no_comparison() -> None:
    wrong = scored("undisturbed 1", 4.0, tokens_per_s=1000.0, account=Account(10, 9, 0, in_flight=1))
    assert len(missed(scored(), [wrong, *PLAIN])) == 1


def test_short_freezes_are_not_expected_to_be_noticed() -> None:
    short = Struck(Fault(10, "a", "freeze", frozen_s=3.0), 0.0, None)
    long = Struck(Fault(10, "a", "freeze", frozen_s=12.0), 0.0, None)
    assert noticing([short])["frozen (about 5 s)"] == "no case"
    assert noticing([short, long])["frozen (about 5 s)"] == "not noticed by any stream (1 cases)"


# ---- spec and traces ------------------------------------------------------------------------------------------------


def test_the_spec_of_a_trial_loads_as_it_was_but_for_its_end(tmp_path: Path) -> None:
    spec = RunSpec(
        model=ModelSpec(source="/models/m", stages=2, cut=[3]),
        data=DataSpec(sources=["/texts/a b"], held_out=0.2),
        stop=StopSpec(steps=10),
    )
    path = write_spec(ending_at(spec, ENDLESS), tmp_path / "sub" / "run.toml")
    loaded = load_run_spec(path)
    assert tomllib.loads(path.read_text())["stop"] == {"tokens": ENDLESS}
    assert loaded.optim.schedule == "constant"
    assert loaded.model_copy(update={"stop": spec.stop, "optim": spec.optim}) == spec


def test_c30_traces_end_their_own_sessions_and_nothing_else(tmp_path: Path) -> None:
    """A process of the same command that was not noted stays; one that only has an old number, too."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    command = [sys.executable, "-c", code + "print('up', flush=True); time.sleep(600)"]
    mine, other = (
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)
    )
    try:
        for process in (mine, other):
            assert process.stdout is not None
            process.stdout.readline()
        traces = Traces(tmp_path, tmp_path / "sockets")
        (tmp_path / "sockets").mkdir()
        traces.started(mine.pid)
        # A killed script left this note; meanwhile the number was given to another process.
        traces.leaders[other.pid] = psutil.Process(other.pid).create_time() - 3600
        traces.write()
        os.kill(mine.pid, 19)  # SIGSTOP: a frozen peer cannot end by itself
        again = Traces.read(tmp_path)
        assert {process.pid for process in again.alive()} >= {mine.pid}
        theirs = [other.pid, *(child.pid for child in psutil.Process(other.pid).children())]
        assert len(theirs) == 2
        assert not {process.pid for process in again.alive()} & {*theirs}
        assert len(again.clear()) >= 2, "and the child that it had started"
        assert mine.wait(10) == -9
        assert all(psutil.pid_exists(pid) for pid in theirs)
        assert not (tmp_path / "sockets").exists()
        assert Traces.read(tmp_path).leaders == {}
    finally:
        for process in (mine, other):
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait()


# ---- the network ----------------------------------------------------------------------------------------------------


def test_a_network_belongs_to_its_directory_and_names_fit(tmp_path: Path) -> None:
    here, there = Network.of(tmp_path / "a", PEERS), Network.of(tmp_path / "b", PEERS)
    assert here == Network.of(tmp_path / "a", PEERS), "the next start finds what a killed one has left"
    assert here.tag != there.tag
    assert len({here.address(peer) for peer in PEERS}) == len(PEERS)
    assert here.address("seed").startswith("10.")
    # The kernel takes no longer names of interfaces.
    assert len(here._port(PEERS[-1])) <= 15


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_cut_link_is_silent_both_ways_until_it_is_mended(tmp_path: Path) -> None:
    network = Network.of(tmp_path, ["one", "other"])
    try:
        network.make()
    except NoNetwork as error:
        pytest.skip(str(error))
    code = "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); print('up', flush=True); s.accept()"
    server = subprocess.Popen(
        [*network.command("one"), sys.executable, "-c", code, network.address("one")],
        stdout=subprocess.PIPE,
    )
    dial = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))"

    def reaches(seconds: str) -> bool:
        command = [*network.command("other"), sys.executable, "-c", dial, network.address("one"), seconds]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    try:
        assert server.stdout is not None
        server.stdout.readline()
        network.cut("one")
        assert not reaches("0.5")
        network.mend("one")
        assert reaches("20")
    finally:
        server.kill()
        server.wait()
        network.remove()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.tag not in listed
