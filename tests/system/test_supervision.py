"""What daemons do when p2pd dies under them, seen as an operator sees it: log, status and /healthz."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from daemons import Daemon, family, launcher, meshd, status, until, write_spec

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]


def health(daemon: Daemon) -> dict[str, object]:
    """What its /healthz says, with the code 200."""
    url = json.loads((daemon.state / "daemon.json").read_text())["health"]
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert reply.status == 200
        found: dict[str, object] = json.loads(reply.read())
        return found


def p2pd(daemon: Daemon) -> int | None:
    return next((process.pid for process in family(daemon) if process.name() == "p2pd"), None)


def test_c13_p2pd_dies_on_every_peer_and_training_goes_on(
    tmp_path: Path, tiny_model: Path, adapt_text: Path
) -> None:
    spec = write_spec(
        tmp_path / "run.toml",
        tiny_model,
        adapt_text,
        stop={"steps": 100_000},
        snapshot={"every_tokens": 10**9, "evaluate": False},
    )
    with launcher(tmp_path) as launch:
        seed = launch.seed(spec)
        link = seed.link()
        assert health(seed)["healthy"], "before it has anything to do"
        stages = [launch.stage(link, 0, "first"), launch.stage(link, 1, "last", "--http-port", "off")]
        for daemon in stages:
            daemon.wait_log("stage_ready")
        first, last = stages
        until(lambda: status(first).global_tokens > 0, "the swarm trains")
        assert json.loads((last.state / "daemon.json").read_text())["health"] == ""
        ended = {daemon.name: p2pd(daemon) for daemon in (seed, *stages)}
        for pid in ended.values():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        now = status(first).global_tokens
        until(lambda: status(first).global_tokens > now, "training goes on")
        found = health(first)
        assert found["healthy"], found
        assert str(found["why"]).startswith("working: ")
        for daemon in (seed, *stages):
            daemon.wait_log("libp2p daemon lost .* started again as process")
            assert p2pd(daemon) not in (None, ended[daemon.name])
            assert daemon.text().count("libp2p daemon lost") == 1, daemon.text()
            assert "Traceback" not in daemon.text()
        until(lambda: not status(last).self.last_error, "all is well again", more=last.text)
        shown = meshd("status", "--state-dir", str(first.state))
        assert shown.code == 0, shown.err
        assert "of no use" not in shown.out
        assert shown.out.count("working") >= 3, shown.out
        for daemon in (*stages, seed):
            daemon.leave()
