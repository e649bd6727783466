"""The selection: which positions a query row attends to.

Chosen by score descending, then position ascending; emitted in ascending position, -1 last. Both are part of the
definition, because exact ties are common (a ReLU makes many scores 0) and a sum depends on its order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.errors import InvalidValue


def select_topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """The ``min(k, lengths[r])`` best positions of each row: float32 [R, T] -> int32 [R, k].

    Positions from ``lengths[r]`` (int64 [R]) on are not looked at, whatever their scores. A score of -inf is never
    chosen: callers exclude a position that way. -0.0 equals 0.0. Raises `InvalidValue` for a NaN below a row's length.
    """
    rows, tokens = scores.shape
    selection = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    if rows == 0 or tokens == 0:
        return selection
    position = torch.arange(tokens, device=scores.device)
    eligible = scores.masked_fill(position >= lengths[:, None], -torch.inf)
    best = eligible.topk(min(k, tokens), dim=1, sorted=False).values
    if bool(best.isnan().any()):  # a NaN ranks above every number
        raise InvalidValue("index score", "NaN", "a number")
    cutoff = best.amin(1, keepdim=True)
    chosen = (eligible >= cutoff) & (eligible != -torch.inf)
    tied = (chosen.sum(1) > k).nonzero().squeeze(1)  # more scores equal to the cutoff than places left
    if tied.numel():
        above = eligible[tied] > cutoff[tied]
        equal = chosen[tied] & ~above
        chosen[tied] = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    row, column = chosen.nonzero(as_tuple=True)  # by row, then by position
    before = chosen.sum(1).cumsum(0).roll(1)
    before[0] = 0
    selection[row, torch.arange(row.numel(), device=scores.device) - before[row]] = column.int()
    return selection
