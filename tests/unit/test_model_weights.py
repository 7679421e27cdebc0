"""Slicing, estimating and exporting weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_helpers import CONFIGS, load_stages, save_tiny, tiny_config, whole_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshd.config.runspec import GossipSpec
from meshd.errors import ConfigError, DataError, MismatchError, ResourceError
from meshd.gossip.memory import LISTENERS
from meshd.model.export import MARKER, export, tokenizer_files
from meshd.model.families import check_seq_len, load_config, resolve_tied
from meshd.model.stage import StageModel
from meshd.model.tensors import TensorFiles
from meshd.model.weights import memory_estimate, stage_bytes, stage_tensor_names, write_base


def tied_mode(config) -> str:
    return "ring" if config.tie_word_embeddings else "none"


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_base_files_partition_the_model(tmp_path: Path, name: str, shard: str) -> None:
    """Every tensor is in exactly one stage's file, with its value, and each file loads into its stage."""
    model = whole_model(tiny_config(name))
    folder = save_tiny(model, tmp_path / "model", max_shard_size=shard)
    assert (folder / "model.safetensors").is_file() == (shard == "1GB")
    config, found = load_config(folder), {}
    for stage in range(3):
        file = tmp_path / f"{stage}.safetensors"
        write_base(folder, config, [1, 3], tied_mode(config), stage, file)
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        assert sorted(tensors) == sorted(stage_tensor_names(config, [1, 3], tied_mode(config), stage))
        assert sum(t.nbytes for t in tensors.values()) == stage_bytes(
            config, [1, 3], tied_mode(config), stage
        )
        found.update(tensors)
        StageModel(config, [1, 3], tied_mode(config), stage).load(file)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_frozen_head_copy_is_in_the_last_base_file(tmp_path: Path) -> None:
    model = whole_model(tiny_config("llama-tied"))
    folder = save_tiny(model, tmp_path / "model")
    config = load_config(folder)
    write_base(folder, config, [1, 3], "freeze", 2, tmp_path / "last.safetensors")
    last = load_file(tmp_path / "last.safetensors")
    assert torch.equal(last["model.embed_tokens.weight"], model.model.embed_tokens.weight)


def test_base_reads_only_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    read: list[str] = []
    original = TensorFiles.__getitem__
    monkeypatch.setattr(
        TensorFiles, "__getitem__", lambda self, name: (read.append(name), original(self, name))[1]
    )
    config = load_config(folder)
    write_base(folder, config, [1, 3], "none", 1, tmp_path / "1.safetensors")
    assert sorted(read) == sorted(stage_tensor_names(config, [1, 3], "none", 1))


def test_base_keeps_the_stored_dtype_and_stage_casts(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")).bfloat16(), tmp_path / "model")
    config = load_config(folder)
    write_base(folder, config, [2], "none", 1, tmp_path / "1.safetensors")
    assert {t.dtype for t in load_file(tmp_path / "1.safetensors").values()} == {torch.bfloat16}
    stage = StageModel(config, [2], "none", 1)
    stage.load(tmp_path / "1.safetensors")
    assert {p.dtype for p in stage.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("gpt2", lambda key: key.removeprefix("transformer.")),
        ("gpt_neox", lambda key: key.replace("lm_head.", "embed_out.")),
    ],
)
def test_names_of_old_checkpoints(tmp_path: Path, name: str, rename) -> None:
    """The published GPT-2 and GPT-NeoX files name tensors otherwise than the state_dict."""
    model = whole_model(tiny_config(name))
    folder = save_tiny(model, tmp_path / "model")
    old = {rename(key): value for key, value in load_file(folder / "model.safetensors").items()}
    assert old.keys() != dict(model.named_parameters()).keys()
    save_file(old, folder / "model.safetensors")
    config = load_config(folder)
    stage = StageModel(config, [], tied_mode(config), 0)
    stage.load(folder)
    expected = dict(model.named_parameters())
    assert all(torch.equal(value, expected[key]) for key, value in stage.named().items())


