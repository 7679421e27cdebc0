"""Bounds: a slow link fills no memory, and a full disk stops no training (issue 4; C09, C29)."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from google.protobuf.message import Message
from holdings import holdings
from swarm import Swarm, swarm, tiny_spec

from meshd.observe.log import fields_of
from meshd.pipeline.journal import Journal
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.memory import Delivery


@dataclass
class SlowLink:
    """A tap: from one address to another, so many bytes a second."""

    source: str
    target: str
    rate: float
    clock: VirtualClock
    free_at: float = 0.0

    def __call__(self, source: str, target: str, message: Message) -> list[Delivery]:
        if (source, target) != (self.source, self.target):
            return [Delivery(message)]
        now = self.clock.monotonic()
        self.free_at = max(now, self.free_at) + message.ByteSize() / self.rate
        return [Delivery(message, self.free_at - now)]


def test_c09_behind_a_slow_link_busy_goes_upstream_and_memory_keeps_within_its_bound(
    tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    """b receives faster than it can send on: a is told BUSY and waits, and b holds its budget and no more."""
    budget, buffer = 1 << 20, 64 << 10
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        model={"stages": 3, "cut": [2, 4]},
        data={"microbatch": 8},
        optim={"inner_batch": 8, "max_lag": 1000},
        stop={"steps": 1000},
        snapshot={"evaluate": False},
        pipeline={"in_flight": 24, "store_mb": 1},
        wire={"forward": "dense32", "backward": "int8"},
    )

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.buffer_bytes = buffer
            payload = 8 * 32 * s.run.resolved.hidden * 4
            s.network.tap = SlowLink("b:1", "c:1", payload / 1.0, s.clock)
            await s.gathered(["a"], ["b"], ["c"])
            await s.until(lambda: s.counted("offers_busy", "b") > 0)
            b, most = s.peers["b"], 0
            for _ in range(4):
                await s.clock.sleep(2.0)
                held = holdings([b, s.running["b"]], [s, s.network, s.registry, s.tasks, s.clock])
                most = max(most, held["Frame.payload bytes"])
                metrics = b.metrics
                assert metrics.value("store_bytes") <= budget
                assert metrics.value("waiting_bytes") <= budget
                assert metrics.value("downstream_queued_bytes") <= 8 << 20
            # Whole microbatches: the last that fits, and the output of each that is held.
            assert budget / 2 < most <= 2 * budget
            assert budget // payload < 24 - 8, "there was more to hold than fits"
            assert s.counted("microbatches_added", "b") > 0
            assert s.counted("dropped_failed") == 0
            assert s.account("a").dropped == 0, "nothing is given up for want of room"
            assert s.peers["a"].metrics.value("waiting_bytes") <= 24 * payload

    run_virtual(scenario())


@dataclass
class Disk:
    """Writes of all kinds below one folder, as long as it is not full. What is there can be read, moved and deleted."""

    folder: Path
    full: bool = False
    refused: set[str] = field(default_factory=set)

    def check(self, path: Path) -> None:
        if self.full and path.is_relative_to(self.folder):
            kinds = [kind for kind in KINDS if kind in str(path.relative_to(self.folder))]
            self.refused.update(kinds)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def guard(self, patch: pytest.MonkeyPatch) -> None:
        """Every place that writes: journal lines and sums, bundles, manifests, downloads, evaluations."""
        opened, compacted = Path.open, Journal._compact

        def guarded(path: Path, mode: str = "r", *rest: Any, **named: Any) -> IO[Any]:
            if set(mode) & set("wax+"):
                self.check(path)
            return opened(path, mode, *rest, **named)

        def compact(books: Journal) -> None:
            compacted(books)
            books._file = Guarded(books._file, books._path, self)  # type: ignore[assignment]

        patch.setattr(Path, "open", guarded)
        patch.setattr(Journal, "_compact", compact)


# Parts of paths: the journal's sums and lines, what is downloaded, what is written here.
KINDS = ("journal.new", "journal", ".partial/", ".new/")


@dataclass
class Guarded:
    """A journal's open file."""

    file: object
    path: Path
    disk: Disk

    def write(self, data: bytes) -> int:
        self.disk.check(self.path)
        return self.file.write(data)  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        self.file.close()  # type: ignore[attr-defined]


def test_c29_a_full_disk_is_in_the_status_and_training_goes_on(
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The origin's disk, and the seed's. What the origin trained on meanwhile is in its books when there is room."""
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        stop={"steps": 100_000},
        snapshot={"every_tokens": 4 * 64},
        data={"held_out_sequences": 2},
        pipeline={"in_flight": 2},
    )
    disk = Disk(tmp_path)

    async def problem(s: Swarm, name: str) -> str:
        return (await s.peers[name].status.answer(pb.StatusRequest())).self.last_error

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.5, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: s.counted("snapshots_kept", "seed") > 0)
            # The last stage of an evaluation is at work, too, before anything is trained on (C15).
            assert s.counted("evaluations_scored", "a1") > 0
            disk.full = True
            await s.until(
                lambda: s.counted("snapshots_failed", "a0") > 1 and s.counted("journal_behind", "a0")
            )
            assert "journal" in await problem(s, "a0")
            assert "no snapshot at" in await problem(s, "a0")
            assert "no space left on the disk" in await problem(s, "a1")
            committed = s.counted("ledger_committed", "a0")
            behind = s.account("a0")
            await s.until(lambda: s.counted("ledger_committed", "a0") > committed + 4)
            assert s.account("a0") == behind, "nothing was written"
            assert s.peers["a0"].watchdog.health().ok
            disk.full = False
            kept = s.counted("snapshots_kept", "seed")
            await s.until(lambda: s.counted("snapshots_kept", "seed") > kept)
            await s.until(lambda: not s.counted("journal_behind", "a0"))
            assert s.counted("ledger_committed", "a0") == s.account("a0").committed
            assert s.account("a0").holds
            await s.until(lambda: s.counted("ledger_dropped", "a0") == 0)
            for name in ("a0", "a1", "seed"):
                assert not await problem(s, name)

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        disk.guard(patch)
        run_virtual(scenario())
    assert disk.refused == set(KINDS)
    lines = [fields_of(record) for record in caplog.records if record.getMessage() == "journal_not_written"]
    assert len(lines) == 1, "said once, not at every microbatch"
    assert not [record for record in caplog.records if record.exc_info]
