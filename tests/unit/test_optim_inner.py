"""The inner optimizer equals plain AdamW on the mean over tokens, and refuses what is not finite."""

from __future__ import annotations

import pytest
import torch

from meshd.config.runspec import OptimSpec
from meshd.errors import MismatchError
from meshd.optim.inner import InnerOptimizer

SPEC = OptimSpec(lr=1e-2, weight_decay=0.1, clip=0.5)
SHAPES = {"layer.weight": (4, 3), "layer.bias": (3,), "norm.weight": (4,), "embed.weight": (5, 4)}


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
    }


def gradients(generator: torch.Generator, size: float = 1.0) -> dict[str, torch.Tensor]:
    """Mean gradients of one microbatch."""
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def add(optimizer: InnerOptimizer, into: dict[str, torch.nn.Parameter], mean: dict, tokens: int) -> None:
    """As a backward pass does: sums over label tokens."""
    for name, parameter in into.items():
        total = mean[name] * tokens
        parameter.grad = total if parameter.grad is None else parameter.grad + total
    optimizer.added(tokens)


def values(of: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in of.items()}


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_steps_equal_plain_adamw_on_the_mean_over_tokens(clip: float) -> None:
    """Unequal microbatches count by their label tokens; weight decay touches matrices only."""
    spec = SPEC.model_copy(update={"clip": clip})
    mine, plain = parameters(), parameters()
    optimizer = InnerOptimizer(mine, spec)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.values() if p.dim() == 2], "weight_decay": spec.weight_decay},
            {"params": [p for p in plain.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=spec.betas,
        eps=spec.eps,
    )
    generator = torch.Generator().manual_seed(1)
    for step, sizes in enumerate([(7, 1), (3,), (2, 5, 11), (1, 1), (64, 3)]):
        lr = 1e-2 / (step + 1)
        microbatches = [(gradients(generator), tokens) for tokens in sizes]
        for mean, tokens in microbatches:
            add(optimizer, mine, mean, tokens)
        assert optimizer.tokens == sum(sizes)
        for name, parameter in plain.items():
            parameter.grad = sum(mean[name] * tokens for mean, tokens in microbatches) / sum(sizes)
        norm = torch.nn.utils.clip_grad_norm_(list(plain.values()), clip or float("inf"))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        report = optimizer.step(lr)
        assert (report.tokens, report.lr, report.skipped) == (sum(sizes), lr, False)
        assert report.norm == pytest.approx(norm.item(), rel=1e-5)
        assert optimizer.tokens == 0
        for name, parameter in plain.items():
            torch.testing.assert_close(mine[name], parameter, rtol=1e-5, atol=1e-6)


def test_weight_decay_moves_matrices_only() -> None:
    mine = parameters()
    before = values(mine)
    optimizer = InnerOptimizer(mine, SPEC)
    add(optimizer, mine, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, 4)
    optimizer.step(0.5)
    for name, parameter in mine.items():
        factor = 1 - 0.5 * SPEC.weight_decay if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_changes_nothing(value: float) -> None:
    mine = parameters()
    optimizer = InnerOptimizer(mine, SPEC)
    generator = torch.Generator().manual_seed(2)
    add(optimizer, mine, gradients(generator), 5)
    optimizer.step(1e-2)
    before, moments = values(mine), {k: v.clone() for k, v in optimizer.state().items()}

    poisoned = gradients(generator)
    poisoned["norm.weight"][1] = value
    add(optimizer, mine, poisoned, 6)
    add(optimizer, mine, gradients(generator), 1)
    report = optimizer.step(1e-2)
    assert (report.skipped, report.tokens, optimizer.tokens) == (True, 7, 0)
    assert all(torch.equal(mine[name], value) for name, value in before.items())
    assert all(torch.equal(optimizer.state()[key], value) for key, value in moments.items())

    # The poison has gone with it: the next step is that of an optimizer which never saw it.
    clean = gradients(generator)
    twin = parameters()
    other = InnerOptimizer(twin, SPEC)
    with torch.no_grad():
        for name, parameter in twin.items():
            parameter.copy_(before[name])
    other.restore(moments)
    for one, into in ((optimizer, mine), (other, twin)):
        add(one, into, clean, 3)
        assert not one.step(1e-2).skipped
    assert all(torch.equal(mine[name], twin[name]) for name in mine)


def test_a_step_without_tokens_or_gradients_does_nothing() -> None:
    mine = parameters()
    before = values(mine)
    optimizer = InnerOptimizer(mine, SPEC)
    assert optimizer.step(1.0).skipped
    optimizer.added(4)
    assert optimizer.step(1.0).skipped
    assert all(torch.equal(mine[name], value) for name, value in before.items())


def test_discarding_says_what_was_lost() -> None:
    mine = parameters()
    optimizer = InnerOptimizer(mine, SPEC)
    add(optimizer, mine, gradients(torch.Generator().manual_seed(0)), 9)
    assert optimizer.discard() == 9
    assert optimizer.tokens == 0
    assert all(not parameter.grad.any() for parameter in mine.values())


def test_restored_state_continues_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    mine = parameters()
    optimizer = InnerOptimizer(mine, SPEC)
    assert optimizer.state() == {}
    for _ in range(3):
        add(optimizer, mine, gradients(generator), 4)
        optimizer.step(1e-2)
    state = {key: value.clone() for key, value in optimizer.state().items()}
    assert sorted(state) == sorted(
        f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in SHAPES
    )

    twin = {name: torch.nn.Parameter(value) for name, value in values(mine).items()}
    other = InnerOptimizer(twin, SPEC)
    other.restore(state)
    for _ in range(3):
        mean = gradients(generator)
        for one, into in ((optimizer, mine), (other, twin)):
            add(one, into, mean, 4)
            one.step(1e-2)
    assert all(torch.equal(mine[name], twin[name]) for name in mine)
    # A copy was taken: the donor's tensors are not trained on by two peers.
    assert state["step/layer.weight"].item() == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("exp_avg/other.weight", torch.zeros(4, 3), "'exp_avg/other.weight' belongs to no parameter"),
        ("momentum/layer.weight", torch.zeros(4, 3), "'momentum/layer.weight' belongs to no parameter"),
        ("layer.weight", torch.zeros(4, 3), "'layer.weight' belongs to no parameter"),
        (
            "exp_avg/layer.weight",
            torch.zeros(3, 4),
            r"'exp_avg/layer.weight' has shape \[3, 4\], expected \[4, 3\]",
        ),
        (
            "exp_avg/layer.weight",
            torch.full((4, 3), torch.inf),
            "'exp_avg/layer.weight' holds values that are not fin",
        ),
        ("exp_avg/layer.weight", torch.zeros(4, 3), "of 'layer.weight' lacks exp_avg_sq, step"),
        ("step/layer.weight", torch.zeros(4, 3), r"'step/layer.weight' has shape \[4, 3\], expected \[\]"),
    ],
)
def test_state_of_another_stage_is_refused_by_name_before_anything_changes(
    key: str, value: torch.Tensor, message: str
) -> None:
    """C07."""
    optimizer = InnerOptimizer(parameters(), SPEC)
    good = {f"{kind}/norm.weight": torch.ones(4) for kind in ("exp_avg", "exp_avg_sq")}
    good["step/norm.weight"] = torch.tensor(2.0)
    with pytest.raises(MismatchError, match=message):
        optimizer.restore({**good, key: value})
    assert optimizer.state() == {}


