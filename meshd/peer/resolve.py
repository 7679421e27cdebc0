"""From a run spec to a run: what the operator's peer measures, hashes and keeps for others, before anyone joins.

Blocking (minutes for a large model): runs in a thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from pydantic import ValidationError
from transformers import AutoTokenizer, PreTrainedConfig

from meshd.config.runspec import Resolved, ResolvedRun, RunSpec
from meshd.data.build import build_dataset
from meshd.errors import ConfigError, DataError, MeshdError
from meshd.model.cost import measure_costs
from meshd.model.cut import Tied, check_cut, check_stages
from meshd.model.export import tokenizer_files
from meshd.model.families import check_seq_len, family_of, load_config, resolve_tied
from meshd.model.sources import resolve_source
from meshd.model.tensors import TensorFiles
from meshd.model.weights import write_base
from meshd.observe.log import event
from meshd.optim.corrector import corrector_named
from meshd.priors.features import FEATURES, TokenFeatures
from meshd.state.bundle import BundleStore
from meshd.state.disk import disk_faults, write_synced
from meshd.state.stage_state import WEIGHTS
from meshd.wire import codec_named

log = logging.getLogger(__name__)

RESOLVED = "run.json"
BUNDLES = "bundles"


def run_directory(state_dir: Path, run_id: str) -> Path:
    """Where a peer keeps what belongs to one run."""
    return state_dir / "runs" / run_id[:16]


def load_run(directory: Path) -> ResolvedRun | None:
    """The run that a directory belongs to; None when it holds none. Raises DataError when it is damaged."""
    path = directory / RESOLVED
    if not path.exists():
        return None
    try:
        return ResolvedRun.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{path} is damaged or of another version ({where}: {first['msg']}). Fix: move {directory} away; what it "
            "holds is fetched or made again"
        ) from error


def save_run(directory: Path, run: ResolvedRun) -> None:
    """Keep the run spec in its directory, whole or not at all. Raises ResourceError."""
    draft = directory / f"{RESOLVED}.new"
    with disk_faults(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_synced(draft, run.canonical())
        os.replace(draft, directory / RESOLVED)


def check_spec(spec: RunSpec) -> None:
    """What a run spec alone cannot know is wrong with it: names of codecs and corrector, bounds between tables.

    Raises ConfigError.
    """
    boundaries = {"wire": spec.wire, **{f"wire.boundary.{n}": b for n, b in spec.wire.boundary.items()}}
    for field, boundary in boundaries.items():
        for direction, name in (("forward", boundary.forward), ("backward", boundary.backward)):
            codec_named(name, f"{field}.{direction}")
    corrector_named(spec.anchors.corrector, "anchors.corrector")
    if spec.optim.inner_batch < spec.data.microbatch:
        raise ConfigError(
            "optim.inner_batch",
            spec.optim.inner_batch,
            f"an inner step cannot be smaller than one microbatch of {spec.data.microbatch} sequences",
            f"use at least {spec.data.microbatch}, or a smaller data.microbatch",
        )


def resolve(spec: RunSpec, state_dir: Path, operator: str) -> tuple[ResolvedRun, Path]:
    """The run of a spec and its directory, made now or found from an earlier start with the same spec.

    Fetches the model, measures the cut if none is given, tokenizes the corpus, and writes the bundles that joiners
    ask for; of a run that was found, again, when a crash or the disk has damaged one. Where that cannot be, since model
    or corpus are out of reach or have changed, a found run goes on: other peers may have what is lacking. Without one,
    raises ConfigError or DataError naming the field, NetworkError or ResourceError.
    """
    check_spec(spec)
    found = _earlier(spec, state_dir, operator)
    if found is not None and _whole(*found):
        return found
    digest = hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    building = state_dir / "runs" / f"new-{digest[:16]}"
    building.mkdir(parents=True, exist_ok=True)
    store = BundleStore(building / BUNDLES)
    if found is not None:
        _make_again(*found, store)
        shutil.rmtree(building)
        return found
    run = ResolvedRun(spec=spec, resolved=_make_bundles(spec, store, None), operator=operator)
    directory = run_directory(state_dir, run.run_id)
    if directory.exists():
        _complete(directory, run, store)
        shutil.rmtree(building)
    else:
        save_run(building, run)
        shutil.move(building, directory)
    return run, directory


def known_run(directory: Path, run_id: str) -> ResolvedRun | None:
    """The run spec that a directory holds. None when it holds none of that run that can be read, which is said: any
    peer can give it."""
    try:
        run = load_run(directory)
    except DataError as error:
        event(log, "run_file_unusable", level=logging.WARNING, reason=str(error))
        return None
    return run if run is not None and run.run_id == run_id else None


def _earlier(spec: RunSpec, state_dir: Path, operator: str) -> tuple[ResolvedRun, Path] | None:
    for path in sorted((state_dir / "runs").glob(f"*/{RESOLVED}")):
        try:
            run = load_run(path.parent)
        except DataError as error:  # it may be of a run that has nothing to do with this one
            event(log, "run_file_unusable", level=logging.WARNING, reason=str(error))
            continue
        if run is not None and run.spec == spec and run.operator == operator:
            if path.parent.name.startswith("new-"):
                continue
            return run, path.parent
    return None


def _whole(run: ResolvedRun, directory: Path) -> bool:
    """Whether what joiners ask for is there."""
    store = BundleStore(directory / BUNDLES)
    lacking = [name for name, digest in _bundles_of(run).items() if not store.has(name, digest)]
    if lacking:
        event(log, "bundles_made_again", level=logging.WARNING, path=directory, lacking=", ".join(lacking))
    return not lacking


def _bundles_of(run: ResolvedRun) -> dict[str, str]:
    """The digests of what joiners ask for, by name."""
    resolved = run.resolved
    return {
        "run/tokenizer": resolved.tokenizer_sha256,
        "run/data": resolved.data_sha256,
        "run/features": resolved.features_sha256,
        **{f"base/{stage}": digest for stage, digest in enumerate(resolved.base_sha256)},
    }


def _make_again(run: ResolvedRun, directory: Path, store: BundleStore) -> None:
    """Make in `store` what a found run lacks, and put it in place, as far as that can be: peers may have the rest."""
    problem = ""
    try:
        # A measured cut differs from start to start; the run must not.
        if _make_bundles(run.spec, store, run.resolved.cut) != run.resolved:
            problem = "model or corpus have changed since"
    except MeshdError as error:
        problem = str(error)
    if problem:
        hint = "what is lacking then is fetched from other peers"
        event(log, "run_not_made_again", level=logging.WARNING, path=directory, reason=problem, hint=hint)
    _complete(directory, run, store)


def _complete(directory: Path, run: ResolvedRun, made: BundleStore) -> None:
    """Put what was made, and is of this run, into the directory of an earlier start whose own is damaged or lacking."""
    store = BundleStore(directory / BUNDLES)
    for name, digest in _bundles_of(run).items():
        if made.has(name, digest) and not store.has(name, digest):
            manifest = made.manifest(name)
            files: dict[str, Path | bytes] = {e.name: made.path(name, e.name) for e in manifest.files}
            store.write(name, files, manifest.facts)
    save_run(directory, run)


def _make_bundles(spec: RunSpec, store: BundleStore, cut: list[int] | None) -> Resolved:
    """cut: of an earlier start; None: the spec's, or measured now."""
    model_dir = resolve_source(spec.model.source, spec.model.revision)
    config = load_config(model_dir)
    check_seq_len(config, spec.data.seq_len)
    tied = resolve_tied(config, spec.model.tied)
    cut = cut_of(spec, config, tied) if cut is None else cut
    tokenizer = store.write("run/tokenizer", {path.name: path for path in tokenizer_files(model_dir)}, {})
    base = []
    for stage in range(len(cut) + 1):
        with store.writing(f"base/{stage}", {}) as directory:
            write_base(model_dir, config, cut, tied, stage, directory / WEIGHTS)
        base.append(store.manifest(f"base/{stage}").sha256)
    features = _write_features(model_dir, config, store)
    with store.writing("run/data", {}) as directory:
        tokenize(spec, model_dir, config, directory)
    return Resolved(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        cut=cut,
        tied=tied,
        base_sha256=base,
        tokenizer_sha256=tokenizer.sha256,
        data_sha256=store.manifest("run/data").sha256,
        features_sha256=features,
    )


