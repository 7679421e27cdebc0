"""Real meshd processes for tests: started as a person would start them, watched through what they print and answer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from meshd.observe.status import daemon_address, fetch_status
from meshd.proto import meshd_pb2 as pb
from meshd.transport.grpc_client import GrpcTransport

# Bounds for a machine that is busy with other things; a healthy swarm needs a tenth of them.
LONG_S = 90.0
MESHD = (sys.executable, "-m", "meshd")


@dataclass
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Daemon:
    """One daemon's process. It leads a session of its own, as it would on a terminal of its own."""

    name: str
    state: Path
    process: subprocess.Popen[bytes]
    log: Path
    seen: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_log(self, pattern: str, timeout_s: float = LONG_S) -> re.Match[str]:
        """Wait until the log has a match behind the last one found; that match."""

        def found() -> re.Match[str] | None:
            match = re.compile(pattern).search(self.text(), self.seen)
            if match is None and self.process.poll() is not None:
                raise AssertionError(
                    f"{self.name} ended with {self.process.returncode}, without {pattern!r}:\n{self.text()}"
                )
            return match

        match = until(
            found, f"{self.name} logs {pattern!r}", timeout_s, lambda: f"{self.name}'s log:\n{self.text()}"
        )
        self.seen = match.end()
        return match

    def link(self) -> str:
        self.wait_log(r"daemon: listening ")
        return str(json.loads((self.state / "daemon.json").read_text())["link"])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self, timeout_s: float = LONG_S) -> int:
        """Its exit code (negative: the signal that killed it), once it has ended."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} is still there:\n{self.text()}") from None

    def leave(self) -> None:
        """Ask it to leave; it must do so in good order."""
        self.signal(signal.SIGTERM)
        assert self.ended() == 0, self.text()


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = LONG_S, more: Callable[[], str] = str
) -> Any:
    """Poll other processes until `condition` gives something true; that."""
    end = time.monotonic() + timeout_s
    while not (result := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{more()}")
        time.sleep(0.1)
    return result


@dataclass
class Launcher:
    """Starts processes under `root`, and at the end ends them by their ids.

    temporary: their temporary directory, which nobody else uses.
    """

    root: Path
    temporary: Path
    daemons: list[Daemon] = field(default_factory=list)

    def start(
        self,
        name: str,
        *arguments: str,
        state: Path | None = None,
        command: Sequence[str] = MESHD,
        environment: Mapping[str, str] | None = None,
    ) -> Daemon:
        """Start `meshd ARGUMENTS --state-dir ROOT/NAME`, as peer NAME."""
        state = state or self.root / name
        options = ("--state-dir", str(state), "--name", name, "--threads", "1")
        return self.spawn(name, [*command, *arguments, *options], state, environment)

    def spawn(
        self, name: str, command: Sequence[str], state: Path, environment: Mapping[str, str] | None = None
    ) -> Daemon:
        """Start `command`; what it prints is appended to ROOT/NAME.log."""
        log = self.root / f"{name}.log"
        with log.open("ab") as output:
            before = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.temporary), **(environment or {})},
                start_new_session=True,
            )
        daemon = Daemon(name, state, process, log, before)
        self.daemons.append(daemon)
        return daemon

    def seed(self, spec: Path, name: str = "seed", *options: str) -> Daemon:
        return self.start(name, "run", str(spec), "--role", "seed", *options)

    def stage(self, link: str, stage: int, name: str, *options: str) -> Daemon:
        return self.start(name, "join", link, "--stage", str(stage), *options)

    def sessions(self, *names: str) -> list[psutil.Process]:
        """Living processes of the sessions that were started here (for these names, or all)."""
        leaders = {daemon.pid for daemon in self._named(names)}
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def sweep(self, *names: str) -> None:
        """Kill what is left of the daemons of these names (of all without)."""
        for process in self.sessions(*names):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self._named(names):
            daemon.process.wait()

    def forgotten(self) -> list[str]:
        """Sockets (p2pd's) that are left of the processes that were started here: once they ended, none (C30)."""
        return sorted(path.name for path in self.temporary.glob("*.sock"))

    def _named(self, names: Sequence[str]) -> list[Daemon]:
        return [daemon for daemon in self.daemons if not names or daemon.name in names]


@contextmanager
def launcher(root: Path) -> Iterator[Launcher]:
    # Not under `root`: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="meshd-") as temporary:
        made = Launcher(root, Path(temporary))
        try:
            yield made
        finally:
            made.sweep()


def meshd(*arguments: str, command: Sequence[str] = MESHD, timeout_s: float = LONG_S) -> Finished:
    """Run one meshd command to its end."""
    done = subprocess.run(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        start_new_session=True,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def family(daemon: Daemon) -> list[psutil.Process]:
    """The daemon's process and those it has started."""
    process = psutil.Process(daemon.pid)
    return [process, *process.children(recursive=True)]


def nothing_left(processes: Sequence[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def status(daemon: Daemon) -> pb.StatusReply:
    """What `meshd status` would ask for: a process for each look would take most of a test's time."""

    async def ask() -> pb.StatusReply:
        transport = GrpcTransport()
        try:
            return await fetch_status(transport, daemon_address(daemon.state), timeout_s=30)
        finally:
            await transport.close()

    return asyncio.run(ask())


def write_spec(path: Path, model: Path, text: Path, /, **tables: dict[str, Any]) -> Path:
    """A run of the committed small model, as TOML. Tables are merged over the defaults here."""
    values: dict[str, dict[str, Any]] = {
        "model": {"source": str(model), "stages": 2, "cut": [3]},
        "data": {
            "sources": [str(text)], "seq_len": 32, "microbatch": 2, "held_out_sequences": 64, "held_out": 0.2,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 2, "inner_batch": 4},
        "snapshot": {"every_tokens": 1536},
        "stop": {"steps": 24},
    }  # fmt: skip
    lines = ['name = "test"', "seed = 3"]
    for name in {**values, **tables}:
        lines.append(f"[{name}]")
        # JSON's strings, numbers, lists and booleans are TOML's, too.
        merged = {**values.get(name, {}), **tables.get(name, {})}
        lines += [f"{key} = {json.dumps(value)}" for key, value in merged.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
