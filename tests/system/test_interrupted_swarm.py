"""Ctrl-C on `meshd swarm`: every process of the swarm leaves in good order, and none is left."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from daemons import MESHD, family, launcher, nothing_left, status, until, write_spec

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

PEERS = {"seed", "stage0-0", "stage1-0", "stage1-1"}


def test_c30_ctrl_c_stops_the_whole_swarm(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> None:
    spec = write_spec(tmp_path / "run.toml", tiny_model, adapt_text, stop={"steps": 100_000})
    directory = tmp_path / "swarm"
    command = [*MESHD, "swarm", str(spec), "--replicas", "1,2", "--directory", str(directory), "--no-ui"]
    processes: list[psutil.Process] = []
    with launcher(tmp_path) as launch:
        swarm = launch.spawn("swarm", command, directory)
        try:
            swarm.wait_log("seed: up after")
            seed = replace(swarm, name="seed", state=directory / "peers" / "seed")
            until(lambda: status(seed).global_tokens > 0, "the swarm trains", more=swarm.text)
            until(lambda: len(status(seed).peers) == 3, "both replicas are seen", more=swarm.text)
            processes = family(swarm)
            assert len(processes) == 1 + 2 * len(PEERS)  # each has its p2pd
            os.killpg(os.getpgid(swarm.pid), signal.SIGINT)
            assert swarm.ended() == 130, swarm.text()
            assert nothing_left(processes)
            assert launch.forgotten() == []
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    assert f"stopped; the same command continues from {directory}" in swarm.text()
    logs = {path.stem: path.read_text() for path in (directory / "logs").iterdir()}
    assert logs.keys() == PEERS
    for text in (swarm.text(), *logs.values()):
        assert "Traceback" not in text
    for name in PEERS:
        assert "daemon: leaving" in logs[name], name
        assert "libp2p daemon lost" not in logs[name], name
