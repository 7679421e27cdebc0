"""What a local swarm leaves behind: numbers (JSON), a plot of the loss (PNG), a sample before and after."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from meshd.errors import MeshdError
from meshd.observe.status import duration
from meshd.proto import meshd_pb2 as pb


@dataclass(frozen=True)
class Point:
    """A loss (nats per label token) at a count of globally committed label tokens."""

    tokens: int
    loss: float


@dataclass(frozen=True)
class SwarmReport:
    """A finished run.

    tokens: globally committed label tokens. elapsed_s: from start to the end of training, preparation included.
    tokens_per_s: while training, between the first and the last loss; 0 when there are fewer than two. before, after:
    held-out loss of the base model and of the last snapshot; None where it was not evaluated.
    """

    run_name: str
    run_id: str
    tokens: int
    elapsed_s: float
    tokens_per_s: float
    before: float | None
    after: float | None
    losses: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    checkpoint: str
    restarts: int

    @classmethod
    def of(cls, status: pb.StatusReply, elapsed_s: float, restarts: int, checkpoint: Path) -> SwarmReport:
        """The report of a run whose seed said `status` last. Pure."""
        losses = sorted(status.losses, key=lambda point: point.tokens)
        evaluations = sorted(status.evaluations, key=lambda point: point.tokens)
        span = losses[-1].time - losses[0].time if losses else 0.0
        trained = [point for point in evaluations if point.tokens > 0]
        return cls(
            run_name=status.run_name,
            run_id=status.run_id,
            tokens=status.global_tokens,
            elapsed_s=elapsed_s,
            tokens_per_s=(losses[-1].tokens - losses[0].tokens) / span if span > 0 else 0.0,
            before=evaluations[0].loss if evaluations and evaluations[0].tokens == 0 else None,
            after=trained[-1].loss if trained else None,
            losses=tuple(Point(point.tokens, point.loss) for point in losses),
            evaluations=tuple(Point(point.tokens, point.loss) for point in evaluations),
            checkpoint=str(checkpoint),
            restarts=restarts,
        )

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def summary(self) -> str:
        """The result in a few lines for people."""
        lines = [
            f"run         {self.run_name} ({self.run_id[:12]})",
            f"trained on  {self.tokens:,} tokens in {duration(self.elapsed_s)} ({self.tokens_per_s:,.0f} tokens/s)",
            f"held-out    {_loss(self.before)} before, {_loss(self.after)} after{self._change()}",
        ]
        if self.restarts:
            lines.append(f"restarts    {self.restarts} (see the logs)")
        return "\n".join([*lines, f"checkpoint  {self.checkpoint}"])

    def _change(self) -> str:
        if self.before is None or self.after is None:
            return ""
        return f" ({self.after - self.before:+.3f} nats per token)"


def _loss(value: float | None) -> str:
    return "not evaluated" if value is None else f"{value:.4f}"


def smoothed(points: tuple[Point, ...], window: int) -> list[Point]:
    """Mean of each point and up to `window` - 1 before it. Pure."""
    result = []
    total = 0.0
    for index, point in enumerate(points):
        total += point.loss
        if index >= window:
            total -= points[index - window].loss
        result.append(Point(point.tokens, total / min(window, index + 1)))
    return result


def plot(report: SwarmReport, path: Path) -> None:
    """Training and held-out loss over tokens, as PNG. Raises MeshdError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MeshdError("no plot: matplotlib is not installed (pip install 'meshd[plot]')") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = [point.tokens for point in report.losses]
    axes.plot(tokens, [point.loss for point in report.losses], color="tab:blue", alpha=0.25, linewidth=1)
    smooth = smoothed(report.losses, max(1, len(report.losses) // 20))
    axes.plot(tokens, [point.loss for point in smooth], color="tab:blue", label="training (running mean)")
    if report.evaluations:
        axes.plot(
            [point.tokens for point in report.evaluations],
            [point.loss for point in report.evaluations],
            color="tab:orange",
            marker="o",
            label="held-out",
        )
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(f"{report.run_name} ({report.run_id[:12]})")
    axes.grid(alpha=0.3)
    if tokens or report.evaluations:
        axes.legend()
    figure.savefig(path, dpi=120)


def continuation(model: Path, prompt: str, tokens: int = 48) -> str:
    """What the model in directory `model` writes after `prompt`, greedily; the prompt not included.

    Takes the memory of the whole model and some seconds: not on the event loop.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        output = network.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id or 0
        )
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