def test_base_names_a_tensor_that_does_not_fit(tmp_path: Path) -> None:
    """C07: tensor, expected and found shape; no file is left."""
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    config = load_config(folder)
    config.intermediate_size = 64
    dest = tmp_path / "base" / "0.safetensors"
    with pytest.raises(MismatchError, match=r"gate_proj\.weight: expected \(64, 32\), found \(48, 32\)"):
        write_base(folder, config, [2], "none", 0, dest)
    assert not dest.exists()


# ---- memory ----------------------------------------------------------------------------------------------------------


def measured_activations(stage: StageModel, rows: int, tokens: int) -> int:
    """Bytes that autograd really keeps on the CPU for the largest hop, and its output and gradient."""
    own = {p.untyped_storage()._cdata for p in stage.parameters()}
    sizes = []
    for hop in stage.hops:
        kept: list[torch.Tensor] = []
        x = torch.zeros(rows, tokens, dtype=torch.long)
        if not hop.embed:
            x = torch.randn(rows, tokens, stage.config.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t
        ):
            out = stage(hop.index, x)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
        sizes.append(sum(size for key, size in storages.items() if key not in own) + 2 * out.nbytes)
    return max(sizes)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gpt_neox", "mistral-window"])
def test_memory_estimate_is_close_to_what_is_held(name: str) -> None:
    """C18."""
    config = tiny_config(name, max_position_embeddings=128)
    for index in range(2):
        estimate = memory_estimate(config, [2], tied_mode(config), index, microbatch=2, seq_len=96)
        stage = load_stages(whole_model(config), [2], tied_mode(config))[index]
        held = sum(p.nbytes for p in stage.parameters())
        assert (estimate.weights, estimate.gradients, estimate.optimizer) == (held, held, 2 * held)
        assert estimate.activations == pytest.approx(measured_activations(stage, 2, 96), rel=0.15)
        assert estimate.total == 4 * held + estimate.activations


def test_frozen_tensors_need_no_gradient_memory() -> None:
    config = tiny_config("llama-tied")
    estimate = memory_estimate(config, [2], "freeze", 1, 2, 32)
    assert estimate.weights - estimate.gradients == config.vocab_size * config.hidden_size * 4
    assert "GB (weights" in str(estimate)


