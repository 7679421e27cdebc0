"""Reading named tensors out of safetensors files, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshd.errors import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model directory, checked to be there. Raises DataError naming each missing one."""
    index = model_dir / INDEX
    if index.is_file():
        names = sorted(set(read_index(index).values()))
        files = [model_dir / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise DataError(
                f"{index} names files that are missing: {', '.join(missing)}. Fetch the model again"
            )
        return files
    single = model_dir / SINGLE
    if single.is_file():
        return [single]
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt")):
        raise DataError(
            f"{model_dir} holds pickled weights only (.bin, .pt), which may run code when loaded. "
            f"Convert them to {SINGLE} on a machine where you trust them"
        )
    raise DataError(f"{model_dir} holds neither {SINGLE} nor {INDEX}. Fetch the model's safetensors files")


def read_index(index: Path) -> dict[str, str]:
    """Tensor name to file name, from a sharded model's index. Raises DataError when it is malformed."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is not a safetensors index ({error!r}). Fetch the model again") from None
    for file in pairs.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise DataError(
                f"{index} names {file!r}, which is no safetensors file beside it. Fetch the model again"
            )
    return pairs


def current_names(stored: Iterable[str], old_names: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """State_dict name to stored name. old_names: pairs of prefixes, in older checkpoints and in the state_dict."""
    names = {name: name for name in stored}
    for name in list(names):
        for old, new in old_names:
            if name.startswith(old):
                names.setdefault(new + name.removeprefix(old), name)
    return names


class TensorFiles(Mapping[str, Tensor]):
    """A lazy mapping from tensor name to tensor over safetensors files: one, several, or a model directory's.

    Only the tensors that are asked for are read. `old_names` (see `current_names`) lets the names of older checkpoints
    stand for those of the state_dict. Use as a context manager. Raises DataError for missing or damaged files.
    """

    def __init__(self, source: Path | Sequence[Path], old_names: tuple[tuple[str, str], ...] = ()) -> None:
        if isinstance(source, Path):
            source = weight_files(source) if source.is_dir() else [source]
        self._stack = ExitStack()
        readers: dict[str, Any] = {}  # by stored name
        try:
            for file in source:
                reader = self._open(file)
                readers.update(dict.fromkeys(reader.keys(), reader))
        except BaseException:
            self._stack.close()
            raise
        names = current_names(readers, old_names)
        self._readers = {name: (readers[stored], stored) for name, stored in names.items()}

    def _open(self, file: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError:
            raise DataError(f"{file} is missing") from None
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is not a readable safetensors file ({error}). Fetch it again") from None

    def __getitem__(self, name: str) -> Tensor:
        reader, stored = self._readers[name]
        tensor: Tensor = reader.get_tensor(stored)
        return tensor

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor, without reading it."""
        reader, stored = self._readers[name]
        return torch.Size(reader.get_slice(stored).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
