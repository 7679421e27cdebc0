"""Writing a trained model as a directory that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from meshd.errors import DataError, MismatchError, ResourceError
from meshd.model.families import family_of, load_config
from meshd.model.stage import check_shapes
from meshd.model.tensors import INDEX, SINGLE
from meshd.model.weights import write_tensors

# A directory with this file was written by `export`, and may be replaced by a later one.
MARKER = "meshd_export.json"
SHARD_BYTES = 2_000_000_000

# Everything of a model directory but the weights: what a stage, an exporter or a reader of its text needs.
TOKENIZER_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def tokenizer_files(model_dir: Path) -> list[Path]:
    """Config and tokenizer files of a model directory: what `run/tokenizer` bundles. Raises DataError if incomplete."""
    files = [model_dir / name for name in TOKENIZER_NAMES if (model_dir / name).is_file()]
    names = {file.name for file in files}
    if "config.json" not in names:
        raise DataError(f"{model_dir / 'config.json'} is missing. Fetch the model again")
    if not ({"tokenizer.json", "tokenizer.model"} & names or {"vocab.json", "merges.txt"} <= names):
        raise DataError(f"{model_dir} holds no tokenizer (tokenizer.json). Fetch the model's tokenizer files")
    return files


def whole_shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Shapes of the whole model's tensors by name, without the head of a tied model. Allocates nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    if config.tie_word_embeddings:
        shapes.pop(family_of(config).head_name, None)
    return shapes


def export(
    stage_tensors: Iterable[Mapping[str, Tensor]],
    tokenizer_dir: Path,
    dest: Path,
    facts: Mapping[str, object] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    stage_tensors: each stage's tensors under whole-model names, one stage at a time (at most one stage and
    `shard_bytes` are held in memory). A frozen copy of the embedding may come twice; the first counts. tokenizer_dir:
    config.json, generation_config.json and tokenizer files. facts: what else is written into the marker file.

    The directory appears whole or not at all; an earlier export at `dest` is replaced, anything else there is refused
    (ResourceError). Raises MismatchError when a tensor of the model is missing, unknown or has another shape.
    """
    check_destination(dest)
    config = load_config(tokenizer_dir)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
        try:
            building.chmod(0o755)
            dtype = _write_weights(stage_tensors, whole_shapes(config), building, shard_bytes)
            for file in tokenizer_files(tokenizer_dir):
                shutil.copyfile(file, building / file.name)
            _write_config(tokenizer_dir, building, dtype)
            (building / MARKER).write_text(json.dumps(dict(facts or {}), indent=2) + "\n", encoding="utf-8")
            _swap(building, dest)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write the export to {dest}: {error.strerror or error}. Free space, or choose another directory"
        ) from error


def check_destination(dest: Path) -> None:
    """Refuse a destination that holds anything but an earlier export. Raises ResourceError."""
    if dest.is_dir():
        if any(dest.iterdir()) and not (dest / MARKER).is_file():
            raise ResourceError(
                f"{dest} is not empty and is no earlier export. Give a new or empty directory"
            )
    elif dest.exists():
        raise ResourceError(f"{dest} is a file. Give a new or empty directory")


def _write_weights(
    stage_tensors: Iterable[Mapping[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    folder: Path,
    shard_bytes: int,
) -> torch.dtype:
    """Write shards as tensors come, then their final names and the index. Returns the tensors' dtype."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    seen: dict[str, torch.Size] = {}
    total = pending_bytes = 0
    dtypes: set[torch.dtype] = set()

    def flush() -> None:
        nonlocal pending, pending_bytes
        write_tensors(pending, folder / f"part-{len(shards)}")
        shards.append(list(pending))
        pending, pending_bytes = {}, 0

    for tensors in stage_tensors:
        unknown = sorted(set(tensors) - set(shapes))
        if unknown:
            raise MismatchError(
                f"{unknown[0]} is no tensor of the model in the run's config. Export with its own config"
            )
        for name, tensor in tensors.items():
            if name in seen:
                continue
            size = tensor.numel() * tensor.element_size()
            if pending and pending_bytes + size > shard_bytes:
                flush()
            seen[name] = tensor.shape
            dtypes.add(tensor.dtype)
            pending[name] = tensor.detach().to("cpu").contiguous()
            pending_bytes += size
            total += size
    check_shapes(shapes, seen, "the whole model")
    flush()
    _name_shards(shards, total, folder)
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _name_shards(shards: list[list[str]], total: int, folder: Path) -> None:
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """The config as it was, but with the dtype that the weights have: transformers loads in the dtype it names."""
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("torch_dtype", None)
    raw["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _swap(building: Path, dest: Path) -> None:
    """Put `building` in the place of `dest`. Were it to stop half way, the old export lies beside, complete."""
    old = dest.with_name(f".{dest.name}.old-{os.getpid()}")
    if dest.exists():
        dest.rename(old)
    building.rename(dest)
    shutil.rmtree(old, ignore_errors=True)
