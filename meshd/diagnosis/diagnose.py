"""From a run spec to measured codecs: model, text, priors, plans."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from transformers import PreTrainedConfig

from meshd.config.runspec import RunSpec
from meshd.data.dataset import Dataset
from meshd.data.microbatch import Microbatch
from meshd.diagnosis.measure import Measured, fit_priors, measure, token_id_bytes
from meshd.diagnosis.plans import Plan, parse_plan, reference_plans, spec_plan
from meshd.diagnosis.staged import StagedModel
from meshd.errors import ConfigError, ResourceError
from meshd.model.cut import Tied, hops
from meshd.model.families import check_seq_len, load_config, resolve_tied
from meshd.model.sources import resolve_source
from meshd.model.weights import memory_estimate
from meshd.peer.cgroup import cgroup_room
from meshd.peer.resolve import cut_of, tokenize
from meshd.priors.features import RANK, TokenFeatures

Progress = Callable[[str, int, int], None]
"""What is done, how much of it is, and of how much."""


@dataclass(frozen=True)
class Effort:
    """batches: microbatches of held-out documents that are measured; fit: of training documents, for the priors.
    rank: token features."""

    batches: int = 4
    fit: int = 16
    rank: int = RANK


@dataclass(frozen=True)
class Case:
    """A run spec with what is known before weights and text are read."""

    spec: RunSpec
    model_dir: Path
    config: PreTrainedConfig
    cut: list[int]
    tied: Tied

    @classmethod
    def of(cls, spec: RunSpec) -> Case:
        """Fetches the model where it must. Raises ConfigError, also for a model that is not cut at all."""
        if spec.model.stages < 2:
            raise ConfigError(
                "model.stages", spec.model.stages, "nothing crosses between stages", "use at least 2 stages"
            )
        model_dir = resolve_source(spec.model.source, spec.model.revision)
        config = load_config(model_dir)
        check_seq_len(config, spec.data.seq_len)
        tied = resolve_tied(config, spec.model.tied)
        return cls(spec, model_dir, config, cut_of(spec, config, tied), tied)

    @property
    def hidden(self) -> int:
        return int(self.config.hidden_size)

    @property
    def boundaries(self) -> int:
        """Places where a hidden state crosses: one more with a ring."""
        return len(hops(self.config.num_hidden_layers, self.cut, self.tied)) - 1

    def needed_bytes(self) -> int:
        """Memory for all weights, two gradients and the activations of one minibatch, about."""
        data, total = self.spec.data, 0
        for stage in range(len(self.cut) + 1):
            part = memory_estimate(self.config, self.cut, self.tied, stage, data.microbatch, data.seq_len)
            total += part.weights + 2 * part.gradients + part.activations
        return total

    def plans(self, codecs: Sequence[str]) -> list[Plan]:
        """What `--codec` names, once each; without any, the run spec's codecs and references. Raises ConfigError."""
        if codecs:
            plans = [parse_plan(text, self.boundaries) for text in codecs]
        else:
            data = self.spec.data
            id_bytes = token_id_bytes(self.config.vocab_size)
            plans = [
                spec_plan(self.spec.wire, self.boundaries),
                *reference_plans(data.microbatch, data.seq_len, self.hidden, id_bytes, self.boundaries),
            ]
        first: dict[object, Plan] = {}
        for plan in plans:
            first.setdefault(plan.pairs, plan)
        return list(first.values())


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and of what. fit_tokens: that priors were fitted on; prior_bytes: of each boundary's prior.
    Both are empty when no codec needed priors."""

    case: Case
    fit_tokens: int
    prior_bytes: tuple[int, ...]
    measured: Measured

    def ratio(self, bytes_per_token: float) -> float:
        """How many times fewer bytes than bf16 values alone, both directions."""
        return 4 * self.case.hidden / bytes_per_token


def diagnose(case: Case, plans: Sequence[Plan], effort: Effort, progress: Progress) -> Diagnosis:
    """Measure plans on the model and text of a run spec. Blocks, for minutes.

    Priors are fitted on training documents, everything is measured on held-out ones. Codecs that need priors are
    taken, whatever a run accepts. Raises ConfigError, DataError, MismatchError or ResourceError as the spec gives
    cause.
    """
    needs_prior = any(plan.needs_prior for plan in plans)
    check_memory(case.needed_bytes(), _free_bytes())
    progress("reading text and model", 0, 0)
    train, held_out = _text(case, effort.batches, effort.fit if needs_prior else 0)
    model = StagedModel.load(case.model_dir, case.config, case.cut, case.tied)

    def counting(what: str, total: int) -> Callable[[], None]:
        done = 0

        def tell() -> None:
            nonlocal done
            done += 1
            progress(what, done, total)

        progress(what, 0, total)
        return tell

    features, priors = None, []
    if needs_prior:
        features = TokenFeatures.from_embedding(model.embedding, effort.rank)
        priors = fit_priors(model, train, features, counting("fitting priors", len(train)))
    passes = len(held_out) * (1 + len(plans))
    measured = measure(model, held_out, plans, priors, features, counting("measuring", passes))
    return Diagnosis(
        case=case,
        fit_tokens=sum(batch.inputs.numel() for batch in train),
        prior_bytes=tuple(len(prior.to_bytes()) for prior in priors),
        measured=measured,
    )


def _text(case: Case, batches: int, fit: int) -> tuple[list[Microbatch], list[Microbatch]]:
    """At most `fit` microbatches of training text, at random, and `batches` of held-out text, evenly spread; fewer
    where the text is shorter. Raises ConfigError where `fit` is too few for a prior."""
    spec, hidden = case.spec, case.hidden
    rows, tokens = spec.data.microbatch, spec.data.microbatch * spec.data.seq_len
    if 0 < fit * tokens < hidden:
        raise ConfigError(
            "--fit",
            fit,
            f"{fit * tokens} tokens are too few for priors of {hidden} hidden values",
            f"at least {-(-2 * hidden // tokens)}, better many more",
        )
    try:
        made = tempfile.TemporaryDirectory(prefix="meshd-codec-")
    except OSError as error:
        raise ResourceError(f"no folder for the tokenized text: {error}. Fix: set TMPDIR to one") from None
    with made as folder:
        tokenize(spec, case.model_dir, case.config, Path(folder))
        dataset = Dataset.open(Path(folder))
        order = np.random.default_rng(spec.seed).permutation(dataset.train_windows)[: fit * rows]
        train = [dataset.train(order[start : start + rows]) for start in range(0, len(order), rows)]
        # Whole microbatches where there is one: the rest would be filled with padding.
        whole = max(1, min(batches, dataset.held_out_windows // rows))
        held_out = list(dataset.held_out_batches(rows, whole * rows))
    return train, held_out


def check_memory(needed: int, free: int) -> None:
    """Refuse what the machine would have to kill. Both in bytes. Raises ResourceError."""
    if needed > free:
        raise ResourceError(
            f"weights, gradients and activations take about {needed / 1e9:.1f} GB in one process, {free / 1e9:.1f} GB "
            "of memory are free. Fix: a smaller data.microbatch or data.seq_len, another model, or a larger machine"
        )


def _free_bytes() -> int:
    room = cgroup_room()
    free: int = psutil.virtual_memory().available
    return free if room is None else min(free, room.free)
