"""One run of scripts/benchmarks/quality.py: stages, replicas and anchors in one process, by the product's own classes.

Frames, codecs, priors, correctors, optimizer and gossip are the daemons'; what is left out is the network, and with
it time: a microbatch is at every stage at once, steps follow each other, and what an anchor measures is used a fixed
number of steps later.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gossip_methods import Arm as Averaging
from gossip_methods import Pairs

from meshd.anchor.library import Corrected, Held, chosen, merge
from meshd.anchor.passes import CleanPasses
from meshd.anchor.worth import ENOUGH
from meshd.config.runspec import ResolvedRun
from meshd.data.dataset import Dataset
from meshd.data.microbatch import Microbatch
from meshd.data.stream import TokenStream
from meshd.diagnosis.staged import StagedModel
from meshd.gossip.values import FlatParameters
from meshd.model.families import load_config
from meshd.model.stage import StageModel
from meshd.optim.corrector import Gain
from meshd.peer.resolve import BUNDLES
from meshd.pipeline.crossing import needs_priors
from meshd.pipeline.runtime import Pace, StageRuntime, Work
from meshd.priors import weight_file
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import FEATURES, TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.weight import WeightPrior
from meshd.state.bundle import BundleStore
from meshd.state.stage_state import WEIGHTS
from meshd.wire import Frame, Readied, codec_named, read

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Arm:
    """What one arm does other than the others.

    forward, backward: codecs. anchors: how many; their priors are made every `cadence` steps of so many `passes`, and
    used `delay` steps after they were measured (the first ones, of the base model, at once). liars: how many of the
    anchors publish the opposite of what they measured. corrector, rank, half_life: as in the run spec; rank 0: in full.
    only: steps are made of the anchors' gradients, and nothing else. follow: an anchor takes over a part of so many of
    the weights at each refresh; 1: all. replicas: of every stage, with `averaging` between them; each does its share.
    longer: steps for one of the others, where more tokens are seen.
    """

    name: str
    forward: str = "dense"
    backward: str = "dense"
    anchors: int = 0
    liars: int = 0
    corrector: str = "none"
    rank: int = 32
    cadence: int = 20
    delay: int = 10
    passes: int = 8
    half_life: float = 20.0
    only: bool = False
    follow: int = 1
    replicas: int = 1
    averaging: Averaging | None = None
    longer: float = 1.0

    @property
    def values(self) -> dict[str, object]:
        """As JSON, to tell one arm's rows from another's."""
        return asdict(self)


@dataclass
class Bytes:
    """What crossed. coded: of frames with the arm's own codecs, and the tokens whose state and gradient they are, one
    for each boundary; safe: of those with the safe codec; ids: of token ids; priors: of codec priors, once for each
    boundary that uses one; anchors: what anchors sent and followed."""

    coded: int = 0
    coded_tokens: int = 0
    safe: int = 0
    crossed_tokens: int = 0
    ids: int = 0
    priors: int = 0
    weight_priors: int = 0
    followed: int = 0
    refreshes: int = 0


def alone(name: str, gradient: torch.Tensor, prior: WeightPrior, fade: float) -> tuple[torch.Tensor, Gain]:
    """A corrector: the anchors' mean gradient in place of what the stage has measured itself."""
    mean, norm = prior.mean(), float(gradient.norm())
    return mean.to(gradient.dtype), Gain(norm, prior.mean_norm, 0.0, 0.0, 0.0, True)


class AnchorsAlone(StageRuntime):
    """Steps on the anchors' mean gradients; what has no prior, such as norms, stays as it is."""

    def __init__(self, run: ResolvedRun, model: StageModel, *rest: Any) -> None:
        for parameter in model.trainable().values():
            parameter.requires_grad_(parameter.dim() == 2)
        super().__init__(run, model, *rest)
        self._corrector = alone