def _write_features(model_dir: Path, config: PreTrainedConfig, store: BundleStore) -> str:
    """Bundle `run/features`, of the base model's token embedding. Returns its hash."""
    family = family_of(config)
    with TensorFiles(model_dir, family.old_names) as files, store.writing("run/features", {}) as directory:
        TokenFeatures.from_embedding(files[family.embedding_name]).save(directory / FEATURES)
    return store.manifest("run/features").sha256


def tokenize(spec: RunSpec, model_dir: Path, config: PreTrainedConfig, directory: Path) -> None:
    """Build the spec's data set into `directory` with the model's tokenizer. Raises DataError where they do not fit."""
    facts = build_dataset(spec.data, AutoTokenizer.from_pretrained(model_dir), directory)
    event(log, "corpus", summary=facts.summary())
    if facts.vocabulary > config.vocab_size:
        raise DataError(
            f"the tokenizer of {spec.model.source} has {facts.vocabulary} tokens, its model {config.vocab_size}. "
            "Use the tokenizer that the model was trained with"
        )


def cut_of(spec: RunSpec, config: PreTrainedConfig, tied: Tied) -> list[int]:
    """First layer of every stage but the first: the spec's cut, or one that is measured now. Raises ConfigError."""
    layers = config.num_hidden_layers
    if spec.model.cut is None:
        check_stages(layers, spec.model.stages)
        costs = measure_costs(config, spec.data.seq_len, spec.data.microbatch)
        cut = costs.cut(spec.model.stages, tied)
        event(log, "cut", layers=layers, first_layers=[0, *cut])
        return cut
    if len(spec.model.cut) + 1 != spec.model.stages:
        raise ConfigError(
            "model.cut",
            spec.model.cut,
            f"it makes {len(spec.model.cut) + 1} stages where model.stages is {spec.model.stages}",
            "make the two agree: a cut names the first layer of every stage but the first",
        )
    check_cut(layers, spec.model.cut)
    return list(spec.model.cut)
