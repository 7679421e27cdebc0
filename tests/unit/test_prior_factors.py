"""Bases and shares in a few bits: what comes back is near, whatever the basis looks like."""

from __future__ import annotations

import pytest
import torch

from meshd.errors import MismatchError
from meshd.priors.factors import basis_bytes, packed_basis, packed_shares, unpacked_basis, unpacked_shares


def orthonormal(rows: int, rank: int, spikes: bool) -> torch.Tensor:
    made = torch.randn((rows, rank), generator=torch.Generator().manual_seed(rows))
    if spikes:  # a few dimensions hold nearly everything
        made[:: rows // rank] *= 100
    return torch.linalg.qr(made).Q


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize(("rows", "rank"), [(576, 16), (1536, 40), (97, 8), (192, 1)])
def test_a_basis_comes_back_near_in_three_bits(rows: int, rank: int, spikes: bool) -> None:
    basis = orthonormal(rows, rank, spikes)
    packed = packed_basis(basis)
    assert (packed.dtype, packed.shape) == (torch.uint8, (basis_bytes(rows, rank),))
    assert len(packed) == -(-3 * rows * rank // 8)
    back = unpacked_basis(packed, rows, rank)
    # A Gaussian in 3 bits keeps 0.9655 of its energy, and so much of the cosine's square.
    assert (torch.cosine_similarity(back, basis, dim=0) > 0.96).all()
    assert back.norm(dim=0).sub(0.98).abs().max() < 0.15
    assert (back.T @ back).fill_diagonal_(0.0).abs().max() < 0.2


def test_one_coordinate_alone_comes_back() -> None:
    """The most uneven basis that there is: without a transform its one value would be cut to a tenth."""
    basis = torch.eye(600, 4)
    assert (torch.cosine_similarity(unpacked_basis(packed_basis(basis), 600, 4), basis, dim=0) > 0.9).all()


def test_bytes_that_are_no_basis_are_refused() -> None:
    packed = packed_basis(orthonormal(97, 8, False))
    with pytest.raises(MismatchError):
        unpacked_basis(packed[:-1], 97, 8)
    with pytest.raises(MismatchError):
        unpacked_basis(packed_basis(orthonormal(97, 1, False)).index_fill(0, torch.tensor([36]), 255), 97, 1)


def test_shares_come_back_within_an_eighth_of_an_octave() -> None:
    shares = torch.cat([torch.tensor([0.0, 1.0, 2.0**-31, 2.0**-40]), torch.rand(1000) ** 8 + 2.0**-30])
    back = unpacked_shares(packed_shares(shares.clamp_max(1.0)))
    assert back[0] == back[3] == 0
    torch.testing.assert_close(back[4:], shares[4:].clamp_max(1.0), rtol=0.045, atol=0)
    assert back[1] == 1.0
    assert back[2] == 2.0**-31
