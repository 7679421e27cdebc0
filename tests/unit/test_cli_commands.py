"""The `meshd` command line: what people type, what they get told, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshd import cli
from meshd.config.load import load_peer_config, load_run_spec
from meshd.observe.daemonfile import DaemonFile

ROOT = Path(__file__).parents[2]
RUN = '[model]\nsource = "m"\nstages = 3\n[data]\nsources = ["d"]\n[stop]\nsteps = 1\n'
LINK = "meshd:" + "0" * 40 + "@file:/tmp/nobody.json"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command line, run in this process."""
    before = sys.argv
    sys.argv = ["meshd", *arguments]
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_commands_and_exit_codes_without_loading_torch() -> None:
    program = (
        "import sys; sys.argv = ['meshd', '--help']\n"
        "import meshd.cli\n"
        "try: meshd.cli.main()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'grpc', 'hivemind', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for word in ("init", "run", "join", "status", "export", "swarm", "Exit codes", "130"):
        assert word in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, "meshd 0.1.0\n")


def test_init_writes_templates_that_load_and_replaces_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, peer = tmp_path / "r.toml", tmp_path / "p.toml"
    assert call(capsys, "init", str(run))[0] == 0
    assert call(capsys, "init", "--kind", "peer", str(peer))[0] == 0
    assert load_run_spec(run).model.source == "packaged:smollm2-135m"
    assert load_peer_config(peer) == load_peer_config()
    run.write_text("mine")
    code, _, err = call(capsys, "init", str(run))
    assert code == 2
    assert "is there already. Fix: choose another name, or add --force" in err
    assert run.read_text() == "mine"
    assert call(capsys, "init", "--force", str(run))[0] == 0
    assert run.read_text() != "mine"


def test_init_into_a_missing_directory_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "init", str(tmp_path / "none" / "r.toml"))
    assert code == 3
    assert "cannot write" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fly"], 2, "No such command"),
        (["run"], 2, "Missing argument"),
        (["run", "{run}", "--role", "boss"], 2, "boss"),
        (["run", "{none}"], 2, "no such file. Fix: write one with `meshd init"),
        (["run", "{bad}"], 2, "did you mean `stages`?"),
        (["run", "{run}", "--device", "gpu"], 2, "device = 'gpu'"),
        (["run", "{run}", "--registry", "x", "--peers", "y"], 2, "--registry = 'x': --peers says already"),
        (["join", "nonsense"], 2, "link = 'nonsense': it does not begin with `meshd:`"),
        (["swarm", "{run}", "--replicas", "1,2"], 2, "2 counts for 3 stages. Fix: write one count per stage"),
        (["swarm", "{run}", "--replicas", "1,0,1"], 2, "not a list of counts of 1 or more"),
        (["status", "--state-dir", "{none}"], 4, "no daemon runs on"),
        (["status", "--address", "127.0.0.1:1"], 4, "127.0.0.1:1"),
    ],
)
def test_what_a_person_does_wrong_is_one_message_and_a_code(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": tmp_path / "run.toml", "bad": tmp_path / "bad.toml", "none": tmp_path / "none.toml"}
    places["run"].write_text(RUN)
    places["bad"].write_text(RUN.replace("stages", "stage"))
    got, _, err = call(capsys, *[argument.format(**places) for argument in arguments])
    assert got == code
    # Usage errors are drawn in a box that wraps lines.
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_status_of_a_daemon_that_died_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    DaemonFile("127.0.0.1:9", ended.pid, "0" * 40, LINK).write(tmp_path)
    code, _, err = call(capsys, "status", "--state-dir", str(tmp_path))
    assert code == 4
    assert f"pid {ended.pid}, 127.0.0.1:9) is no longer running" in err


def test_status_shows_a_running_daemon_as_table_and_as_json(tmp_path: Path) -> None:
    """Against the fake daemon of the supervisor's tests, as processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    state = tmp_path / "seed"
    fake = [sys.executable, str(Path(__file__).with_name("fake_meshd.py")), "run", "run.toml"]
    daemon = subprocess.Popen([*fake, "--state-dir", str(state), "--name", "seed"], env=environment)
    try:
        while not (state / "ready").exists():
            assert daemon.poll() is None
        ask = [sys.executable, "-m", "meshd", "status", "--state-dir", str(state)]
        table = subprocess.run(
            ask, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        answer = subprocess.run([*ask, "--json"], env=environment, capture_output=True, text=True, timeout=60)
    finally:
        daemon.terminate()
        daemon.wait()
    assert "0 / 1,000 tokens (0 %)" in table
    assert "held-out 2.600" in table
    assert "seed" in table
    assert json.loads(answer.stdout)["run_name"] == "fake"


def test_the_environment_is_set_before_libraries_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GRPC_ENABLE_FORK_SUPPORT"):
        monkeypatch.delenv(name, raising=False)
    cli.prepare_environment(threads=3)
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("PASSIVE", "3")
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


def test_run_loop_gives_the_result_and_passes_errors() -> None:
    async def work(fail: bool) -> int:
        if fail:
            raise KeyError("x")
        return 7

    assert cli.run_loop(work(False)) == 7
    with pytest.raises(KeyError):
        cli.run_loop(work(True))


def test_interrupted_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "render_template", interrupted)
    assert call(capsys, "init", "/nowhere/x.toml")[0] == 130
