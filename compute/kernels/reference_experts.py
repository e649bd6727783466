"""The mixture of experts: the router's choice, and the weighted sum of the chosen experts in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import tiles
from compute.kernels.matrix import Matrix
from compute.kernels.reference_linear import linear
from compute.kernels.reference_norms import silu_mul
from protocol.model import ModelConfig


def route(logits: Tensor, bias: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Numbers, ascending, and weights of each row's experts: int32 and float32 [M, experts per token].

    Scores are the sigmoids of ``logits``, float32 [M, E]. ``bias`` takes part in the choice only; the weights are the
    unbiased scores, normalised if ``norm_topk_prob``, times ``routed_scaling_factor``. Where experts form groups, only
    those of the ``topk_group`` groups with the largest sums of their two best are eligible. Equal scores choose the
    lower number.
    """
    rows = logits.shape[0]
    scores = tiles.elementwise(torch.sigmoid, tiles.pad_rows(logits))[:rows]
    eligible = scores + bias
    if config.n_group > 1:
        groups = eligible.view(rows, config.n_group, -1)
        best_two = groups.topk(2, dim=2).values
        group_order = _descending(best_two[..., 0] + best_two[..., 1])
        refused = torch.ones_like(group_order, dtype=torch.bool)
        refused.scatter_(1, group_order[:, : config.topk_group], False)
        eligible = groups.masked_fill(refused[:, :, None], -torch.inf).view_as(scores)
    chosen = _descending(eligible)[:, : config.num_experts_per_tok].sort(dim=1).values
    weights = scores.gather(1, chosen)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return chosen.int(), weights * config.routed_scaling_factor


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix, shared: tuple[Matrix, Matrix] | None
) -> Tensor:
    """The shared expert's output plus each chosen one's times its weight, added in that order: float32 [M, H].

    What goes into the second product of an expert is rounded to bfloat16.
    """
    total = x.new_zeros(x.shape, dtype=torch.float32) if shared is None else _expert(x, *shared)
    for place in range(chosen.shape[1]):
        numbers = chosen[:, place]
        for number in torch.unique(numbers).tolist():
            mine = (numbers == number).nonzero().squeeze(1)
            total[mine] += weights[mine, place, None] * _expert(x[mine], gate_up[number], down[number])
    return total


def _expert(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
    return linear(silu_mul(linear(x, gate_up)).bfloat16(), down)


def _descending(scores: Tensor) -> Tensor:
    """Columns of ``scores`` from the largest value of each row to the smallest, equal ones in their order."""
    return scores.sort(dim=1, descending=True, stable=True).indices
