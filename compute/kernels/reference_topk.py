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
    position = torch.arange(tokens, device=scores.device)
    eligible = (position < lengths[:, None]) & (scores != -torch.inf)
    if bool((eligible & scores.isnan()).any()):
        raise InvalidValue("index score", "NaN", "a number")
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 a 0.0
    ordered = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)  # uint32 in the order of the floats
    ranked = (ordered << 31) | (0x7FFFFFFF - position)  # no two alike: the lower position ranks higher
    ranked = torch.where(eligible, ranked, -1)
    best = ranked.topk(min(k, tokens), dim=1, sorted=False).values
    end = torch.iinfo(torch.int32).max
    chosen = torch.where(best < 0, end, 0x7FFFFFFF - (best & 0x7FFFFFFF)).sort(dim=1).values
    selection = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    selection[:, : chosen.shape[1]] = chosen.where(chosen < end, -1)
    return selection
