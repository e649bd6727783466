"""Index queries blended with their predecessors, for synthetic runs: the selections of consecutive rows overlap more.

    state[r] = keep * state[r - 1] + fresh * query[r],    fresh = sqrt(1 - keep ** 2)

A query is its heads' values and its head weights. ``fresh`` keeps the length of unrelated queries. The state before a
step's first row is that of the last row that stayed of the step before, so rows that were rejected leave no trace.
"""

from __future__ import annotations

import torch
from torch import Tensor


def blend(state: Tensor, query: Tensor, weights: Tensor, accepted: Tensor, keep: float) -> None:
    """Replace the queries of a step by the blended ones, in place.

    ``state`` float32 [batch, rows + 1, heads * 129] holds the states after 0, 1, … rows of the last step; ``query`` is
    bfloat16 [batch, rows, heads, 128], ``weights`` float32 [batch, rows, heads], and ``accepted`` int64 [batch] how
    many rows of the last step stayed. Where that is 0 there was no step before, and the first query stays as it is.
    """
    batch, rows = query.shape[:2]
    new = torch.cat((query.flatten(2).float(), weights), dim=2)  # [batch, rows, heads * 129]
    begins = (accepted == 0)[:, None]
    before = torch.where(begins, 0.0, state[torch.arange(batch, device=state.device), accepted])
    state[:, 0] = before
    for row in range(rows):
        blended = keep * before + (1.0 - keep * keep) ** 0.5 * new[:, row]
        before = torch.where(begins, new[:, row], blended) if row == 0 else blended
        state[:, row + 1] = before
    values = query[0, 0].numel()
    query.copy_(state[:, 1:, :values].unflatten(2, query.shape[2:]))
    weights.copy_(state[:, 1:, values:])
