from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from meshd.observe.log import Format, event, setup_logging


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)


def logged(form: Format, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    setup_logging(level, form, stream)
    return logging.getLogger("meshd.pipeline.router"), stream


def test_console_is_one_readable_line_per_event() -> None:
    logger, stream = logged("console")
    event(logger, "link_lost", level=logging.WARNING, peer="alpha", reason="timed\nout", wait_s=1 / 3)
    (line,) = stream.getvalue().splitlines()
    assert line[8:] == " WARN  pipeline.router: link_lost peer=alpha reason=timed\\nout wait_s=0.333333"
    datetime.strptime(line[:8], "%H:%M:%S")


def test_console_quotes_values_with_spaces() -> None:
    logger, stream = logged("console")
    event(logger, "left", why="no route", empty="")
    assert stream.getvalue().rstrip().endswith('left why="no route" empty=""')


def test_json_is_one_object_per_line() -> None:
    logger, stream = logged("json")
    event(logger, "step", stage=2, loss=3.25, path=io, level_name="x", event="hidden")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["event"] == "step"
    assert entry["field_event"] == "hidden"
    assert (entry["stage"], entry["loss"], entry["level"]) == (2, 3.25, "info")
    assert entry["logger"] == "meshd.pipeline.router"
    assert datetime.fromisoformat(entry["time"]).utcoffset() is not None


def test_events_below_the_level_are_not_written() -> None:
    logger, stream = logged("console", "warning")
    event(logger, "step")
    assert stream.getvalue() == ""


def test_a_bug_keeps_its_traceback() -> None:
    logger, stream = logged("json")
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        event(logger, "crashed", level=logging.ERROR, error=error)
    assert "RuntimeError: boom" in json.loads(stream.getvalue())["traceback"]


@pytest.mark.parametrize("name", ["hivemind.p2p.p2p_daemon", "transformers.modeling_utils", "httpx"])
def test_chatter_of_libraries_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Once imported (by another test), these libraries keep their records to themselves.
    monkeypatch.setattr(logging.getLogger(name.partition(".")[0]), "propagate", True)
    _, stream = logged("console")
    logging.getLogger(name).info("chatter")
    assert stream.getvalue() == ""
    logging.getLogger(name).error("trouble")
    assert "trouble" in stream.getvalue()


def test_setting_up_twice_writes_once() -> None:
    logged("console")
    logger, stream = logged("console")
    event(logger, "once")
    assert len(stream.getvalue().splitlines()) == 1
