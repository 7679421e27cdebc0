"""An operator's peer started again on a state directory that a crash or an earlier version has left (issue 4)."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshd.config.load import validate
from meshd.config.runspec import ResolvedRun, RunSpec
from meshd.errors import DataError, MeshdError, NetworkError
from meshd.observe.log import fields_of
from meshd.peer import resolve as resolve_module
from meshd.peer.loading import held_before, put_away
from meshd.peer.resolve import BUNDLES, RESOLVED, known_run, resolve
from meshd.state.bundle import BundleStore

Made = tuple[RunSpec, ResolvedRun, Path]


@pytest.fixture(scope="module")
def made(tiny_model: Path, adapt_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    values: dict[str, Any] = {
        "model": {"source": str(tiny_model), "stages": 2, "cut": [3]},
        "data": {"sources": [str(adapt_text)], "seq_len": 32, "microbatch": 2},
        "stop": {"steps": 6},
    }
    spec = validate(RunSpec, values, "test")
    state = tmp_path_factory.mktemp("state")
    run, _ = resolve(spec, state, "operator")
    return spec, run, state


@pytest.fixture
def state(made: Made, tmp_path: Path) -> Path:
    """A copy of the state directory, to be damaged."""
    return Path(shutil.copytree(made[2], tmp_path / "state"))


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_run_is_found_again(made: Made, state: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, folder = resolve(made[0], state, "operator")
    assert run == made[1]
    assert folder == state / "runs" / run.run_id[:16]
    assert events(caplog) == []


def test_run_files_of_other_runs_and_versions_stop_nobody(
    made: Made, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One without features_sha256 is of before codecs knew tokens; one was torn."""
    older = json.loads(made[1].canonical())
    del older["resolved"]["features_sha256"]
    for name, content in (("-older", json.dumps(older)), ("-torn", made[1].canonical()[:100].decode())):
        (state / "runs" / name).mkdir()
        (state / "runs" / name / RESOLVED).write_text(content)
    run, _ = resolve(made[0], state, "operator")
    assert run == made[1]
    reasons = [str(fields_of(record)["reason"]) for record in caplog.records]
    assert events(caplog) == ["run_file_unusable"] * 2
    assert any("features_sha256" in reason for reason in reasons)


@pytest.mark.parametrize("damage", ["run file", "bundles"])
def test_what_a_crash_has_damaged_is_made_again_and_the_run_is_the_same(
    damage: str, made: Made, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = state / "runs" / made[1].run_id[:16]
    (folder / "journal").write_text("B 0 0 0 0 0 0 0 0\n")
    if damage == "run file":
        (folder / RESOLVED).write_bytes(made[1].canonical()[:-9])
    else:
        (folder / BUNDLES / "base/0/weights.safetensors").write_bytes(b"torn")
        (folder / BUNDLES / "run/data/.manifest.json").unlink()
    run, again = resolve(made[0], state, "operator")
    assert (run, again) == (made[1], folder)
    assert ResolvedRun.model_validate_json((folder / RESOLVED).read_bytes()) == run
    store = BundleStore(folder / BUNDLES)
    assert store.drop_damaged() == []
    assert store.manifest("base/0").sha256 == run.resolved.base_sha256[0]
    assert store.manifest("run/data").sha256 == run.resolved.data_sha256
    assert (folder / "journal").exists(), "what the peer did is kept"
    assert not list((state / "runs").glob("new-*"))
    assert "run_file_unusable" in events(caplog) or "bundles_made_again" in events(caplog)


@pytest.mark.parametrize("since", ["no model", "no corpus", "changed"])
def test_what_cannot_be_made_again_is_left_to_other_peers_and_the_rest_is_made(
    since: str, made: Made, state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = state / "runs" / made[1].run_id[:16]
    for damaged in ("base/0/weights.safetensors", "run/data/.manifest.json"):
        (folder / BUNDLES / damaged).write_bytes(b"torn")
    problem: MeshdError = DataError("the corpus has gone")
    tokenize = resolve_module.tokenize

    def fails(*_: object) -> Path:
        raise problem

    def other(spec: RunSpec, model: Path, config: Any, directory: Path) -> None:
        tokenize(spec, model, config, directory)
        (directory / "more").write_bytes(b"x")

    if since == "no model":
        problem = NetworkError("no hub")
        monkeypatch.setattr(resolve_module, "resolve_source", fails)
    else:
        monkeypatch.setattr(resolve_module, "tokenize", fails if since == "no corpus" else other)

    assert resolve(made[0], state, "operator") == (made[1], folder)
    assert events(caplog)[-1] == "run_not_made_again"
    reason = str(fields_of(caplog.records[-1])["reason"])
    assert reason == ("model or corpus have changed since" if since == "changed" else str(problem))
    store = BundleStore(folder / BUNDLES)
    assert store.has("base/0", made[1].resolved.base_sha256[0]) == (since != "no model")
    assert not store.has("run/data", made[1].resolved.data_sha256)
    assert store.has("base/1", made[1].resolved.base_sha256[1])
    assert not list((state / "runs").glob("new-*"))


def test_without_an_earlier_run_what_cannot_be_made_is_an_error(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Path:
        raise NetworkError("no hub")

    monkeypatch.setattr(resolve_module, "resolve_source", fails)
    with pytest.raises(NetworkError, match="no hub"):
        resolve(made[0], tmp_path, "operator")


def test_a_joiner_asks_for_the_run_spec_that_it_cannot_read(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = made[1].canonical()
    assert known_run(tmp_path, made[1].run_id) is None
    (tmp_path / RESOLVED).write_bytes(content)
    assert known_run(tmp_path, made[1].run_id) == made[1]
    assert known_run(tmp_path, "0" * 40) is None
    assert events(caplog) == []
    (tmp_path / RESOLVED).write_bytes(content[:50])
    assert known_run(tmp_path, made[1].run_id) is None
    assert events(caplog) == ["run_file_unusable"]


@pytest.mark.parametrize("base", [True, False])
def test_a_peer_that_has_moved_keeps_one_stage_on_its_disk(base: bool, tmp_path: Path) -> None:
    """And of each other one the newest snapshot, and the state where nobody serves it: they may be the last there are;
    an operator all base weights."""
    store = BundleStore(tmp_path)
    for stage in range(3):
        for bundle in ("live/{}", "base/{}", "part/{}/64", "snapshot/{}/32", "snapshot/{}/64"):
            store.write(bundle.format(stage), {"f": b"x"}, {"tokens": 9 - stage})
    put_away(store, held=1, served=[True, False, False], base=base)
    kept = {
        "live/1",
        "live/2",
        "base/1",
        "part/1/64",
        "snapshot/1/32",
        "snapshot/1/64",
        "snapshot/0/64",
        "snapshot/2/64",
    }
    assert set(store.names()) == kept | (set() if base else {"base/0", "base/2"})
    assert held_before(store, 3) == 1
