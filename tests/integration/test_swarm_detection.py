"""How long it takes until a swarm knows that a peer was killed, froze or was cut off, and what it says of it (C10)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from swarm import Swarm, swarm, tiny_spec

from meshd.observe.log import fields_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual

# One way, virtual seconds.
DELAY = 0.5
QUIET: dict[str, Any] = {"snapshot": {"evaluate": False}, "pipeline": {"in_flight": 2}}


class Said(logging.Handler):
    """Log events with the virtual time at which they were said, and by which peer (by its task's name)."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:
            return  # before the swarm, or in a thread
        if record.levelno >= logging.WARNING:
            self.lines.append((now, record.getMessage(), fields_of(record)))

    def of(self, event: str, peer: str, since: float) -> list[tuple[float, dict[str, Any]]]:
        """Lines about a peer, and how long after `since`."""
        return [
            (now - since, fields)
            for now, name, fields in self.lines
            if name == event and fields["peer"] == peer and now >= since
        ]


@pytest.fixture
def said() -> Any:
    handler = Said()
    logger = logging.getLogger("meshd")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def struck(s: Swarm, fault: str, victim: str) -> None:
    others = [name for name in s.peers if name != victim]
    if fault == "killed":
        await s.kill(victim)
    for name in {"killed": [], "frozen": others, "cut off": ["a0"]}[fault]:
        s.network.mute(f"{name}:1", f"{victim}:1")


@pytest.mark.parametrize(
    ("fault", "within_s", "reason"),
    [
        ("killed", 1.0, "is gone"),
        ("frozen", 5.0, "no answer to a ping for 4 s"),
        pytest.param("cut off", 10.0, "no answer to a ping for 4 s", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_goes_is_noticed_in_time_and_named_once(
    fault: str, within_s: float, reason: str, tiny_model: Path, adapt_text: Path, tmp_path: Path, said: Said
) -> None:
    """By its upstream neighbour; training goes on over the other replica."""
    spec = tiny_spec(tiny_model, adapt_text, stop={"steps": 100_000}, **QUIET)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1", "b1"])
            await s.until(lambda: s.counted("microbatches_added", "b1") >= 2)
            began = s.clock.monotonic()
            await struck(s, fault, "b1")
            before = s.account("a0").committed
            await s.until(lambda: said.of("link_lost", "b1", began))
            ((after_s, fields),) = said.of("link_lost", "b1", began)
            assert after_s <= within_s
            assert fields["stage"] == 1
            assert reason in fields["reason"]
            # It is tried again as long as its record lives, and that is not said each time.
            await s.until(lambda: s.account("a0").committed > before + 2)
            await s.until(lambda: s.clock.monotonic() > began + 14.0)
            assert len(said.of("link_lost", "b1", began)) == 1
            assert len(said.of("gossip_failed", "b1", began)) <= 1
            assert all(fields["stage"] == 1 for _, fields in said.of("gossip_failed", "b1", began))
            assert s.account("a0").holds
            if fault == "killed":
                return
            s.network.heal()
            added = s.counted("microbatches_added", "b1")
            await s.until(lambda: s.counted("microbatches_added", "b1") > added)
            again = s.clock.monotonic()
            await struck(s, "killed", "b1")
            await s.until(lambda: said.of("link_lost", "b1", again))
            assert said.of("link_lost", "b1", again)[0][0] <= 1.0, "a new loss is a new line"

    run_virtual(main())


@pytest.mark.parametrize(("fault", "within_s"), [("killed", 1.0), ("cut off", 10.0)])
def test_a_peer_is_noticed_from_below_as_well(
    fault: str, within_s: float, tiny_model: Path, adapt_text: Path, tmp_path: Path, said: Said
) -> None:
    """The next stage names whoever sent it microbatches, and says what it waits for."""
    spec = tiny_spec(tiny_model, adapt_text, stop={"steps": 100_000}, **QUIET)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: s.counted("microbatches_added", "a0") >= 2)
            began = s.clock.monotonic()
            if fault == "killed":
                await s.kill("a0")
            else:
                s.network.mute("a0:1", "a1:1")
            await s.until(lambda: said.of("upstream_lost", "a0", began))
            ((after_s, fields),) = said.of("upstream_lost", "a0", began)
            assert after_s <= within_s
            assert fields["stage"] == 0
            assert fields["reason"]
            if fault == "killed":
                await s.until(lambda: "nobody serves stage 0" in s.peers["a1"].status.waits(), 60.0)
                assert s.peers["a1"].me.state == pb.PEER_STATE_WORKING

    run_virtual(main())
