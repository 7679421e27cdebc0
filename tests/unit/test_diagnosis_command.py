"""`meshd codec`: from a run spec to tables, numbers and a plot, on the committed small model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshd import cli
from meshd.config.runspec import DataSpec, ModelSpec, RunSpec, StopSpec
from meshd.data.microbatch import Microbatch
from meshd.diagnosis import diagnose as diagnosing
from meshd.diagnosis import main as commanding
from meshd.diagnosis import report
from meshd.diagnosis.diagnose import Case, Diagnosis, Effort, check_memory, diagnose
from meshd.diagnosis.measure import PlanResult
from meshd.errors import ConfigError, MeshdError, ResourceError


def spec_of(model: Path, text: Path, /, **changes: Any) -> RunSpec:
    tables = {
        "model": {"source": str(model), "stages": 3, "cut": [2, 4]},
        "data": {"sources": [str(text)], "seq_len": 64, "microbatch": 4, "held_out": 0.2},
    }
    for name, table in changes.items():
        tables[name] |= table
    return RunSpec(
        model=ModelSpec(**tables["model"]), data=DataSpec(**tables["data"]), stop=StopSpec(steps=1)
    )


def quiet(what: str, done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def found(tiny_model: Path, adapt_text: Path) -> Diagnosis:
    """The masked family at an eighth of the bytes: this model's hidden is small, so that headers and ids count."""
    case = Case.of(spec_of(tiny_model, adapt_text))
    codecs = [
        "dense",
        "spectral:bits=2.7/spectral:bits=0.9",
        "lloyd:bits=2.7/lloyd:bits=0.9",
        "leading:keep=0.65/leading:keep=0.2",
        "topk:keep=0.2/topk:keep=0.06",
        "random:keep=0.17/random:keep=0.06",
    ]
    return diagnose(case, case.plans(codecs), Effort(batches=3, fit=24), quiet)


def test_the_order_of_codecs_at_equal_bytes(found: Diagnosis) -> None:
    """As on a large model (DESIGN section 3). On so small a one the first two are too near each other for an order."""
    dense, *masked = found.measured.plans
    assert found.ratio(dense.bytes_per_token) == pytest.approx(1.0, abs=0.02)
    assert dense.loss == pytest.approx(found.measured.loss, abs=1e-3)
    assert dense.cosine_min > 0.999
    for result in masked:
        assert found.ratio(result.bytes_per_token) == pytest.approx(8.5, abs=0.5), result.plan.name
    spectral, lloyd, leading, topk, random = masked
    assert max(spectral.loss, lloyd.loss) < leading.loss < topk.loss - 0.1 < random.loss - 1
    assert min(spectral.cosine_mean, lloyd.cosine_mean) > leading.cosine_mean > topk.cosine_mean + 0.2
    assert topk.cosine_mean > random.cosine_mean + 0.3
    assert len(found.prior_bytes) == 2
    assert found.fit_tokens == 24 * 4 * 64


def test_priors_never_see_the_documents_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, adapt_text: Path
) -> None:
    seen: dict[str, list[Microbatch]] = {}

    class Enough(Exception): ...

    def fitting(model: object, batches: list[Microbatch], *_: object) -> list[None]:
        seen["fit"] = batches
        return [None, None]

    def measuring(model: object, batches: list[Microbatch], *_: object) -> None:
        seen["measured"] = batches
        raise Enough

    monkeypatch.setattr(diagnosing, "fit_priors", fitting)
    monkeypatch.setattr(diagnosing, "measure", measuring)
    case = Case.of(spec_of(tiny_model, adapt_text))
    with pytest.raises(Enough):
        diagnose(case, case.plans(["spectral"]), Effort(batches=1000, fit=1000), quiet)
    # More was asked for than there is: all training windows, and whole microbatches of held-out ones.
    assert all(len(batch.tokens) == 4 and bool(batch.label_mask.all()) for batch in seen["measured"])
    rows = {
        name: {tuple(row.tolist()) for b in batches for row in b.tokens} for name, batches in seen.items()
    }
    assert len(rows["fit"]) > 100
    assert len(rows["measured"]) >= 4
    assert not rows["fit"] & rows["measured"]


