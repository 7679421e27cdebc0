"""Clean passes of an anchor over its copy of the model, and the priors that come of them (DESIGN sections 3 to 5).
Synchronous; it runs in the device's thread."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshd.anchor.worth import Codecs, gain
from meshd.data.microbatch import Microbatch
from meshd.diagnosis.measure import clean_pass
from meshd.diagnosis.staged import StagedModel
from meshd.model.loss import token_loss
from meshd.optim.corrector import decoder_matrix
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.stats import SAMPLES, BoundaryStats
from meshd.priors.weight import WeightPrior, WeightStats

RECENT = 4
"""Microbatches over which a weight's power is a mean."""
KEPT = 0.25
"""Share of a weight's mean clean gradient that a refresh leaves of the one before: gradients of older weights mislead.
Of microbatches at the same weights the mean, and how well they agree, is known from the first refresh on."""


def stats_bytes(hidden: int, rank: int) -> int:
    """Memory of a boundary's statistics. rank: of token features."""
    return 8 * ((hidden + rank + 1) ** 2 + 2 * hidden**2) + SAMPLES * hidden * 2 * 4


class BoundaryMoments:
    """Statistics of one boundary over the last `wanted` tokens or more, at most about twice as many: of two
    generations, the older one goes when the younger one has enough. So priors follow the weights, and none is fitted to
    few tokens."""

    def __init__(
        self, features: TokenFeatures, hidden: int, wanted: int, seed: int, codecs: Codecs | None = None
    ) -> None:
        """codecs: of the boundary; None: every new prior is worth sending."""
        self._codecs = codecs
        # What was made last, and what was published last: the caller's to say.
        self.fresh: BoundaryPrior | None = None
        self.sent: BoundaryPrior | None = None
        self._features, self._hidden, self._wanted, self._seed = features, hidden, wanted, seed
        self._before: BoundaryStats | None = None
        self._generation = 0
        self.now = self._new(None)

    def _new(self, outlier_norm: float | None) -> BoundaryStats:
        self._generation += 1
        seed = self._seed + self._generation
        return BoundaryStats(self._features, self._hidden, seed=seed, outlier_norm=outlier_norm)

    @property
    def lacking(self) -> int:
        """Tokens until there are enough for a first prior; 0: there are."""
        return max(0, self._wanted - self.now.tokens) if self._before is None else 0

    def prior(self, boundary: int, measured: int) -> tuple[BoundaryPrior, float]:
        """The prior of what was seen last, and how many times its error that of the one `sent` last is by now.
        measured: the run's global tokens. Raises DataError for too few tokens."""
        stats = self.now
        if self._before is not None:
            stats = self._new(self._before.outlier_norm)
            stats.merge(self._before)
            stats.merge(self.now)
        made = fit(stats, boundary, measured=measured)
        better = math.inf
        if self.sent is not None and self._codecs is not None:
            better = gain(self.sent, made, self._codecs, self.now.samples(), self._features)
        if self.now.tokens >= self._wanted:
            self._before, self.now = self.now, self._new(self.now.outlier_norm)
        return made, better