@pytest.mark.parametrize("bits", [4, 16])
def test_memory_estimate_counts_what_gossip_holds(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.gossip.memory.SEGMENT_BLOCKS", 10)
    config = tiny_config("llama")

    def gossip(**fields: object) -> int:
        return memory_estimate(config, [2], "none", 1, 2, 32, gossip=GossipSpec(bits=bits, **fields)).gossip

    values = memory_estimate(config, [2], "none", 1, 2, 32).gradients // 4
    part = -(-values // 5)
    assert part > 40, "more than what bf16 reads ahead"
    # 8 bytes of position and 4 of value; some more for the segment that crosses.
    ahead = 12 * (40 if bits == 16 else part)
    assert ahead < gossip(subset=5) / (1 + LISTENERS) < ahead + 1000, (
        "of an exchange, and of those who listen"
    )
    assert gossip(subset=5, outer_momentum=0.5) - gossip(subset=5) == 6 * values
    assert gossip(subset=5, bps=10**6) == gossip(subset=1), "a byte budget may choose all values"


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [10**9, 10_000], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", ["ring", "freeze", "none"])
def test_export_loads_in_transformers(tmp_path: Path, tied: str, shard_bytes: int) -> None:
    model = whole_model(tiny_config("llama" if tied == "none" else "llama-tied"))
    folder = save_tiny(model, tmp_path / "model")
    stages = load_stages(model, [1, 3], tied)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.trainable().values():
                parameter.add_(0.01)
    dest = tmp_path / "out" / "export"
    export((stage.named() for stage in stages), folder, dest, {"tokens": 5}, shard_bytes)
    assert (dest / "model.safetensors").is_file() == (shard_bytes > 10_000)
    loaded = AutoModelForCausalLM.from_pretrained(dest)
    assert loaded.dtype == torch.float32
    ids = torch.arange(12)[None]
    hidden = ids
    for hop, stage in sorted((h.index, s) for s in stages for h in s.hops):
        hidden = stage(hop, hidden)
    torch.testing.assert_close(loaded(input_ids=ids).logits, hidden, rtol=1e-4, atol=1e-5)
    tie = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tie == (tied != "none")
    assert AutoTokenizer.from_pretrained(dest)("a b")["input_ids"] == [1, 2]
    assert json.loads((dest / MARKER).read_text()) == {"tokens": 5}


def test_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    model = whole_model(tiny_config("llama"))
    folder, dest = save_tiny(model, tmp_path / "model"), tmp_path / "export"
    stages = load_stages(model, [], "none")
    dest.mkdir()
    export([stages[0].named()], folder, dest, {"tokens": 1})
    (dest / "stale.txt").write_text("old")
    export([stages[0].named()], folder, dest, {"tokens": 2})
    assert json.loads((dest / MARKER).read_text()) == {"tokens": 2}
    assert not (dest / "stale.txt").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(ResourceError, match=r"precious is not empty and is no earlier export"):
        export([stages[0].named()], folder, precious)
    with pytest.raises(ResourceError, match=r"is a file"):
        export([stages[0].named()], folder, precious / "thesis.txt")
    assert (precious / "thesis.txt").read_text() == "mine"


def test_export_refuses_what_is_incomplete_or_foreign(tmp_path: Path) -> None:
    model = whole_model(tiny_config("llama"))
    folder, dest = save_tiny(model, tmp_path / "model"), tmp_path / "export"
    stages = load_stages(model, [2], "none")
    with pytest.raises(
        MismatchError, match=r"layers\.2\.self_attn\.q_proj\.weight: expected \(32, 32\), found noth"
    ):
        export([stages[0].named()], folder, dest)
    with pytest.raises(MismatchError, match=r"made\.up is no tensor of the model"):
        export([*(s.named() for s in stages), {"made.up": torch.zeros(1)}], folder, dest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"], "nothing half-written is left"


def test_export_says_bf16_when_the_weights_are(tmp_path: Path) -> None:
    model = whole_model(tiny_config("llama"))
    folder = save_tiny(model, tmp_path / "model")
    stages = load_stages(model, [2], "none", torch.bfloat16)
    export((s.named() for s in stages), folder, tmp_path / "export")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16


# ---- config and directory --------------------------------------------------------------------------------------------


def test_tokenizer_files(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    names = {file.name for file in tokenizer_files(folder)}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"holds no tokenizer"):
        tokenizer_files(folder)


def test_load_config_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json is missing"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"'bert'.*not supported.*llama"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}'
    )
    with pytest.raises(ConfigError, match=r"quantized"):
        load_config(tmp_path)


def test_load_config_runs_no_code_of_the_model(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoConfig": "evil.EvilConfig"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass EvilConfig: pass\n")
    assert load_config(folder).model_type == "llama"
    assert not (tmp_path / "ran").exists()


def test_learned_positions_bound_the_sequence() -> None:
    check_seq_len(tiny_config("gpt2"), 64)
    check_seq_len(tiny_config("llama"), 4096)
    with pytest.raises(ConfigError, match=r"data\.seq_len = 65.*64 positions.*use at most 64"):
        check_seq_len(tiny_config("gpt2"), 65)


def test_resolve_tied() -> None:
    assert resolve_tied(tiny_config("llama"), "ring") == "none"
    assert resolve_tied(tiny_config("llama-tied"), "ring") == "ring"
    assert resolve_tied(tiny_config("llama-tied"), "freeze") == "freeze"
    assert resolve_tied(tiny_config("llama-tied"), "auto") in ("ring", "freeze")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = save_tiny(whole_model(tiny_config("llama")), tmp_path / "model", max_shard_size="20KB")
    config = load_config(folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    spare = tmp_path / "spare"
    shutil.move(shard, spare)
    with pytest.raises(DataError, match=rf"names files that are missing: {shard.name}"):
        write_base(folder, config, [2], "none", 0, tmp_path / "0")
    shard.write_bytes(spare.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{shard.name} is not a readable safetensors file"):
        write_base(folder, config, [2], "none", 0, tmp_path / "0")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "../../etc/passwd"}}')
    with pytest.raises(DataError, match=r"no safetensors file beside it"):
        write_base(folder, config, [2], "none", 0, tmp_path / "0")
