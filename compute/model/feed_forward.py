"""The part of a layer that looks at one token only: a dense gated MLP, or a mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compute.kernels import tiles
from protocol.model import ModelConfig

Take = Callable[[str], Tensor]
"""Gives a tensor by its name within a layer, on the model's device."""


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, take: Take, prefix: str) -> None:
        gate = take(f"{prefix}.gate_proj.weight")
        self._inner = gate.shape[0]
        self._gate_up = tiles.Linear(gate, take(f"{prefix}.up_proj.weight"))
        self._down = tiles.Linear(take(f"{prefix}.down_proj.weight"))

    def forward(self, x: Tensor) -> Tensor:
        """float32 [16 n, hidden] -> [16 n, hidden]."""
        made = self._gate_up(x)
        return self._down(tiles.silu(made[:, : self._inner]).mul_(made[:, self._inner :]))


class MixtureOfExperts:
    """``num_experts_per_tok`` of the routed experts, chosen and weighted by token, and the shared one.

    Scores are sigmoids. ``e_score_correction_bias`` takes part in the choice only; the weights are the unbiased scores,
    normalised if ``norm_topk_prob``, times ``routed_scaling_factor``. Where experts form groups, only those of the
    ``topk_group`` groups with the largest sums of their two best are eligible. Equal scores choose the lower number.
    """

    def __init__(self, config: ModelConfig, take: Take) -> None:
        self._config = config
        self._router = tiles.Linear(take("mlp.gate.weight"))
        self._bias = take("mlp.gate.e_score_correction_bias")
        self._experts = [GatedMLP(take, f"mlp.experts.{expert}") for expert in range(config.n_routed_experts)]
        self._shared = GatedMLP(take, "mlp.shared_experts")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """float32 [16 n, hidden] -> [16 n, hidden]; rows from ``rows`` on are padding, and no expert is asked for them.

        Each expert computes the rows that chose it, in tiles.
        """
        chosen, weights = (of_row[:rows] for of_row in self.route(x))
        taken = chosen.shape[1]
        flat = chosen.reshape(-1)
        outputs = x.new_empty(flat.numel(), x.shape[1])  # one row for each (token, chosen expert)
        for expert in torch.unique(flat).tolist():
            entries = (flat == expert).nonzero().squeeze(1)
            mine = tiles.pad_rows(x[entries // taken])
            outputs[entries] = self._experts[expert].forward(mine)[: entries.numel()]
        outputs = outputs.view(rows, taken, -1).mul_(weights[:, :, None])
        total = self._shared.forward(x)
        for place in range(taken):  # added one by one: the order is that of the experts' numbers
            total[:rows] += outputs[:, place]
        return total

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers, ascending, and weights of each row's experts: int64 and float32 [16 n, experts per token]."""
        config = self._config
        scores = tiles.elementwise(torch.sigmoid, self._router(x))
        eligible = scores + self._bias
        if config.n_group > 1:
            groups = eligible.view(x.shape[0], config.n_group, -1)
            best_two = groups.topk(2, dim=2).values
            group_order = _descending(best_two[..., 0] + best_two[..., 1])
            refused = torch.ones_like(group_order, dtype=torch.bool)
            refused.scatter_(1, group_order[:, : config.topk_group], False)
            eligible = groups.masked_fill(refused[:, :, None], -torch.inf).view_as(scores)
        chosen = _descending(eligible)[:, : config.num_experts_per_tok].sort(dim=1).values
        weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return chosen, weights * config.routed_scaling_factor


def _descending(scores: Tensor) -> Tensor:
    """Columns of ``scores`` from the largest value of each row to the smallest, equal ones in their order."""
    return scores.sort(dim=1, descending=True, stable=True).indices
