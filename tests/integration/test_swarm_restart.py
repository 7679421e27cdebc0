"""Killed at any point and started again on its state directory, a peer goes on: what the crash tore is noticed, said in
a line, and the older state is used (issue 4; C22, C25)."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from swarm import SERVING, Swarm, swarm, tiny_spec

from meshd.peer.resolve import BUNDLES
from meshd.sim.clock import run_virtual
from meshd.state.stage_state import write_stage

DELAY = 0.3


def half(content: bytes, rng: random.Random) -> bytes:
    """The crash came while it was written."""
    return content[: rng.randrange(len(content))]


def empty(content: bytes, rng: random.Random) -> bytes:
    """Its name was on the disk before its content."""
    return b""


def zeros(content: bytes, rng: random.Random) -> bytes:
    """The machine lost its power before the last pages were written."""
    kept = rng.randrange(len(content))
    return content[:kept] + bytes(len(content) - kept)


def garbled(content: bytes, rng: random.Random) -> bytes:
    """The disk gives back something else."""
    at = rng.randrange(max(1, len(content) - 8))
    return content[:at] + bytes(b ^ 0x5A for b in content[at : at + 8]) + content[at + 8 :]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [half, empty, zeros, garbled]


# Of a state, of what was fetched, and of what is this peer's own: for a run that takes seconds.
SOME = ("optimizer.safetensors", "config.json", "prior.safetensors", "evaluations.json")


def files_of(folder: Path) -> list[str]:
    """One file of each kind and bundle; of what a journal, whose lines are checked elsewhere, may lose: its end."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size and path.name != "journal":
            found[str(path.relative_to(folder))] = path
    return list(found)


def bundle_of(file: str) -> str | None:
    parts = Path(file).parts
    inside = parts[0] == BUNDLES and not parts[1].startswith(".")
    return "/".join(parts[1:-1]) if inside else None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning, or worse; no tracebacks."""
    assert not [record for record in caplog.records if record.exc_info]
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [f"{record.getMessage()} {vars(record)}" for record in told]


async def damage_each(
    s: Swarm,
    name: str,
    damages: Callable[[str], list[Callable[[bytes, random.Random], bytes]]],
    caplog: pytest.LogCaptureFixture,
) -> int:
    """Kill a peer, damage one of its files, start it again: for every file it has. Returns how many."""
    done, tried = 0, set[str]()
    while left := [
        file for file in files_of(s.folder(name)) if file not in tried and _kind(file) not in tried
    ]:
        file = left[0]
        tried |= {file, _kind(file)}
        for damage in damages(file):
            path = s.folder(name) / file
            if not path.exists() or not path.stat().st_size:
                continue  # pruned since
            await s.kill(name)
            rng = random.Random(f"{file} {damage.__name__}")
            content = path.read_bytes()
            # The journal loses its end besides: a line that was not written whole.
            journal = s.folder(name) / "journal"
            if journal.exists():
                lines = journal.read_bytes()
                journal.write_bytes(lines[: rng.randint(lines.index(b"\n") + 1, len(lines))])
            hurt = damage(content, rng)
            path.write_bytes(hurt)
            caplog.clear()
            s.start(name)
            await s.until(lambda: s.peers[name].me.state in SERVING)
            # Where the live state is torn there is a snapshot.
            assert s.version(name) > 0, file
            bundle = bundle_of(file)
            if bundle is not None and hurt != content:
                lines_said = [line for line in said(caplog) if f"bundle {bundle} in" in line]
                assert lines_said, f"{file}: {damage.__name__} was not noticed"
            done += 1
    return done


def _kind(file: str) -> str:
    """Watermarks and hashes left out: one of them stands for all."""
    return "/".join("N" if part.isdigit() or len(part) == 64 else part for part in Path(file).parts[2:])


@pytest.mark.parametrize(
    ("name", "every"),
    [
        pytest.param("a0", False, id="some"),
        pytest.param("a0", True, id="all of the origin", marks=pytest.mark.slow),
        pytest.param("a1", True, id="all of a replica", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_a_peer_goes_on_whatever_file_a_crash_has_torn(
    name: str,
    every: bool,
    tiny_model: Path,
    adapt_text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        stop={"steps": 100_000},
        pipeline={"in_flight": 1},
        wire={"forward": "spectral:bits=2", "backward": "spectral:bits=1", "prior_tokens": 256},
        snapshot={"every_tokens": 2 * 128, "evaluate": name == "a0" and every},
    )

    def damages(file: str) -> list[Callable[[bytes, random.Random], bytes]]:
        if every:
            return DAMAGES
        return [random.Random(file).choice(DAMAGES)] if Path(file).name in SOME else []

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: s.counted("snapshots_kept", "seed") >= 2)
            count = await damage_each(s, name, damages, caplog)
            assert count > (40 if every else 2)
            before = s.account("a0")
            await s.until(lambda: s.account("a0").committed > before.committed + 3)
            assert s.account("a0").injected == sum(
                (s.account("a0").committed, s.account("a0").dropped, len(s.account("a0").open))
            )
            assert s.version(name) > 0

    with caplog.at_level(logging.INFO):
        run_virtual(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("live", ["other tensors", "no weights", "other types"])
def test_a_state_that_is_none_of_the_stage_costs_that_state_and_not_the_peer(
    live: str, tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is as its manifest says, and newer than all others, and so is a snapshot: the one before is taken instead."""
    tables = {"snapshot": {"every_tokens": 2 * 128, "evaluate": False}, "pipeline": {"in_flight": 1}}
    spec = tiny_spec(tiny_model, adapt_text, stop={"steps": 100_000}, **tables)

    async def scenario() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: s.counted("snapshots_kept", "seed") >= 1)
            await s.kill("a1")
            store, facts = s.store("a1"), {"tokens": 10**6, "weight_version": 10**6}
            other = {"another.weight": torch.zeros(4)}
            if live == "other tensors":
                write_stage(store, "live/1", other, None, facts)
            elif live == "no weights":
                store.write("live/1", {"readme": b"nothing"}, facts)
            else:
                odd = {"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}
                store.write("live/1", {"weights.safetensors": safetensors.torch.save(odd)}, facts)
            write_stage(store, "snapshot/1/204800", other, None, {"tokens": 204800, "weight_version": 800})
            s.start("a1")
            await s.until(lambda: s.peers["a1"].me.state in SERVING)
            assert 0 < s.version("a1") < 800
            assert not {"live/1", "snapshot/1/204800"} & set(store.names())

    with caplog.at_level(logging.INFO):
        run_virtual(scenario())
    for bundle in ("live/1", "snapshot/1/204800"):
        assert [line for line in said(caplog) if "state_unusable" in line and bundle in line]