def test_without_plans_the_run_specs_codecs_and_references(tiny_model: Path, adapt_text: Path) -> None:
    """Once each: the spec's default is one of the references."""
    names = [plan.name for plan in Case.of(spec_of(tiny_model, adapt_text)).plans([])]
    assert names[:4] == ["run spec (dense)", "int8", "int4", "spectral 16x"]
    ring = Case.of(spec_of(tiny_model, adapt_text, model={"tied": "ring"}))
    assert ring.boundaries == 3
    assert {len(plan.pairs) for plan in ring.plans([])} == {3}
    measured = Case.of(spec_of(tiny_model, adapt_text, model={"cut": None}))
    assert len(measured.cut) == 2


def test_supervised_text_is_measured_too(tmp_path: Path, tiny_model: Path) -> None:
    """Rows are padded and prompts have no labels; the loss counts labels only."""
    lines = [{"prompt": f"question {n}", "response": f"the answer is {n * n}."} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    spec = spec_of(
        tiny_model, tmp_path / "rows.jsonl", data={"kind": "sft", "packing": "separate", "seq_len": 32}
    )
    case = Case.of(spec)
    result = diagnose(case, case.plans(["dense", "int4"]), Effort(batches=2, fit=1), quiet)
    dense, coarse = result.measured.plans
    assert dense.cosine_min > 0.999 > coarse.cosine_mean > 0.8
    assert dense.loss == pytest.approx(result.measured.loss, abs=1e-3)
    assert result.prior_bytes == ()


def test_too_few_tokens_for_priors(tiny_model: Path, adapt_text: Path) -> None:
    case = Case.of(spec_of(tiny_model, adapt_text, data={"seq_len": 16, "microbatch": 1}))
    with pytest.raises(ConfigError, match=r"--fit = 3: 48 tokens are too few.*at least 16") as caught:
        diagnose(case, case.plans(["spectral"]), Effort(fit=3), quiet)
    assert caught.value.exit_code == 2
    diagnose(case, case.plans(["int8"]), Effort(batches=1, fit=3), quiet)


def test_one_stage_has_nothing_to_measure(tiny_model: Path, adapt_text: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.stages = 1: nothing crosses.*at least 2"):
        Case.of(spec_of(tiny_model, adapt_text, model={"stages": 1, "cut": []}))


def test_memory_is_looked_at_before_anything_is_loaded(tiny_model: Path, adapt_text: Path) -> None:
    case = Case.of(spec_of(tiny_model, adapt_text))
    parameters = 1_570_000  # of which 262,144 are the frozen embedding, held twice
    assert case.needed_bytes() > 4 * (parameters + 2 * (parameters - 262_144))
    check_memory(case.needed_bytes(), case.needed_bytes())
    with pytest.raises(ResourceError, match=r"take about 2\.0 GB in one process, 1\.5 GB of memory are free"):
        check_memory(2_000_000_000, 1_500_000_000)


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_numbers_for_machines(found: Diagnosis) -> None:
    said = json.loads(json.dumps(report.as_json(found), allow_nan=False))
    assert said["cut"] == [2, 4]
    assert said["loss_dense"] == found.measured.loss
    spectral = said["codecs"][1]
    assert spectral["codec"] == "spectral:bits=2.7/spectral:bits=0.9"
    assert spectral["cosine_min"] == min(spectral["cosine_stages"])
    first = spectral["boundaries"][0]
    assert (first["forward"]["codec"], first["backward"]["codec"]) == (
        "spectral:bits=2.7",
        "spectral:bits=0.9",
    )
    assert first["ratio_bf16"] == pytest.approx(4 * 128 / first["bytes_per_token"])


def test_a_failed_plan_says_why_everywhere(found: Diagnosis, tmp_path: Path) -> None:
    plan = found.measured.plans[0].plan
    failed = dataclasses.replace(
        found,
        measured=dataclasses.replace(
            found.measured, plans=(PlanResult(plan, "activations at boundary 0 are not finite"),)
        ),
    )
    said = json.loads(json.dumps(report.as_json(failed), allow_nan=False))["codecs"][0]
    assert (said["loss"], said["failed"]) == (None, "activations at boundary 0 are not finite")
    assert "not finite" in text_of(failed)
    report.plot(failed, tmp_path / "empty.png")


def text_of(diagnosis: Diagnosis) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as captured:
        console.print(report.view(diagnosis))
    return captured.get()


def test_tables_for_people(found: Diagnosis) -> None:
    text = text_of(found)
    spectral = found.measured.plans[1]
    assert f"{spectral.loss:.4f}" in text
    assert f"{found.ratio(spectral.bytes_per_token):.2f}x" in text
    assert f"{spectral.boundaries[1].backward.error:.4f}" in text
    assert f"priors fitted on {24 * 4 * 64:,} training tokens" in text


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_plot_is_of_the_kind_that_its_name_says(
    found: Diagnosis, tmp_path: Path, suffix: str, magic: bytes
) -> None:
    pytest.importorskip("matplotlib")
    report.plot(found, tmp_path / f"plot{suffix}")
    assert (tmp_path / f"plot{suffix}").read_bytes().startswith(magic)


def test_outputs_are_checked_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report.check_outputs(None, None)
    report.check_outputs(tmp_path / "new.json", None)
    with pytest.raises(ResourceError, match="there is no directory"):
        report.check_outputs(tmp_path / "none" / "new.json", None)
    with pytest.raises(ResourceError, match="it is a directory"):
        report.check_outputs(tmp_path, None)
    with pytest.raises(ConfigError, match=r"--plot = .*plot\.gif.*\.png"):
        report.check_outputs(None, tmp_path / "plot.gif")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshdError, match=r"pip install 'meshd\[plot\]'"):
        report.check_outputs(None, tmp_path / "plot.png")


# ---- the command ----------------------------------------------------------------------------------------------------


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["meshd", "codec", *arguments])
    # Of the whole process, and so of the tests after this one.
    monkeypatch.setattr("meshd.observe.log.setup_logging", lambda *_: None)
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def run_file(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> Path:
    """A spec whose own codecs need priors."""
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\nsource = "{tiny_model}"\nstages = 2\ncut = [3]\n'
        f'[data]\nsources = ["{adapt_text}"]\nseq_len = 32\nmicrobatch = 4\nheld_out = 0.2\n'
        '[wire]\nforward = "spectral:bits=2"\nbackward = "lloyd"\n[stop]\nsteps = 1\n'
    )
    return path


