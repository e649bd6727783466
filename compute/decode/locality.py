"""How much consecutive selections overlap, as a knob for synthetic runs, and what they really were.

With random weights the selection jumps far more than a trained model's. `Blend` mixes each index query with its
predecessor, on the device, the same in every mode; its state rolls back with rejected drafts. Every report of a run
with it says so, and gives the overlap and the misses that resulted. Recorded selections, for replay, are in
``compute.decode.selections``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from compute.kernels.blend import blend
from compute.kernels.choice import KernelsName
from compute.step import StepInputs
from protocol.errors import InvalidValue

PRESETS = {"about1": 0.998, "overlap40": 0.88, "natural": 0.0}
"""What is kept of a predecessor: for about 1 % of misses with 32,768 hot rows of 50K, for the 35 to 50 % overlap of
consecutive steps that trained models show, and for none."""


class QueriedStep(Protocol):
    """What a blend needs of a step."""

    inputs: StepInputs
    accepted: Tensor


class Blend:
    """The blend of all groups of one step: an ``on_query`` of `compute.decode.step.DecodeStep`.

    Its state belongs to the step's places and follows ``accepted``: rows that did not stay leave no trace, and where
    ``accepted`` is 0, as after joining, a query has no predecessor.
    """

    def __init__(self, keep: float, *, kernels: KernelsName | None = None) -> None:
        """``keep`` is the correlation of unrelated queries with their predecessors, 0 to below 1."""
        if not 0.0 <= keep < 1.0:
            raise InvalidValue("blend", keep, "0 to below 1")
        self.keep = keep
        self._kernels = kernels
        self._step: QueriedStep | None = None
        self._state = torch.empty(0)

    def attach(self, step: QueriedStep) -> None:
        """Serve ``step``; to be called before its first replay."""
        groups, places, rows, heads, size = step.inputs.index_query.shape
        device = step.inputs.index_query.device
        self._state = torch.zeros((groups, places, rows + 1, heads * (size + 1)), device=device)
        self._step = step

    def __call__(self, batch: int, group: int) -> None:
        """Enqueue the blend of the queries of ``group`` of the first ``batch`` places."""
        assert self._step is not None, "a blend serves the step that it is attached to"
        if self.keep == 0.0:
            return
        query, weights = self._step.inputs.index_query[group, :batch], self._step.inputs.index_weights[group, :batch]
        accepted = self._step.accepted[:batch]
        blend(self._state[group, :batch], query, weights, accepted, self.keep, kernels=self._kernels)
