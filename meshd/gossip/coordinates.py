"""Which coordinates of a stage's flat vector an exchange covers. Normative (docs/gossip.md): both sides compute them.

The vector is cut into blocks of `subset` coordinates; an exchange covers one of each block. Over a run the choices are
`subset` disjoint sets, named by their offset, that together are all coordinates: a peer that takes the offset which it
has not exchanged for longest leaves no coordinate behind, as choices at random would (SPARTA, Exo Labs 2025: a random
0.05 to 0.5 % a step), and knows exactly which of its steps others have by now.
"""

from __future__ import annotations

import hashlib
import random

import torch

from meshd.gossip.modular import SAMPLES
from meshd.splitmix import WORD, mix, outputs, outputs_at, top_bits

MOST_SUBSET = 4096
# Bits of a hash that choose within a block: enough that none of at most 4096 places is favoured by more than 1 in 2^19.
_BITS = 31


def subset_seed(run_id: str, stage: int) -> int:
    """What the places within blocks follow from, for all exchanges of one stage of a run."""
    return int.from_bytes(hashlib.sha256(f"gossip {run_id} {stage}".encode()).digest()[:8], "little")


def covered(first: int, end: int, subset: int, offset: int, seed: int) -> torch.Tensor:
    """Coordinates of blocks `first` to `end` - 1 that an exchange covers: int64 (end - first,), ascending.

    That of block b is b * subset + (h(b) + offset) mod subset. Where the vector ends within the last block, it may lie
    beyond the end.
    """
    return _within(torch.arange(first, end), subset, offset, seed)


def sampled(starts: torch.Tensor, subset: int, offset: int, seed: int, exchange: int) -> torch.Tensor:
    """Coordinates that both sides of an exchange send in full, of every tensor: int64 (tensors, SAMPLES), each row
    ascending, repeats possible. Covered ones, but for tensors that hold no whole block.

    starts: (tensors + 1,), where tensors begin and where the last one ends. Tensors are not empty.
    """
    tensors = len(starts) - 1
    words = outputs(mix((exchange + 1) % WORD), 0, tensors * SAMPLES)
    draws = top_bits(words, _BITS).view(tensors, SAMPLES)
    starts, ends = starts[:-1, None], starts[1:, None]
    first, last = (starts + subset - 1) // subset, ends // subset
    blocks = first + draws % (last - first).clamp(min=1)
    anywhere = starts + draws % (ends - starts)
    positions = torch.where(last > first, _within(blocks, subset, offset, seed), anywhere)
    return positions.sort(dim=1).values


def _within(blocks: torch.Tensor, subset: int, offset: int, seed: int) -> torch.Tensor:
    places = top_bits(outputs_at(mix(seed % WORD), blocks), _BITS).add_(offset).remainder_(subset)
    return places.add_(blocks * subset)


class Coverage:
    """What of a replica its partners have: for every offset, when these coordinates were last exchanged, and the
    additions (`Keeping`) that were in its weights by then."""

    def __init__(self, subset: int, version: int) -> None:
        """version: inner steps in the replica's weights now."""
        self.subset = subset
        self._additions = [0] * subset
        self._versions = [version] * subset
        self._order = [0] * subset  # number of the exchange that covered an offset last; 0: none did
        self._exchanges = 0

    def next(self, rng: random.Random) -> int:
        """The offset to exchange now: of those that were not for longest, any."""
        oldest = min(self._order)
        return rng.choice([offset for offset, order in enumerate(self._order) if order == oldest])

    def exchanged(self, subset: int, offset: int, additions: int, version: int) -> int:
        """An exchange is done. additions, version: in the weights when it began. Returns up to which addition all
        coordinates have been exchanged by now."""
        self._exchanges += 1
        for one in self._whole(subset, offset):
            self._additions[one], self._versions[one], self._order[one] = additions, version, self._exchanges
        return min(self._additions)

    def since(self, subset: int, offset: int, version: int) -> int | None:
        """Inner steps since these coordinates were last exchanged, or since the beginning; None: not known."""
        whole = self._whole(subset, offset)
        return version - min(self._versions[one] for one in whole) if whole else None

    def _whole(self, subset: int, offset: int) -> list[int]:
        """Offsets of this replica's that an exchange covers. Of a partner's choice of another subset it has parts of
        all, none whole."""
        if subset == self.subset:
            return [offset]
        return list(range(self.subset)) if subset == 1 else []
