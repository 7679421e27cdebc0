"""The outer step: Nesterov momentum over exchanges.

What replicas do between two exchanges of a coordinate, averaged, is taken for a gradient, as in DiLoCo (Douillard et
al., 2023): m = momentum * m + (averaged - value after the last exchange); value = averaged + momentum * m. Averaging
takes noise out of that displacement, so that it bears a longer step than each replica's own. What differs: pairs
average instead of all (as in NoLoCo, Kolehmainen et al., 2025, without its term that pulls pairs together: exchanges
of what momentum drives apart do that), a part of the coordinates at a time, and the outer learning rate is 1.

It is state of one replica alone, 6 bytes a parameter: partners need not know of it, a newcomer begins without momentum.
"""

from __future__ import annotations

import torch

from meshd.gossip.values import FlatParameters


class OuterStep:
    """Used in the device's thread only. momentum: 0 to below 1; 0 keeps no state and does nothing."""

    def __init__(self, flat: FlatParameters, momentum: float) -> None:
        self._flat, self._share = flat, momentum
        self._last: dict[str, torch.Tensor] = {}
        self._momentum: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def averaged(self, positions: torch.Tensor, carry: bool) -> None:
        """The values at these ascending positions have just been averaged. carry: go on as before; else begin anew, for
        what has changed was not done between two exchanges."""
        if not self._share or self._flat.final():
            return
        for name, parameter, local in self._flat.pieces(positions):
            if name not in self._last:
                self._last[name] = parameter.float().clone()
                self._momentum[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            last, momentum = self._last[name], self._momentum[name]
            at = local.to(parameter.device)
            if carry:
                new = momentum[at].float().mul_(self._share).add_(parameter[at].float() - last[at])
                momentum[at] = new.bfloat16()
                parameter.index_add_(0, at, new.mul_(self._share).to(parameter.dtype))
            else:
                momentum[at] = 0.0
            last[at] = parameter[at].float()
