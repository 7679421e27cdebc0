"""The arithmetic of one stage: forward, recomputed backward, the inner step, evaluation. Synchronous and without
sockets: it runs in the device's thread (`meshd.pipeline.worker`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from meshd.anchor.library import Corrected, Correction, Corrections
from meshd.config.runspec import ResolvedRun
from meshd.data.microbatch import Microbatch
from meshd.errors import MeshdError, MismatchError
from meshd.model.loss import token_loss
from meshd.model.stage import StageModel, check_shapes
from meshd.observe.trace import Tracer
from meshd.optim.corrector import corrector_named, decoder_matrix
from meshd.optim.inner import InnerOptimizer, StepReport
from meshd.optim.schedule import StepGate, learning_rate
from meshd.pipeline import heap
from meshd.pipeline.crossing import Crossing, needs_priors
from meshd.pipeline.exhaustion import out_of_memory
from meshd.pipeline.keeping import Keeping
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.stats import BoundaryStats
from meshd.proto import meshd_pb2 as pb
from meshd.wire import CodecContext, Draft, Frame, Readied, codec_named

# Evaluation crosses boundaries without loss, so that it is the loss of the exported model.
EVALUATION_CODEC = "dense32"

# Changes whenever a step, an exchange or a snapshot has changed the weights.
Mark = tuple[int, int]


class StaleMicrobatch(MeshdError):
    """Its weights are more than `max_lag` steps old on its way back."""


class NonFinite(MeshdError):
    """A loss or gradient is NaN or infinite."""


@dataclass
class Work:
    """What a stage keeps of a microbatch between forward and backward: its encoded input, not its activations.

    wire: the batch as it crosses, sent on as it came. frame: None at the hop that embeds. prior: the one that the frame
    names; its gradient goes back with the same. onward: the one that the output was encoded with. version: weight
    version of the forward pass. graph: input and output with their autograd graph, and the mark of the weights it is
    of; only when the run spec switches recomputation off.
    """

    batch: Microbatch
    wire: pb.Batch
    frame: Frame | None
    prior: BoundaryPrior | None = None
    onward: BoundaryPrior | None = None
    version: int = 0
    graph: tuple[torch.Tensor, torch.Tensor, Mark] | None = field(default=None, repr=False)

    @property
    def seed(self) -> int:
        """Of dropout and masks, the same at every hop and attempt."""
        return self.wire.seed


@dataclass(frozen=True)
class Pace:
    """What the swarm looked like when a gradient was added: it decides whether and how far to step.

    time: seconds since the epoch. Left out, whatever is dated is too old.
    """

    global_tokens: int
    live_replicas: int
    time: float = math.inf


@dataclass(frozen=True)
class Returned:
    """Result of a backward pass. gradient: for the previous hop, None at the hop that embeds. addition: its number
    (`meshd.pipeline.keeping`). measured: enough of what
    crosses the boundary behind this hop for a prior of it, if it has become enough with this pass. corrected: what the
    step was corrected with; None without a step, or without a correction."""

    gradient: Draft | None
    step: StepReport | None
    addition: int
    measured: BoundaryStats | None = None
    corrected: Corrected | None = None


class StageRuntime:
    """One stage's model and optimizer, and what is done with them.

    What comes in has been through the CPU half of decoding (`incoming` and `returning` say with which context), what
    goes out is still to go through that of encoding.
    """

    def __init__(
        self, run: ResolvedRun, model: StageModel, device: torch.device, features: TokenFeatures | None = None
    ) -> None:
        """features: of the run's vocabulary; only runs without boundary priors can do without."""
        self.run, self.model, self.device = run, model, device
        wire, hidden = run.spec.wire, run.resolved.hidden
        assert features is not None or not needs_priors(wire)
        self.features = None if features is None else features.on(device)
        ends = [hop.index for hop in model.hops if not hop.head] + [
            hop.index - 1 for hop in model.hops if not hop.embed
        ]
        self.crossings = {n: Crossing(n, wire, self.features, hidden) for n in ends}
        self.optimizer = InnerOptimizer(model.trainable(), run.spec.optim)
        self.version = 0
        self.keeping = Keeping()
        self.finished = False
        self.correction: Correction | None = None
        """What the next steps are corrected with. Swapped by whoever merges priors, at any time and in any thread."""
        self.tracer = Tracer()
        """Off, unless whoever drives the stage gives another."""
        self._corrector = corrector_named(run.spec.anchors.corrector)
        self._gate = StepGate(run.spec.batch_tokens)
        # With a ring, stage 0 sees a microbatch's gradient twice; its tokens count once, when they come back last.
        self.counting_hop = min(hop.index for hop in model.hops)
        model.train()

    def corrected_weights(self) -> dict[str, torch.Size]:
        """Shapes of the weights whose gradients are corrected, by name; empty where the run corrects none."""
        if self._corrector is None:
            return {}
        family = self.model.family
        shapes = {name: parameter.shape for name, parameter in self.model.trainable().items()}
        return {name: shape for name, shape in shapes.items() if decoder_matrix(name, shape, family)}

    def incoming(self, hop: int, work: Work) -> CodecContext:
        """What is known of the hidden state that the hop is given."""
        ids, seed = work.batch.inputs, work.seed
        return CodecContext(hop - 1, "forward", ids, seed, work.prior, self.features)

    def returning(self, hop: int, work: Work) -> CodecContext:
        """What is known of the gradient that comes back to the hop."""
        return replace(self._outgoing(hop, work), direction="backward")

    def _outgoing(self, hop: int, work: Work) -> CodecContext:
        return CodecContext(hop, "forward", work.batch.inputs, work.seed, work.onward, self.features)

    def forward(self, hop: int, work: Work, hidden: Readied | None, safe: bool = False) -> Draft:
        """Output of a hop that is not the head, for the next one. safe: without a prior.

        Raises NonFinite when the output is not (the next hop could only call it corrupt, and have it sent again).
        """
        work.version = self.version
        keep = not self.run.spec.pipeline.recompute
        # Without a graph nothing that is made on the way lasts.
        with torch.set_grad_enabled(keep), nullcontext() if keep else heap.reusing():
            x, out = self._compute(hop, work, hidden, keep)
        if not bool(torch.isfinite(out).all()):
            raise NonFinite(f"the output of hop {hop} is not finite")
        if keep:
            work.graph = (x, out, self._mark())
        crossing, out = self.crossings[hop], out.detach()
        work.onward = None if safe else crossing.prior
        context = self._outgoing(hop, work)
        draft = crossing.draft(out, context)
        crossing.check(draft, out, context)
        return draft

    def head(self, hop: int, work: Work, hidden: Readied | None, pace: Pace) -> tuple[float, Returned]:
        """Loss and the way back of the hop with the head, in one. Loss: mean over label tokens, nats.

        Raises NonFinite before anything is added.
        """
        work.version = self.version
        x, logits = self._compute(hop, work, hidden, True)
        total = token_loss(logits, work.batch.labels.to(self.device), work.batch.label_mask.to(self.device))
        loss = total.item() / work.batch.label_tokens
        if not torch.isfinite(total):
            raise NonFinite(f"the loss is {loss}")
        with self._adding():
            self._propagate(total, None)
            return loss, self._added(hop, work, hidden, x, pace)

    def backward(
        self, hop: int, work: Work, hidden: Readied | None, gradient: Readied, pace: Pace
    ) -> Returned:
        """Recompute the hop, back-propagate, add; step when this replica's share is full.

        Raises StaleMicrobatch or NonFinite (nothing is added), MismatchError when the gradient does not decode.
        """
        lag = self.version - work.version
        if lag > self.run.spec.optim.max_lag:
            raise StaleMicrobatch(f"{lag} steps old, max_lag is {self.run.spec.optim.max_lag}")
        incoming = gradient.tensor(self.device)
        graph, work.graph = work.graph, None
        if graph is not None and graph[2] == self._mark():
            x, out, _ = graph
        else:
            # A kept graph refers to the weights in place: once they have changed it is no function's gradient.
            x, out = self._compute(hop, work, hidden, True)
        crossing, measured = self.crossings[hop], None
        if work.onward is None:
            measured = crossing.learn(out, incoming, work.batch.inputs)
        incoming = crossing.adjoint(incoming.to(out.dtype), self._outgoing(hop, work))
        # Frames carry the gradient of the mean loss; the accumulator holds sums over label tokens.
        summed = incoming * work.batch.label_tokens
        with self._adding():
            self._propagate(out, summed)
            return replace(self._added(hop, work, hidden, x, pace), measured=measured)

    def _propagate(self, out: torch.Tensor, gradient: torch.Tensor | None) -> None:
        # The first pass makes the parameters' gradients, which stay; the others make only what is soon freed.
        lasting = any(parameter.grad is None for parameter in self.model.trainable().values())
        with nullcontext() if lasting else heap.reusing():
            torch.autograd.backward(out, gradient)

    def _mark(self) -> Mark:
        # torch counts changes in place, but not those of the fused optimizer.
        return self.version, sum(p._version for p in self.model.parameters())

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Around a backward pass and what follows it. Where memory runs out in it, some parameters hold the gradient of
        a microbatch that goes elsewhere: it cannot be told from those added before, and is thrown away with them."""
        try:
            yield
        except Exception as error:
            if out_of_memory(error) is not None:
                error.add_note(f"{self.optimizer.discard()} accumulated tokens thrown away with it")
            raise

    def _added(self, hop: int, work: Work, hidden: Readied | None, x: torch.Tensor, pace: Pace) -> Returned:
        draft = None
        if hidden is not None:
            assert x.grad is not None
            outgoing = x.grad / work.batch.label_tokens
            if not bool(torch.isfinite(outgoing).all()):
                # The parameters' gradients are poisoned with it, and cannot be told from those added before.
                lost = self.optimizer.discard()
                raise NonFinite(f"the gradient is not finite; {lost} accumulated tokens thrown away with it")
            outliers = hidden.codec.outliers(hidden.quantized)
            context = replace(self.incoming(hop, work), direction="backward", outliers=outliers)
            draft = self.crossings[hop - 1].draft(outgoing, context)
        self.keeping.added += 1
        step = corrected = None
        if hop == self.counting_hop and not self.finished:
            tokens = work.batch.label_tokens
            self.optimizer.added(tokens)
            if self._gate.add(tokens, pace.live_replicas):
                # In a lane of its own beside the job that it is a part of.
                with self.tracer.phase("inner step", "step"):
                    step, corrected = self._step(pace)
        return Returned(draft, step, self.keeping.added, corrected=corrected)

    def _step(self, pace: Pace) -> tuple[StepReport, Corrected | None]:
        spec = self.run.spec
        lr = learning_rate(spec.optim, pace.global_tokens // spec.batch_tokens, spec.total_steps)
        corrections, corrected = self._corrections(pace.time), None
        if corrections is None:
            report = self.optimizer.step(lr)
        else:
            report = self.optimizer.step(lr, corrections.correct)
            corrected = corrections.report(self.version, pace.time)
        self.version += not report.skipped
        # Skipped ones as well: their gradient was not finite, and is thrown away.
        self.keeping.stepped = self.keeping.added
        if self.device.type == "cpu":
            heap.give_back()
        return report, corrected

    def _corrections(self, now: float) -> Corrections | None:
        """Of the step that is due; None where there is no prior within its bounds."""
        correction = self.correction  # one reference: it may be swapped meanwhile
        if self._corrector is None or correction is None:
            return None
        strength = correction.fade(self.run.spec.anchors, self.version, now)
        return Corrections(self._corrector, correction, strength) if strength > 0 else None

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over parameters by whole-model names; the optimizer's moments stay.

        Raises MismatchError for another shape or a value that is not finite, before anything is changed (C07, C27).
        """
        parameters = self.model.trainable()
        found = {name: tensor.shape for name, tensor in weights.items()}
        check_shapes({name: p.shape for name, p in parameters.items()}, found, f"stage {self.model.stage}")
        for name in parameters:
            if not bool(torch.isfinite(weights[name]).all()):
                raise MismatchError(f"the weights of {name} hold values that are not finite")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def finish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over the run's result. From now on microbatches still pass, but nothing is learnt from them."""
        self.adopt(weights)
        self.finished = True
        self.keeping.stepped = self.keeping.added

    @torch.no_grad()
    def forward_frozen(self, hop: int, work: Work, hidden: Readied | None, model: StageModel) -> Draft:
        """Output of one hop of an evaluation with a frozen `model`, for the next hop."""
        out = model(hop, self._input(work, hidden), self._starts(work))
        codec = codec_named(EVALUATION_CODEC)
        return Draft(codec, codec.quantize(out, self._outgoing(hop, work)))

    @torch.no_grad()
    def score(self, hop: int, work: Work, hidden: Readied | None, model: StageModel) -> tuple[float, int]:
        """The hop with the head of an evaluation: (summed loss in nats, label tokens)."""
        out = model(hop, self._input(work, hidden), self._starts(work))
        labels, mask = work.batch.labels.to(self.device), work.batch.label_mask.to(self.device)
        return token_loss(out, labels, mask).item(), work.batch.label_tokens

    def _compute(
        self, hop: int, work: Work, hidden: Readied | None, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._input(work, hidden)
        if gradient and hidden is not None:
            x.requires_grad_(True)
        # Forward and its recomputation must draw the same dropout (DESIGN section 2.7).
        torch.manual_seed((work.seed + hop * 0x9E3779B97F4A7C15) % 2**63)
        return x, self.model(hop, x, self._starts(work))

    def _input(self, work: Work, hidden: Readied | None) -> torch.Tensor:
        if hidden is None:
            return work.batch.inputs.to(self.device)
        return hidden.tensor(self.device).to(self.model.dtype)  # the header's dtype is the sender's

    def _starts(self, work: Work) -> torch.Tensor | None:
        starts = work.batch.document_starts
        return None if starts is None else starts.to(self.device)
