"""The outer step: Nesterov momentum over exchanges, of the coordinates that each covers."""

from __future__ import annotations

import pytest
import torch
from gossip_helpers import Replica, Swarm

from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters

SIZES = {"a": 5, "b": 12}
COUNT = 17


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(size, generator=generator)) for name, size in SIZES.items()}


def flat_of(mine: dict[str, torch.nn.Parameter], final: bool = False) -> FlatParameters:
    base = {name: torch.zeros_like(one.detach()) for name, one in mine.items()}
    return FlatParameters(mine, base, lambda: final)


def vector(mine: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([one.detach() for one in mine.values()]).clone()


def trained(mine: dict[str, torch.nn.Parameter], generator: torch.Generator) -> None:
    """Some inner steps, and an average."""
    with torch.no_grad():
        for parameter in mine.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_without_momentum_it_does_nothing_and_keeps_nothing() -> None:
    mine, generator = parameters(), torch.Generator().manual_seed(1)
    outer = OuterStep(flat_of(mine), 0.0)
    for _ in range(3):
        trained(mine, generator)
        before = vector(mine)
        outer.averaged(torch.arange(COUNT), carry=True)
        assert torch.equal(vector(mine), before)
    assert not [held for held in vars(outer).values() if isinstance(held, dict) and held]


@pytest.mark.parametrize("momentum", [0.3, 0.9])
def test_it_is_nesterovs_momentum_of_every_coordinate_alone(momentum: float) -> None:
    """Against the plain sums in float64, over exchanges of some of the coordinates, some of which begin anew."""
    mine, generator = parameters(), torch.Generator().manual_seed(1)
    outer = OuterStep(flat_of(mine), momentum)
    last: dict[int, float] = {}
    m = dict.fromkeys(range(COUNT), 0.0)
    carried = 0
    for number in range(40):
        trained(mine, generator)
        covered = [at for at in range(COUNT) if (at + number) % 3 == 0]
        carry = number % 13 != 12
        expected = vector(mine).double()
        # A tensor's values are known from the first exchange of any of them.
        for at in range(COUNT):
            if at not in last and any((at < 5) == (other < 5) for other in covered):
                last[at] = expected[at].item()
        for at in covered:
            averaged = expected[at].item()
            m[at] = momentum * m[at] + averaged - last[at] if carry else 0.0
            expected[at] = last[at] = averaged + momentum * m[at]
            carried += m[at] != 0.0
        outer.averaged(torch.tensor(covered), carry)
        # bf16 keeps 8 bits of the momentum. What is left of its rounding does not add up: it fades with momentum.
        found = vector(mine).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=2**-8 * momentum * 10 * 0.3)
        # The reference goes on from what is there, so that each exchange is judged alone.
        for at in covered:
            last[at] = found[at].item()
    assert carried > 100


def test_momentum_is_forgotten_when_it_begins_anew() -> None:
    mine = {"a": torch.nn.Parameter(torch.zeros(4))}
    outer = OuterStep(flat_of(mine), 0.5)
    every = torch.arange(4)
    outer.averaged(every, carry=True)
    mine["a"].data.add_(1.0)
    outer.averaged(every, carry=True)
    assert mine["a"].tolist() == [1.5] * 4
    mine["a"].data.add_(8.0)  # not its own work
    outer.averaged(every, carry=False)
    assert mine["a"].tolist() == [9.5] * 4
    # Nothing was done since, and neither the 8 nor the 1.5 is carried on.
    outer.averaged(every, carry=True)
    assert mine["a"].tolist() == [9.5] * 4
    mine["a"].data.add_(1.0)
    outer.averaged(every, carry=True)
    assert mine["a"].tolist() == [11.0] * 4


def test_the_first_exchange_of_a_coordinate_counts_from_the_first_of_its_tensor() -> None:
    mine = {"a": torch.nn.Parameter(torch.zeros(4))}
    outer = OuterStep(flat_of(mine), 0.5)
    outer.averaged(torch.tensor([0, 2]), carry=True)
    mine["a"].data.add_(1.0)
    outer.averaged(torch.tensor([1, 3]), carry=True)
    assert mine["a"].tolist() == [1.0, 1.5, 1.0, 1.5]


def test_the_runs_result_is_not_moved() -> None:
    mine = {"a": torch.nn.Parameter(torch.zeros(4))}
    final = False
    base = {"a": torch.zeros(4)}
    outer = OuterStep(FlatParameters(mine, base, lambda: final), 0.5)
    every = torch.arange(4)
    outer.averaged(every, carry=True)
    mine["a"].data.add_(1.0)
    final = True
    outer.averaged(every, carry=True)
    assert mine["a"].tolist() == [1.0] * 4
    final = False  # the test could fail
    outer.averaged(every, carry=True)
    assert mine["a"].tolist() == [1.5] * 4


@pytest.mark.parametrize("subset", [1, 2])
def test_replicas_with_momentum_get_further_where_progress_is_slow(subset: int) -> None:
    """A slope that is nearly the same everywhere: momentum 0.5 doubles the step in the long run."""

    def left(momentum: float) -> float:
        """Root mean square distance to the optimum at the end; 1 at the beginning."""
        made = [
            Replica(
                f"r{at}",
                # As many samples as of a model's layer: fewer tell distances badly.
                {f"w{layer}": torch.nn.Parameter(torch.ones(64)) for layer in range(8)},
                bits=4,
                subset=subset,
                momentum=momentum,
            )
            for at in range(4)
        ]
        generator = torch.Generator().manual_seed(0)
        with Swarm(made) as swarm:
            for step in range(60):
                for replica in made:
                    noise = 0.2 * torch.randn(512, generator=generator)
                    replica.put(replica.vector - 0.01 * (replica.vector + noise))
                    replica.stepped()
                if step % 2 == 1:
                    swarm.exchange_all()
            return swarm.mean.square().mean().sqrt().item()

    plain, nesterov = left(0.0), left(0.5)
    assert plain == pytest.approx(0.99**60, rel=0.02)
    # At full strength 0.99 ** 120 = 0.30; the first exchanges only gather momentum, and some partners are far.
    assert 0.99**120 * 0.95 <= nesterov <= 0.38
