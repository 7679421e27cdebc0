"""Where a base model comes from: the hub, a local directory, or a package.

Whatever the source, no code that comes with a model is run, and only safetensors weights are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from meshd.errors import ConfigError, DataError, MismatchError, NetworkError
from meshd.model.cut import Tied
from meshd.model.export import TOKENIZER_NAMES, tokenizer_files
from meshd.model.families import family_of, load_config
from meshd.model.packaged import PACKAGED, packaged_model
from meshd.model.tensors import INDEX, SINGLE, current_names, read_index, weight_files
from meshd.model.weights import stage_tensor_names

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FORMS = "write `packaged:smollm2-135m`, `hub:ORG/NAME`, or a local directory"


def cache_root(cache_dir: Path | None = None) -> Path:
    """meshd's cache: `cache_dir`, else the environment's MESHD_CACHE, else ~/.cache/meshd."""
    return cache_dir or Path(os.environ.get("MESHD_CACHE") or Path.home() / ".cache" / "meshd")


def resolve_source(source: str, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """The local directory of a whole base model: config.json, safetensors and tokenizer, all checked to be there.

    source: as `model.source` in the run spec. cache_dir: root of meshd's cache for packaged models; hub models go
    into the hub's own cache. Downloads, converts, blocks: minutes at worst; run it off the event loop. Safe to call
    from several processes at once.

    Raises ConfigError for a source that is none, DataError for missing or unusable files, NetworkError when a download
    fails, ResourceError when the cache cannot be written.
    """
    if repo := _hub_repo(source, revision):
        patterns = ["*.safetensors", INDEX, *TOKENIZER_NAMES]
        return check_model_dir(_hub_snapshot(repo, revision, patterns))
    return _local_or_packaged(source, cache_dir)


def resolve_stage(
    source: str,
    revision: str | None,
    cut: Sequence[int],
    tied: Tied,
    stage: int,
    cache_dir: Path | None = None,
) -> tuple[Path, list[Path]]:
    """Like `resolve_source`, but of a hub model only the files that hold the stage's tensors are fetched.

    Returns the directory (config, tokenizer) and those safetensors files, for `write_base`; a model in one file is
    fetched whole. Raises also MismatchError when the index lacks a tensor of the stage.
    """
    repo = _hub_repo(source, revision)
    if repo is None:
        folder = _local_or_packaged(source, cache_dir)
        return folder, weight_files(folder)
    folder = _hub_snapshot(repo, revision, [INDEX, *TOKENIZER_NAMES])
    tokenizer_files(folder)
    index = folder / INDEX
    if not index.is_file():
        return folder, [_hub_file(repo, revision, SINGLE)]
    config = load_config(folder)
    where = read_index(index)
    stored = current_names(where, family_of(config).old_names)
    names = stage_tensor_names(config, cut, tied, stage)
    missing = [name for name in names if name not in stored]
    if missing:
        raise MismatchError(
            f"hub:{repo} lists no tensor {missing[0]} in its {INDEX}. Its config is of another model"
        )
    return folder, [
        _hub_file(repo, revision, file) for file in sorted({where[stored[name]] for name in names})
    ]


def check_model_dir(folder: Path) -> Path:
    """`folder`, if it holds config.json, safetensors and a tokenizer. Raises DataError naming what is missing."""
    if not folder.is_dir():
        raise DataError(f"model.source = {str(folder)!r}: there is no such directory. Fix: {_FORMS}")
    tokenizer_files(folder)
    weight_files(folder)
    return folder


def _local_or_packaged(source: str, cache_dir: Path | None) -> Path:
    kind, separator, name = source.partition(":")
    if separator and kind == "packaged":
        if name not in PACKAGED:
            raise ConfigError(
                "model.source",
                source,
                "there is no such packaged model",
                f"use packaged:{' or packaged:'.join(PACKAGED)}",
            )
        return check_model_dir(packaged_model(PACKAGED[name], cache_root(cache_dir)))
    return check_model_dir(Path(source).expanduser())


def _hub_repo(source: str, revision: str | None) -> str | None:
    """`ORG/NAME` of a hub source, or None for another kind of source."""
    if not source.startswith("hub:"):
        if revision is not None:
            raise ConfigError(
                "model.revision", revision, f"{source!r} has no revisions", "use it with hub:ORG/NAME only"
            )
        return None
    repo = source.removeprefix("hub:")
    if not _HUB_NAME.fullmatch(repo):
        raise ConfigError("model.source", source, "this is no name of a hub model", "write hub:ORG/NAME")
    return repo


def _hub_snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except (OSError, HTTPError, HFValidationError) as error:
        raise _hub_error(repo, revision, error) from error


def _hub_file(repo: str, revision: str | None, name: str) -> Path:
    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except (OSError, HTTPError, HFValidationError) as error:
        raise _hub_error(repo, revision, error) from error


def _hub_error(repo: str, revision: str | None, error: Exception) -> Exception:
    """What a failed download means to a user."""
    what = f"hub:{repo}" + (f" at revision {revision!r}" if revision else "")
    match error:
        case GatedRepoError():
            return DataError(
                f"{what} is gated. Accept its terms on the hub, then log in with `hf auth login`"
            )
        case RevisionNotFoundError():
            return DataError(f"{what} does not exist: the model has no such revision. Check model.revision")
        case LocalEntryNotFoundError():
            return NetworkError(
                f"{what} is not in the local cache and the hub cannot be reached. Go online once, or give a local "
                "directory as model.source"
            )
        case EntryNotFoundError():
            return DataError(
                f"{what} lacks a file: {error}. Only models with safetensors weights can be used"
            )
        case RepositoryNotFoundError():
            return DataError(
                f"{what} does not exist, or is private. Check model.source; log in with `hf auth login`"
            )
        case HFValidationError():
            return ConfigError(
                "model.source", f"hub:{repo}", f"the hub refuses this name ({error})", "check it"
            )
        case HfHubHTTPError():
            return NetworkError(f"{what} could not be fetched: {error}. Try again, or give a local directory")
        case _:
            return NetworkError(
                f"{what} could not be fetched: {error}. Check network and free disk space, try again"
            )
