"""Measuring codecs on a model: real frames at every boundary, both ways, and what they do to loss and gradients.

Each minibatch runs once without codecs and then with each plan; gradients are compared batch by batch, so that memory
holds two of them whatever the number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import process_time

import torch
from torch import Tensor

from meshd.data.microbatch import Microbatch
from meshd.diagnosis.plans import Pair, Plan
from meshd.diagnosis.staged import StagedModel, cosine
from meshd.errors import DataError, MeshdError, MismatchError
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats
from meshd.wire import CodecContext, Frame, codec_named
from meshd.wire.autograd import Boundary

Tell = Callable[[], None]
"""Called after every pass."""


@dataclass(frozen=True)
class Crossed:
    """One direction of one boundary. bytes_per_token: headers and payloads. error: of what arrived against what was
    sent, |difference| / |sent| per token, as the root of its mean square over tokens: each token counts alike, or the
    few whose norm is a hundred times the others' would decide alone."""

    codec: str
    bytes_per_token: float
    error: float


@dataclass(frozen=True)
class BoundaryResult:
    """Both directions of one boundary, and its bytes per token with the token id that goes along."""

    forward: Crossed
    backward: Crossed
    bytes_per_token: float


@dataclass(frozen=True)
class PlanResult:
    """What a plan cost.

    failed: why it gave no numbers (a value that is not finite, in words); then the rest is empty or NaN. loss: mean
    over label tokens, nats. cosine_stages: of each stage's gradient to the uncompressed one of the same minibatch,
    mean over minibatches. cost_share: processor time of the device's halves of encoding and decoding that a stage in
    the middle does, of that of its forward and backward pass (the mean over stages, without recomputation);
    coder_share: of the halves that run in threads beside it (the entropy coder).
    """

    plan: Plan
    failed: str = ""
    loss: float = float("nan")
    boundaries: tuple[BoundaryResult, ...] = ()
    cosine_stages: tuple[float, ...] = ()
    cost_share: float = float("nan")
    coder_share: float = float("nan")

    @property
    def bytes_per_token(self) -> float:
        """Mean over boundaries, both directions and token ids."""
        return _mean([boundary.bytes_per_token for boundary in self.boundaries])

    @property
    def cosine_mean(self) -> float:
        return _mean(self.cosine_stages)

    @property
    def cosine_min(self) -> float:
        return min(self.cosine_stages, default=float("nan"))


@dataclass(frozen=True)
class Measured:
    """Results of all plans, in order. loss: without codecs; pass_s: processor seconds of such a pass."""

    loss: float
    tokens: int
    pass_s: float
    plans: tuple[PlanResult, ...]


class NotFinite(MeshdError):
    """A plan made numbers that are not finite."""


def token_id_bytes(vocabulary: int) -> int:
    """What a token's id counts: 2 bytes, or 4 where a vocabulary has more than 65,536 tokens."""
    return 2 if vocabulary <= 1 << 16 else 4


def fit_priors(
    model: StagedModel, batches: Sequence[Microbatch], features: TokenFeatures, tell: Tell
) -> list[BoundaryPrior]:
    """One prior a boundary, from passes without codecs. Raises DataError for too few tokens."""
    stats = [BoundaryStats(features, model.hidden, seed=number) for number in range(model.boundaries)]
    for batch in batches:
        clean_pass(model, batch, stats)
        model.take_gradients()
        tell()
    return [fit(found, boundary) for boundary, found in enumerate(stats)]


def clean_pass(model: StagedModel, batch: Microbatch, stats: Sequence[BoundaryStats]) -> None:
    """Forward and backward without codecs. stats: by boundary, they count the minibatch in. The parameters have the
    gradient of the mean loss after."""

    def watched(hidden: Tensor, boundary: int) -> Tensor:
        # The hook keeps no reference to `hidden` itself: its graph would wait for the garbage collector.
        seen = hidden.detach()
        _on_gradient(hidden, lambda gradient: stats[boundary].add(seen, gradient, batch.inputs))
        return hidden

    model.loss(batch, watched).backward()  # type: ignore[no-untyped-call]


def measure(
    model: StagedModel,
    batches: Sequence[Microbatch],
    plans: Sequence[Plan],
    priors: Sequence[BoundaryPrior],
    features: TokenFeatures | None,
    tell: Tell,
) -> Measured:
    """Run every plan on all batches. priors: by boundary; empty when no plan needs one.

    Raises DataError when the model alone gives a loss that is not finite.
    """
    trials = [Trial(plan, priors, features) for plan in plans]
    nats, labels, tokens, seconds = 0.0, 0, 0, 0.0
    for number, batch in enumerate(batches):
        began = process_time()
        loss = model.loss(batch, lambda hidden, _: hidden)
        loss.backward()  # type: ignore[no-untyped-call]
        seconds += process_time() - began
        if not bool(torch.isfinite(loss)):
            raise DataError(f"the model's own loss on this text is {loss.item()}. Fix: check its weights")
        nats += loss.item() * batch.label_tokens
        labels += batch.label_tokens
        tokens += batch.inputs.numel()
        clean = model.take_gradients()
        tell()
        for trial in trials:
            trial.run(model, batch, number, clean)
            tell()
    stage_s = seconds / len(model.stages)
    results = tuple(trial.result(labels, stage_s, token_id_bytes(model.vocabulary)) for trial in trials)
    return Measured(nats / labels, tokens, seconds / len(batches), results)


