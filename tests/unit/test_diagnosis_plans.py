"""Which codecs `meshd codec` measures."""

from __future__ import annotations

import pytest

from meshd.config.runspec import BoundarySpec, WireSpec
from meshd.diagnosis.plans import Pair, parse_plan, reference_plans, spec_plan
from meshd.errors import ConfigError
from meshd.wire import codec_named


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("int8", [("int8", "int8")] * 2),
        ("topk:keep=0.1,values=bf16 / int4", [("topk:keep=0.1,values=bf16", "int4")] * 2),
        ("spectral:bits=2/int4; dense", [("spectral:bits=2", "int4"), ("dense", "dense")]),
    ],
)
def test_a_plan_is_one_pair_or_one_for_each_boundary(text: str, pairs: list[tuple[str, str]]) -> None:
    plan = parse_plan(text, 2)
    assert plan.name == text
    assert plan.pairs == tuple(Pair(*pair) for pair in pairs)
    assert plan.needs_prior == ("spectral" in text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gzip", "no such codec"),
        ("dense/", "'dense/' is no pair of codecs"),
        ("dense/int8/int4", "is no pair of codecs"),
        ("dense;int8;int4", "3 pairs for 2 boundaries"),
        ("topk:keep=2", "keep=2"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_text(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan(text, 2)
    assert (caught.value.field, caught.value.value) == ("--codec", text)
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_the_run_specs_codecs_by_boundary() -> None:
    """Those that need priors too; boundaries without a table of their own take the general one."""
    wire = WireSpec(
        forward="spectral", backward="int8", boundary={1: BoundarySpec(forward="int4", backward="dense")}
    )
    assert spec_plan(wire, 3).pairs == (("spectral", "int8"), ("int4", "dense"), ("spectral", "int8"))
    assert spec_plan(wire, 3).name == "run spec"
    assert spec_plan(WireSpec(backward="int8"), 3).name == "run spec (dense/int8)"
    wrong = WireSpec(boundary={1: BoundarySpec(backward="nothing")})
    with pytest.raises(ConfigError, match=r"wire\.boundary\.1\.backward = 'nothing'"):
        spec_plan(wrong, 3)


def test_references_of_one_ratio_take_equal_bytes() -> None:
    rows, columns, hidden = 4, 128, 576
    plans = {plan.name: plan for plan in reference_plans(rows, columns, hidden, 2, 3)}
    assert list(plans)[:3] == ["dense", "int8", "int4"]
    for ratio in (16, 32):
        room = 4 * hidden / ratio * rows * columns
        for family in ("lloyd", "leading", "topk", "random"):
            pairs = plans[f"{family} {ratio}x"].pairs
            assert len(pairs) == 3
            payload = sum(codec_named(name).wire_bytes((rows, columns, hidden)) for name in pairs[0])
            taken = payload + 200 + 2 * rows * columns
            # One coordinate more or less is two bytes a token.
            assert room - 3 * rows * columns < taken <= room, (family, ratio)
        bits = [float(name.partition("bits=")[2]) for name in plans[f"spectral {ratio}x"].pairs[0]]
        assert sum(bits) * hidden / 8 * rows * columns + 200 + 2 * rows * columns == pytest.approx(room, 1e-3)
        assert bits[0] == pytest.approx(3 * bits[1], 1e-2)


def test_references_that_do_not_fit_are_left_out() -> None:
    """Of 32 bf16 values a 32nd is 4 bytes a token: nothing is left beside the token's id."""
    names = [plan.name for plan in reference_plans(1, 16, 32, 4, 1)]
    assert names[:3] == ["dense", "int8", "int4"]
    assert not any(name.endswith("32x") for name in names)