class CleanPasses:
    """An anchor's copy of the model and what it has measured with it.

    Each microbatch gives one clean gradient of every corrected weight. Nothing but these weights gets a gradient from
    now on: whoever wants to know which parameters are trained asks the stages before.
    """

    def __init__(
        self,
        model: StagedModel,
        features: TokenFeatures | None,
        device: torch.device,
        *,
        rank: int,
        passes: int,
        boundary_tokens: int,
        seed: int,
        codecs: Sequence[Codecs] = (),
        offload: bool = False,
    ) -> None:
        """features: on any device; None: no boundary priors are wanted. rank: of weight priors; 0: none are wanted.
        passes: of a refresh. boundary_tokens: that a boundary prior is fitted to, at least. codecs: by boundary.
        offload: stages are on the CPU, and on the device only while it is their turn."""
        self._model, self._device, self._offload = model, device, offload
        self._rank, self._generator = rank, torch.Generator().manual_seed(seed)
        self.boundaries: list[BoundaryMoments] = []
        if features is not None:
            there = features.on(device)
            self.boundaries = [
                BoundaryMoments(
                    there,
                    model.hidden,
                    max(model.hidden, boundary_tokens),
                    seed + (n << 32),
                    codecs[n] if codecs else None,
                )
                for n in range(model.boundaries)
            ]
        at = torch.device("cpu") if offload else device
        self._weights: list[dict[str, WeightStats]] = []
        for stage in model.stages:
            corrected = {}
            for name, parameter in stage.named().items():
                wanted = decoder_matrix(name, parameter.shape, stage.family)
                parameter.requires_grad_(wanted)
                if wanted and rank:
                    corrected[name] = WeightStats(
                        parameter.shape, device=at, beta=KEPT ** (1 / passes), recent=RECENT
                    )
            self._weights.append(corrected)

    @property
    def corrected(self) -> list[int]:
        """Stages with weights that weight priors are made of."""
        return [stage for stage, weights in enumerate(self._weights) if weights]

    @property
    def lacking(self) -> int:
        """Tokens until every boundary has enough for its first prior."""
        return max((boundary.lacking for boundary in self.boundaries), default=0)

    def run(self, batch: Microbatch) -> int:
        """One pass, forward and backward. Returns in how many weights the gradient was not finite, and was left out."""
        # Those of a pass that was broken off as well.
        for stage in self._model.stages:
            stage.zero_grad(set_to_none=True)
        there = _on(batch, self._device)
        stats = [boundary.now for boundary in self.boundaries]
        if self._offload:
            offloaded_pass(self._model, there, stats, self._device)
        elif stats:
            clean_pass(self._model, there, stats)
        else:
            torch.autograd.backward(self._model.loss(there, lambda hidden, _: hidden))
        return self._count_in()

    def _count_in(self) -> int:
        skipped = 0
        for stage, weights in zip(self._model.stages, self._weights, strict=True):
            named = stage.named()
            for name, stats in weights.items():
                gradient = named[name].grad
                if gradient is None:
                    continue
                before = stats.skipped
                stats.add(gradient)
                skipped += stats.skipped - before
                named[name].grad = None
        return skipped

    def weight_priors(self, stage: int) -> dict[str, WeightPrior]:
        """By name, of all corrected weights of a stage; empty while one of them was not measured."""
        stats = self._weights[stage]
        if not all(one.count for one in stats.values()):
            return {}
        return {name: one.prior(self._rank, self._generator) for name, one in stats.items()}


def offloaded_pass(
    model: StagedModel, batch: Microbatch, stats: Sequence[BoundaryStats], device: torch.device
) -> None:
    """As `clean_pass`, with one stage at a time on the device: forward keeps what each hop is given, and on the way
    back each hop is computed anew. batch: on the device. Stages, with their gradients, are on the CPU after."""
    route, given = model.route, []
    x = batch.inputs
    with torch.no_grad():
        for hop, stage in route[:-1]:
            given.append(x.cpu())
            x = stage.to(device)(hop, x, batch.document_starts)
            stage.to("cpu")
    given.append(x.cpu())
    gradient: torch.Tensor | None = None
    for (hop, stage), before in zip(reversed(route), reversed(given), strict=True):
        x = before.to(device)
        if hop > 0:
            x.requires_grad_(True)
        out = stage.to(device)(hop, x, batch.document_starts)
        if gradient is None:
            out = token_loss(out, batch.labels, batch.label_mask) / batch.label_tokens
        torch.autograd.backward(out, gradient)
        gradient = x.grad
        if hop > 0 and stats:
            assert gradient is not None
            stats[hop - 1].add(x, gradient, batch.inputs)
        stage.to("cpu")


def _on(batch: Microbatch, device: torch.device) -> Microbatch:
    starts = None if batch.document_starts is None else batch.document_starts.to(device)
    return Microbatch(batch.tokens.to(device), batch.label_mask.to(device), starts)
