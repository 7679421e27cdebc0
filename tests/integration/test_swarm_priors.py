"""Codecs with priors in whole runs: fitted by the sender, fetched by receivers, named by every frame (DESIGN section
3)."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from swarm import Additions, Swarm, swarm, tiny_spec

from meshd.config.runspec import RunSpec
from meshd.errors import NetworkError
from meshd.peer.stage import StagePeer
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery

FORWARD, BACKWARD = "spectral:bits=2", "spectral:bits=1"
PRIOR_TOKENS = 1024


def masked(weights: Path, text: Path, /, steps: int = 24, **tables: dict[str, Any]) -> RunSpec:
    """Microbatches of 64 tokens: the prior comes after 17 of them, outliers left out."""
    wire = {"forward": FORWARD, "backward": BACKWARD, "prior_tokens": PRIOR_TOKENS}
    values: dict[str, Any] = {"wire": wire, "snapshot": {"evaluate": False}, "stop": {"steps": steps}}
    return tiny_spec(weights, text, **{**values, **tables})


@dataclass
class Frames:
    """A tap that notes the frames of training as they cross: codec, prior and bytes, by direction, in order."""

    there: list[tuple[str, bytes, int]] = field(default_factory=list)
    back: list[tuple[str, bytes, int]] = field(default_factory=list)
    verdicts: Counter[int] = field(default_factory=Counter)

    def __call__(self, source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.LinkMessage):
            if message.HasField("offer") and not message.offer.evaluate:
                self.there.append(seen(message.offer.hidden))
            if message.HasField("gradient"):
                self.back.append(seen(message.gradient.gradient))
            if message.HasField("answer"):
                self.verdicts[message.answer.verdict] += 1
        return [Delivery(message)]


def seen(header: pb.TensorHeader) -> tuple[str, bytes, int]:
    return header.codec, header.prior, header.payload_bytes


def codecs(frames: list[tuple[str, bytes, int]]) -> list[str]:
    """The codecs in order, runs of one counted once."""
    names = [codec for codec, _, _ in frames]
    return [name for i, name in enumerate(names) if not i or names[i - 1] != name]


def named(frames: list[tuple[str, bytes, int]]) -> set[bytes]:
    return {prior for _, prior, _ in frames if prior}


async def held_out(s: Swarm) -> list[float]:
    losses = await s.held_out()
    return [losses[tokens] for tokens in sorted(losses)]


def test_a_sender_fits_a_prior_and_masked_frames_train_the_model(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    tokens = 2 * PRIOR_TOKENS
    wire = {"forward": FORWARD, "backward": BACKWARD, "prior_tokens": tokens}
    spec = masked(
        tiny_model, adapt_text, 60, snapshot={"evaluate": True}, wire=wire, data={"held_out_sequences": 64}
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = frames = Frames()
            s.delay(0.02, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.finished("a0", "a1")
            assert codecs(frames.there) == ["int8", FORWARD]
            # Gradients of frames that were under way come back in between.
            assert codecs(frames.back)[0] == "int8"
            assert codecs(frames.back)[-1] == BACKWARD
            assert len(named(frames.there)) == 1
            assert named(frames.back) == named(frames.there)
            assert frames.verdicts.keys() == {
                pb.Answer.VERDICT_ACCEPTED
            }  # it was brought before it was named
            safe = [size for codec, _, size in frames.there if codec == "int8"]
            small = [size for codec, _, size in frames.there if codec == FORWARD]
            assert len(safe) <= tokens / 64 + 8
            assert max(small) < min(safe) / 2.5
            assert s.counted("priors_fitted", "a0") == s.counted("priors_fetched", "a1") == 1
            assert s.counted("dropped_corrupt") == 0
            losses = await held_out(s)
            assert losses[-1] < losses[0] - 0.25  # dense and this: 0.34
            assert s.account("a0").holds
        added.check()

    run_virtual(main())


@pytest.mark.slow
def test_newcomers_get_the_prior_and_a_restarted_sender_goes_on_with_its_own(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    spec = masked(tiny_model, adapt_text, 90)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = frames = Frames()
            s.delay(0.05, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: named(frames.back) != set())
            s.start("b1", 1)
            await s.until(lambda: s.counted("priors_fetched", "b1") == 1)
            await s.kill("a0")
            s.network.tap = later = Frames()
            s.start("a0", 0)
            await s.until(lambda: len(later.back) > 4)
            assert codecs(later.there) == [FORWARD]
            assert named(later.there) == named(frames.there)
            await s.finished("a0", "a1", "b1")
            assert s.counted("microbatches_added", "b1") > 0
            assert s.counted("microbatches_safe") == 0
            assert s.account("a0").holds
        added.check()

    run_virtual(main())


@pytest.mark.slow
def test_each_sender_has_its_own_prior_and_receivers_keep_them_apart(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = Additions(monkeypatch)
    spec = masked(tiny_model, adapt_text, 50, model={"stages": 3, "cut": [2, 4]})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = frames = Frames()
            names = ["a0", "b0", "a1", "a2"]
            s.delay(0.02, "seed", *names)
            await s.gathered(["a0", "b0"], ["a1"], ["a2"])
            await s.finished(*names)
            assert s.counted("priors_fitted", "a0", "b0", "a1") == 3
            assert len(named(frames.there)) == 3
            assert named(frames.back) == named(frames.there)
            assert s.counted("dropped_corrupt") == 0
        added.check()

    run_virtual(main())


def test_a_replica_that_cannot_get_the_prior_is_sent_safe_frames(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    added = Additions(monkeypatch)
    fetch = StagePeer._fetch_prior
    cut = {"off": True}

    async def fetched(peer: StagePeer, priors: PriorStore, *rest: Any) -> BoundaryPrior:
        if cut["off"]:
            raise NetworkError("cut off")
        return await fetch(peer, priors, *rest)

    monkeypatch.setattr(StagePeer, "_fetch_prior", fetched)
    caplog.set_level(logging.INFO)
    spec = masked(tiny_model, adapt_text, 60)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = frames = Frames()
            s.delay(1.0, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: s.counted("microbatches_safe", "a0") > 3)
            assert frames.verdicts[pb.Answer.VERDICT_NO_PRIOR] > 0
            assert s.counted("offers_no_prior", "a1") > 0
            assert s.counted("priors_fetched", "a1") == 0
            assert codecs(frames.back) == ["int8"]
            cut["off"] = False
            await s.until(lambda: s.counted("priors_fetched", "a1") == 1)
            await s.finished("a0", "a1")
            assert codecs(frames.back)[-1] == BACKWARD
            assert s.account("a0").holds
        added.check()
        said = [record.getMessage() for record in caplog.records]
        assert 0 < said.count("prior_not_fetched") < 20  # not at every offer
        assert "prior_spreads_slowly" in said

    run_virtual(main())


@pytest.mark.slow
def test_what_is_stored_under_a_prior_comes_back_under_it_after_a_change(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender changes to another prior while frames under the first are out: their gradients name the first, and
    count."""
    added = Additions(monkeypatch)
    spec = masked(tiny_model, adapt_text, 80, pipeline={"in_flight": 6})

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.network.tap = frames = Frames()
            s.delay(0.5, "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.until(lambda: len(named(frames.back)) == 1)
            crossing = s.stage_peer("a0").runtime.crossings[0]
            crossing.measure()  # as if the prior were worn
            await s.finished("a0", "a1")
            assert codecs(frames.there) == ["int8", FORWARD, "int8", FORWARD]
            first, second = (frames.there[i][1] for i in turns(frames.there))
            assert first != second
            assert named(frames.back) == {first, second}
            assert Counter(prior for _, prior, _ in frames.back) == Counter(
                prior for _, prior, _ in frames.there[: len(frames.back)]
            )
            assert s.counted("dropped_corrupt") == 0
        added.check()

    run_virtual(main())


def turns(frames: list[tuple[str, bytes, int]]) -> list[int]:
    """Where frames begin to name a prior."""
    return [i for i, (_, prior, _) in enumerate(frames) if prior and not frames[i - 1][1]]