def test_the_command_shows_and_writes(
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command(
        capsys, monkeypatch, str(run_file), "--batches", "1", "--fit", "8", "--threads", "1",
        "--json", "numbers.json",
    )  # fmt: skip
    assert said[0] == 0, said[2]
    assert torch.get_num_threads() == 1
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    own = numbers["codecs"][0]
    assert own["codec"] == "run spec (spectral:bits=2/lloyd)"
    assert own["boundaries"][0]["forward"]["codec"] == "spectral:bits=2"
    assert {"dense", "topk 16x", "random 16x", "lloyd 16x", "spectral 32x"} < {
        row["codec"] for row in numbers["codecs"]
    }
    for row in numbers["codecs"]:
        assert row["codec"] in " ".join(said[1].split())
        assert f"{row['loss']:.4f}" in said[1]
    assert "numbers: numbers.json" in said[1]
    if report.can_plot():
        assert "plot: codec.png" in said[1]
        assert (tmp_path / "codec.png").is_file()


def test_the_command_without_matplotlib(
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commanding, "can_plot", lambda: False)
    code, out, _ = command(capsys, monkeypatch, str(run_file), "--codec", "int8", "--batches", "1")
    assert code == 0
    assert "no plot: matplotlib is not installed (pip install 'meshd[plot]')" in out
    assert not (tmp_path / "codec.png").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--codec", "gzip"], 2, "--codec = 'gzip': no such codec. Fix: one of dense"),
        (["--codec", "int8;int8"], 2, "2 pairs for 1 boundaries"),
        (["--plot", "plot.gif"], 2, "--plot = 'plot.gif': no kind of picture"),
        (["--json", "/nowhere/at/all.json"], 3, "there is no directory /nowhere/at"),
        (["--fit", "1", "--codec", "spectral"], 2, "--fit"),
        (["--batches", "0"], 2, "--batches"),
    ],
)
def test_what_a_person_does_wrong(
    options: list[str],
    code: int,
    words: str,
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if options[0] == "--fit":
        run_file.write_text(run_file.read_text().replace("microbatch = 4", "microbatch = 1"))
    got, _, err = command(capsys, monkeypatch, str(run_file), *options)
    assert got == code
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