class Replica:
    """All stages once."""

    def __init__(
        self,
        arm: Arm,
        run: ResolvedRun,
        models: list[StageModel],
        features: TokenFeatures | None,
        bytes: Bytes,
    ) -> None:
        self._run, self.bytes, self.models = run, bytes, models
        runtime = AnchorsAlone if arm.only else StageRuntime
        self.stages = [runtime(run, model, CPU, features) for model in models]
        self.corrected: list[Corrected] = []
        hops = [(hop.index, stage) for stage in self.stages for hop in stage.model.hops]
        self.route = sorted(hops, key=lambda pair: pair[0])

    def train(self, batch: Microbatch, seed: int, pace: Pace) -> float:
        """One microbatch, there and back. Returns its loss."""
        wire = batch.to_proto(self._run.resolved.vocabulary, seed)
        works: list[tuple[Work, Readied | None]] = []
        readied: Readied | None = None
        prior: BoundaryPrior | None = None
        frame: Frame | None = None
        for hop, stage in self.route[:-1]:
            work = Work(batch, wire, frame, prior)
            works.append((work, readied))
            frame = self._crossed(stage.forward(hop, work, readied).frame(), hop, batch)
            prior = work.onward
            after = Work(batch, wire, frame, prior)
            readied = read(frame, self.route[hop + 1][1].incoming(hop + 1, after))
        hop, stage = self.route[-1]
        loss, returned = stage.head(hop, Work(batch, wire, frame, prior), readied, pace)
        self.corrected += [returned.corrected] if returned.corrected else []
        for (hop, stage), (work, before) in zip(reversed(self.route[:-1]), reversed(works), strict=True):
            assert returned.gradient is not None
            gradient = self._crossed(returned.gradient.frame(), hop, batch)
            returned = stage.backward(hop, work, before, read(gradient, stage.returning(hop, work)), pace)
            self.corrected += [returned.corrected] if returned.corrected else []
            if returned.measured is not None:
                made = fit(returned.measured, hop, measured=pace.global_tokens)
                self.use(made, trial=False)
        self.bytes.ids += 2 * batch.inputs.numel() * (len(self.route) - 1)
        return loss

    def use(self, prior: BoundaryPrior, trial: bool) -> None:
        """Send over a boundary with a prior."""
        self.route[prior.boundary][1].crossings[prior.boundary].use(prior, trial)
        self.bytes.priors += len(prior.to_bytes())

    def _crossed(self, frame: Frame, hop: int, batch: Microbatch) -> Frame:
        """Count what crosses boundary `hop`."""
        size = frame.header.ByteSize() + len(frame.payload)
        wire = self._run.spec.wire
        if frame.header.codec in (wire.forward, wire.backward):
            self.bytes.coded += size
            self.bytes.coded_tokens += batch.inputs.numel()
        else:
            self.bytes.safe += size
        self.bytes.crossed_tokens += batch.inputs.numel()
        return frame


class Anchor:
    """Clean passes on a copy of the weights, and the priors that come of them."""

    def __init__(
        self,
        arm: Arm,
        number: int,
        run: ResolvedRun,
        models: list[StageModel],
        features: TokenFeatures | None,
        data: Dataset,
        bytes: Bytes,
    ) -> None:
        spec = run.spec
        self._arm, self._spec, self._number, self._bytes = arm, spec, number, bytes
        self.lies = number < arm.liars
        pair = codec_named(spec.wire.forward), codec_named(spec.wire.backward)
        self._model = StagedModel(models)
        self.passes = CleanPasses(
            self._model,
            features,
            CPU,
            rank=0 if arm.corrector == "none" and not arm.only else arm.rank or 1 << 20,
            passes=arm.passes,
            boundary_tokens=spec.wire.prior_tokens,
            seed=spec.seed * 100 + number,
            codecs=[pair] * self._model.boundaries,
        )
        self._stream = TokenStream(data, spec.data.microbatch, spec.seed * 1000 + 500 + number)

    def measure(self, version: int, tokens: int) -> tuple[list[BoundaryPrior], list[Held]]:
        """One refresh, at the weights that are here: codec priors that are worth sending, weight priors by stage."""
        done = 0
        while done < self._arm.passes or self.passes.lacking:
            self.passes.run(self._stream.next()[1])
            done += 1
        boundaries = []
        for number, moments in enumerate(self.passes.boundaries):
            prior, better = moments.prior(number, tokens)
            if better >= ENOUGH:
                moments.sent = prior
                boundaries.append(prior)
        counted = self._arm.passes * self._spec.data.microbatch * self._spec.data.seq_len
        helds = [
            Held(f"anchor {self._number}", version, 0.0, counted, self._weight_priors(stage))
            for stage in range(len(self._model.stages))
        ]
        return boundaries, helds

    def _weight_priors(self, stage: int) -> dict[str, WeightPrior]:
        """As they come out of the file that crosses; in full rank they are not sent."""
        priors = self.passes.weight_priors(stage)
        if self.lies:
            priors = {name: _opposite(prior) for name, prior in priors.items()}
        if not priors or not self._arm.rank:
            return priors
        data = weight_file.to_bytes(stage, priors)
        self._bytes.weight_priors += len(data)
        shapes = {name: prior.shape for name, prior in priors.items()}
        return weight_file.from_bytes(data, stage, shapes, self._arm.rank)