class Trial:
    """One plan on its way through the batches; the loops that hold its rate go on from one to the next."""

    def __init__(self, plan: Plan, priors: Sequence[BoundaryPrior], features: TokenFeatures | None) -> None:
        self._plan = plan
        self._meters = [
            Meter(pair, number, priors[number] if pair.needs_prior else None, features)
            for number, pair in enumerate(plan.pairs)
        ]
        self._nats = 0.0
        self._cosines: list[list[float]] = []
        self._failed = ""

    def run(
        self, model: StagedModel, batch: Microbatch, number: int, clean: Sequence[Sequence[Tensor]]
    ) -> None:
        """One forward and backward pass. number: of the batch, which seeds random masks; clean: gradients by stage."""
        if self._failed:
            return

        def cross(hidden: Tensor, boundary: int) -> Tensor:
            return self._meters[boundary](hidden, batch.inputs, number)

        try:
            loss = model.loss(batch, cross)
            if not bool(torch.isfinite(loss)):
                raise NotFinite(f"the loss is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
        except (NotFinite, MismatchError) as reason:  # the latter: of what was decoded
            self._failed = str(reason)
            model.take_gradients()
            return
        gradients = model.take_gradients()
        self._nats += loss.item() * batch.label_tokens
        self._cosines.append([cosine(a, b) for a, b in zip(gradients, clean, strict=True)])

    def result(self, labels: int, stage_s: float, id_bytes: int) -> PlanResult:
        """labels: tokens of all batches; stage_s: a stage's forward and backward passes over them; id_bytes: of a
        token's id."""
        if self._failed:
            return PlanResult(self._plan, self._failed)
        boundaries = [meter.boundary for meter in self._meters]
        passes_s = stage_s * len(boundaries)
        return PlanResult(
            self._plan,
            loss=self._nats / labels,
            boundaries=tuple(meter.result(id_bytes) for meter in self._meters),
            cosine_stages=tuple(_mean(stage) for stage in zip(*self._cosines, strict=True)),
            cost_share=sum(boundary.device_s for boundary in boundaries) / passes_s,
            coder_share=sum(boundary.coder_s for boundary in boundaries) / passes_s,
        )


@dataclass
class _Sums:
    """What one direction adds up."""

    bytes: int = 0
    tokens: int = 0
    squares: float = 0.0
    compared: int = 0

    def add(self, sent: Tensor, received: Tensor) -> None:
        sent, received = (x.detach().flatten(0, -2).double() for x in (sent, received))
        norm = sent.square().sum(1)
        some = norm > 0  # a token without a gradient has no relative error
        self.squares += float(((received - sent).square().sum(1)[some] / norm[some]).sum())
        self.compared += int(some.sum())
        self.tokens += len(sent)

    def result(self, codec: str) -> Crossed:
        return Crossed(codec, self.bytes / self.tokens, (self.squares / max(1, self.compared)) ** 0.5)


@dataclass(eq=False)
class Meter:
    """One boundary with its codecs, and what they cost so far."""

    pair: Pair
    number: int
    prior: BoundaryPrior | None
    features: TokenFeatures | None
    forward: _Sums = field(default_factory=_Sums)
    backward: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        self.switch(self.pair, self.prior)

    def switch(self, pair: Pair, prior: BoundaryPrior | None) -> None:
        """Go on with other codecs, or with another prior; what was counted stays."""
        if pair != self.pair or not hasattr(self, "boundary"):
            there, back = codec_named(pair.forward), codec_named(pair.backward)
            self.boundary = Boundary(there, back, on_frame=self._count)
        self.pair, self.prior = pair, prior

    def __call__(self, hidden: Tensor, ids: Tensor, seed: int) -> Tensor:
        """What the far side sees of `hidden` (B, T, H). Raises NotFinite, also on the way back."""
        self._check(hidden, "activations")
        context = CodecContext(self.number, "forward", ids, seed, self.prior, self.features)
        received = self.boundary(hidden, context)
        self.forward.add(hidden, received)
        sent: list[Tensor] = []

        def leaves(gradient: Tensor) -> None:
            self._check(gradient, "gradients")
            sent.append(gradient)

        def arrives(gradient: Tensor) -> None:
            self.backward.add(sent.pop(), gradient)

        _on_gradient(received, leaves)
        _on_gradient(hidden, arrives)
        return received

    def _count(self, frame: Frame, context: CodecContext) -> None:
        sums = self.forward if context.direction == "forward" else self.backward
        sums.bytes += frame.header.ByteSize() + len(frame.payload)

    def _check(self, tensor: Tensor, what: str) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise NotFinite(f"{what} at boundary {self.number} are not finite")

    def result(self, id_bytes: int) -> BoundaryResult:
        there, back = self.forward.result(self.pair.forward), self.backward.result(self.pair.backward)
        return BoundaryResult(there, back, there.bytes_per_token + back.bytes_per_token + id_bytes)


def _on_gradient(tensor: Tensor, do: Callable[[Tensor], None]) -> None:
    """Have `do` shown the gradient of `tensor` on its way back."""
    tensor.register_hook(do)  # type: ignore[no-untyped-call]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