def test_memory_that_ends_between_the_moments_of_a_parameter_does_not_end_all_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AdamW makes a parameter's moments at its first step, and never looks again whether it has both."""
    mine, generator = parameters(), torch.Generator().manual_seed(1)
    optimizer = InnerOptimizer(mine, SPEC)
    mean, before = gradients(generator), values(mine)
    made = []
    zeros = torch.zeros_like

    def short(*args: object, **options: object) -> torch.Tensor:
        made.append(1)
        return torch.empty(1 << 60, dtype=torch.uint8) if len(made) == 4 else zeros(*args, **options)  # type: ignore[arg-type]

    add(optimizer, mine, mean, 3)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", short)
        with pytest.raises(RuntimeError, match="allocate memory"):
            optimizer.step(1e-2)
    optimizer.discard()
    assert all(torch.equal(before[name], p) for name, p in mine.items())
    other = parameters()
    fresh = InnerOptimizer(other, SPEC)
    for each, into in ((optimizer, mine), (fresh, other)):
        add(each, into, mean, 3)
        assert not each.step(1e-2).skipped
    for name, parameter in mine.items():
        assert torch.equal(parameter, other[name]), name


def test_gradients_are_corrected_as_means_and_clipped_after() -> None:
    mine, plain = parameters(), parameters()
    optimizer, other = InnerOptimizer(mine, SPEC), InnerOptimizer(plain, SPEC)
    mean = gradients(torch.Generator().manual_seed(2))
    changed = {name: 3 * value if name == "layer.weight" else value for name, value in mean.items()}
    seen: dict[str, torch.Tensor] = {}

    def correct(name: str, gradient: torch.Tensor) -> torch.Tensor:
        seen[name] = gradient.clone()
        return 3 * gradient if name == "layer.weight" else gradient

    add(optimizer, mine, mean, 7)
    add(other, plain, changed, 7)
    report, expected = optimizer.step(1e-2, correct), other.step(1e-2)
    assert report.norm == pytest.approx(expected.norm)
    assert report.norm > SPEC.clip
    for name, parameter in mine.items():
        torch.testing.assert_close(seen[name], mean[name])
        torch.testing.assert_close(parameter, plain[name])


def test_a_correction_that_is_not_finite_is_no_step() -> None:
    mine = parameters()
    optimizer = InnerOptimizer(mine, SPEC)
    before = values(mine)
    add(optimizer, mine, gradients(torch.Generator().manual_seed(2)), 7)
    report = optimizer.step(1e-2, lambda name, gradient: gradient * float("nan"))
    assert report.skipped
    assert optimizer.tokens == 0
    assert all(torch.equal(value, before[name]) for name, value in values(mine).items())