def _opposite(prior: WeightPrior) -> WeightPrior:
    return WeightPrior(
        -prior.u, prior.s, prior.v, prior.power, prior.rest, prior.norm, prior.mean_norm, prior.agreement
    )


class Swarm:
    """An arm on its way."""

    def __init__(self, arm: Arm, run: ResolvedRun, folder: Path) -> None:
        self.arm, self._run, self._store = arm, run, BundleStore(folder / BUNDLES)
        self.data = Dataset.open(self._store.path("run/data", "facts.json").parent)
        self._config = load_config(self._store.path("run/tokenizer", "config.json").parent)
        features = None
        if needs_priors(run.spec.wire):
            features = TokenFeatures.load(self._store.path("run/features", FEATURES), run.resolved.vocabulary)
        self.bytes = Bytes()
        self.replicas = [Replica(arm, run, self._base(), features, self.bytes) for _ in range(arm.replicas)]
        # Of the seed alone: the same text in the same order for all arms.
        self._stream = TokenStream(self.data, run.spec.data.microbatch, run.spec.seed)
        self.tokens = self.microbatches = self.steps = 0
        self._copies = [self._base() for _ in range(arm.anchors)]
        self._anchors = [
            Anchor(arm, number, run, models, features, self.data, self.bytes)
            for number, models in enumerate(self._copies)
        ]
        self._pairs = self._gossip() if arm.averaging is not None else []
        self._due: list[tuple[int, list[BoundaryPrior], list[list[Held]]]] = []
        self._held: list[dict[str, Held]] = [{} for _ in range(run.stages)]
        self._used: list[tuple[Held, ...]] = [() for _ in range(run.stages)]

    def _base(self) -> list[StageModel]:
        resolved, models = self._run.resolved, []
        for number in range(self._run.stages):
            model = StageModel(self._config, resolved.cut, resolved.tied, number)
            model.load(self._store.path(f"base/{number}", WEIGHTS), CPU)
            models.append(model)
        return models

    def _gossip(self) -> list[Pairs]:
        assert self.arm.averaging is not None
        out = []
        for stage, model in enumerate(self._base()):
            base = {name: p.detach() for name, p in model.trainable().items()}
            flats = [FlatParameters(r.models[stage].trainable(), base) for r in self.replicas]
            out.append(Pairs(flats, self.arm.averaging, self._run.spec.seed * 100 + stage))
        return out

    @property
    def averaged_bytes(self) -> int:
        """Sent by all replicas together to average."""
        return sum(pairs.bytes_sent for pairs in self._pairs)

    @property
    def trained(self) -> int:
        """Values that are trained, of one replica."""
        return sum(p.numel() for model in self.replicas[0].models for p in model.trainable().values())

    @property
    def corrected(self) -> list[Corrected]:
        """Of all steps of all stages."""
        return [each for replica in self.replicas for each in replica.corrected]

    def step(self) -> float:
        """One inner step of every replica. Returns the mean training loss."""
        if self.arm.anchors and self.steps % self.arm.cadence == 0:
            self._refresh()
        self._apply()
        stepped = [replica.stages[0].version for replica in self.replicas]
        losses = []
        while any(r.stages[0].version == v for r, v in zip(self.replicas, stepped, strict=True)):
            for replica in self.replicas:
                batch, seed = self._stream.next()[1], self._run.spec.seed * 1_000_003 + self.microbatches
                losses.append(replica.train(batch, seed, Pace(self.tokens, self.arm.replicas, 0.0)))
                self.microbatches += 1
                self.tokens += batch.label_tokens
        self.steps += 1
        for pairs in self._pairs:
            pairs.stepped(self.steps)
        return math.fsum(losses) / len(losses)

    def _refresh(self) -> None:
        """Anchors follow the first replica and measure; what they find is on its way."""
        boundaries: list[BoundaryPrior] = []
        weights: list[list[Held]] = []
        for anchor, models in zip(self._anchors, self._copies, strict=True):
            self._follow(models)
            found, helds = anchor.measure(self.steps, self.tokens)
            boundaries += found
            weights.append(helds)
        self.bytes.refreshes += 1
        self._due.append((self.steps + (self.arm.delay if self.steps else 0), boundaries, weights))

    @torch.no_grad()
    def _follow(self, models: list[StageModel]) -> None:
        """Take over the values of a part that moves on from refresh to refresh, as if they crossed in bf16."""
        part, parts = (self.steps // self.arm.cadence) % self.arm.follow, self.arm.follow
        for copy, model in zip(models, self.replicas[0].models, strict=True):
            here = copy.named()
            for name, parameter in model.trainable().items() if self.steps else ():
                here[name].view(-1)[part::parts] = parameter.view(-1)[part::parts]
                self.bytes.followed += 2 * (parameter.numel() // parts)

    def _apply(self) -> None:
        """Use what has arrived."""
        for _, boundaries, weights in [due for due in self._due if due[0] <= self.steps]:
            newest = {
                prior.boundary: prior
                for prior in sorted(boundaries, key=lambda prior: (prior.measured, prior.name))
            }
            for replica in self.replicas:
                for prior in newest.values():
                    replica.use(prior, trial=True)
            for stage, held in (
                (s, held) for helds in weights for s, held in enumerate(helds) if held.priors
            ):
                self._held[stage][held.author] = held
        self._due = [due for due in self._due if due[0] > self.steps]
        spec = self._run.spec.anchors
        for stage, library in enumerate(self._held):
            of = chosen(list(library.values()), spec, self.steps, 0.0)
            if of == self._used[stage]:
                continue
            self._used[stage] = of
            correction = merge(of, spec, self.steps, CPU) if of else None
            for replica in self.replicas:
                replica.stages[stage].correction = correction

    @torch.no_grad()
    def loss(self, batches: Iterable[Microbatch]) -> float:
        """Of what would be exported, the mean of the replicas, without codecs: nats, mean over label tokens."""
        models = self.replicas[0].models if len(self.replicas) == 1 else self._mean()
        staged, nats, tokens = StagedModel(models), 0.0, 0
        for batch in batches:
            nats += staged.loss(batch, lambda hidden, _: hidden).item() * batch.label_tokens
            tokens += batch.label_tokens
        for model in models:
            model.train()
        return nats / tokens

    def load(self, checkpoint: Path) -> None:
        """Take over the weights of an exported checkpoint."""
        for model in self.replicas[0].models:
            model.load(checkpoint, CPU)

    def _mean(self) -> list[StageModel]:
        means = self._base()
        for number, mean in enumerate(means):
            same = [replica.models[number].named() for replica in self.replicas]
            for name, parameter in mean.named().items():
                parameter.copy_(torch.stack([named[name] for named in same]).mean(0))
        return means
