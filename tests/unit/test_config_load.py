"""What a person sees who wrote a wrong run spec or peer config."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.config.load import NOT_GIVEN, ConfigErrors, load_peer_config, load_run_spec
from meshd.config.peer import PeerConfig
from meshd.errors import ConfigError

GOOD = """
[model]
source = "hub:org/name"
stages = 3
[data]
sources = ["packaged:python-docs"]
[stop]
steps = 4
"""


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def failure(folder: Path, text: str) -> ConfigErrors:
    with pytest.raises(ConfigErrors) as caught:
        load_run_spec(write(folder, text))
    return caught.value


def test_loads_values_and_defaults(tmp_path: Path) -> None:
    spec = load_run_spec(
        write(tmp_path, GOOD + "[optim]\nlr = 1\nbetas = [0.8, 0.9]\n[wire.boundary.1]\nforward='int8'")
    )
    assert (spec.model.stages, spec.stop_tokens) == (3, 4 * 32 * 256)
    assert (spec.optim.lr, spec.optim.betas) == (1.0, (0.8, 0.9))
    assert spec.wire.boundary[1].forward == "int8"
    assert spec.wire.boundary[1].backward == "dense"


@pytest.mark.parametrize(
    ("old", "new", "field", "value", "words"),
    [
        ("steps = 4", "steps = 4\nstep = 5", "stop.step", 5, "unknown field. Fix: did you mean `steps`?"),
        ("[stop]", "lr = 1e-4\n[stop]", "data.lr", 1e-4, "unknown field. Fix: did you mean `optim.lr`?"),
        ("[stop]", "zzz = 1\n[stop]", "data.zzz", 1, "known here: kind, sources"),
        ("[model]", "[optimizer]\nlr=1.0\n[model]", "optimizer", {"lr": 1.0}, "did you mean `optim`?"),
        ("stages = 3", 'stages = "3"', "model.stages", "3", "should be a valid integer. Fix: give an integer, 1"),
        ("stages = 3", "stages = 3.5", "model.stages", 3.5, "wrong type"),
        ("stages = 3", "stages = true", "model.stages", True, "wrong type"),
        ("stages = 3", "stages = 0", "model.stages", 0, "greater than or equal to 1"),
        ("stages = 3", "cut = [1, 'x']", "model.cut[1]", "x", "first layer of every stage"),
        ("stages = 3", "tied = 'maybe'", "model.tied", "maybe", "give one of \"auto\", \"ring\", \"freeze\""),
        ('["packaged:python-docs"]', '"docs"', "data.sources", "docs", "give a list, 1 or more: each a string"),
        ("steps = 4", "", "stop", {}, "give stop.tokens or stop.steps"),
        ("[stop]\nsteps = 4", "", "stop", NOT_GIVEN, "is needed. Fix: add `stop`"),
        ('source = "hub:org/name"', "", "model.source", NOT_GIVEN, "add `source = ...` under `[model]`"),
        ("[stop]", "[wire.boundary.0]\nforwards='int8'\n[stop]", "wire.boundary.0.forwards", "int8", "`forward`?"),
        ("[stop]", "[optim]\nlr = nan\n[stop]", "optim.lr", None, "optim.lr = nan: input should be"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_value_problem_and_fix(
    tmp_path: Path, old: str, new: str, field: str, value: object, words: str
) -> None:
    assert old in GOOD
    error = failure(tmp_path, GOOD.replace(old, new))
    (only,) = error.errors
    assert only.field == field
    if value is not None:
        assert only.value == value
    text = str(error)
    assert text.startswith(f"{tmp_path}/run.toml: {field} = ")
    assert words in text
    assert "Fix: " in text
    assert error.exit_code == 2


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    error = failure(
        tmp_path, GOOD.replace("stages = 3", "stage = 3").replace("steps = 4", "steps = -1") + "[datas]"
    )
    assert {e.field for e in error.errors} == {"model.stage", "stop.steps", "datas"}
    lines = str(error).splitlines()
    assert lines[0].endswith("run.toml: 3 problems")
    assert len(lines) == 4


def test_a_syntax_error_has_file_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nsource = hub:x\n")
    with pytest.raises(ConfigError, match=r"run\.toml:2:10 = 'source = hub:x': not valid TOML") as caught:
        load_run_spec(path)
    assert "strings need quotes" in str(caught.value)


def test_a_syntax_error_at_the_end_has_the_last_line(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nsource = """abc')
    with pytest.raises(ConfigError) as caught:
        load_run_spec(path)
    assert caught.value.field.startswith(f"{path}:2:")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file\. Fix: write one with `meshd init"):
        load_run_spec(tmp_path / "none.toml")


def test_a_directory_and_a_file_that_is_not_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load_run_spec(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load_run_spec(tmp_path / "bad.toml")


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("hub:org/name", "../models/m").replace(
        '["packaged:python-docs"]', '["text/*.md", "/abs/x", "~/y", "hf:name:config", "packaged:python-docs"]'
    )
    spec = load_run_spec(write(tmp_path, text))
    assert spec.model.source == f"{tmp_path}/../models/m"
    assert spec.data.sources == [
        f"{tmp_path}/text/*.md",
        "/abs/x",
        str(Path.home() / "y"),
        "hf:name:config",
        "packaged:python-docs",
    ]


def test_options_override_the_file_which_overrides_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "file"\nthreads = 3\nstate_dir = "state"', "peer.toml")
    config = load_peer_config(path, {"name": "option", "stage": None, "port": 5000})
    assert config == PeerConfig(name="option", threads=3, port=5000, state_dir=tmp_path / "state")


def test_the_default_state_dir_is_expanded() -> None:
    assert load_peer_config().state_dir == Path.home() / ".local/state/meshd"


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"options: device = 'gpu'.* give a string that matches"):
        load_peer_config(None, {"device": "gpu"})


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("delay_ms = -1.0", "link.delay_ms", "one-way delay of what this peer sends"),
        ("delay_ms = 5000.0", "link.delay_ms", "give a number, 0 to 1000"),
        ('jitter_ms = "5"', "link.jitter_ms", "wrong type"),
        ("rate_bps = 20", "link.rate_bps", "20_000_000 is 20 Mbit/s"),
        ("rate_bps = 2e7", "link.rate_bps", "give an integer"),
        ("rate = 5", "link.rate", "did you mean `rate_bps`?"),
    ],
)
def test_a_wrong_link_is_explained(tmp_path: Path, line: str, field: str, words: str) -> None:
    path = write(tmp_path, f"[link]\n{line}\n", "peer.toml")
    with pytest.raises(ConfigErrors) as caught:
        load_peer_config(path)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_link_is_shaped_as_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, "[link]\ndelay_ms = 40\nrate_bps = 20_000_000\n", "peer.toml")
    link = load_peer_config(path, {"link": "meshd:run@/ip4/192.0.2.1"}).link  # the argument of `meshd join`
    assert (link.delay_ms, link.jitter_ms, link.rate_bps) == (40.0, 0.0, 20_000_000)
    assert load_peer_config().link.rate_bps == 0


def test_a_trace_is_written_beside_the_file_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path, 'trace = "traces/a0.json"\n', "peer.toml")
    assert load_peer_config(path).trace == str(tmp_path / "traces" / "a0.json")
    assert load_peer_config().trace == ""
