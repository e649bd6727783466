"""Pipeline stages: each has a range of whole index groups, and hands its activations to the next.

What goes from stage to stage is the float32 residual stream; the last stage tells the others what it sampled. The sums
are those of one process, so the bits are too.

The stages of one step run one after the other. More steps than one at a time would fill the wait; they need sessions
that do not wait for each other, and so a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compute.decode.decoder import FastDecoder
from compute.decode.step import DecodeStep, StepOutput
from compute.decode.weights import DecodeWeights
from compute.kernels.choice import KernelsName
from compute.parallel.peers import Peers
from protocol.errors import InvalidValue
from protocol.layout import IndexGroup, PageFormat


def cut_layers(groups: Sequence[IndexGroup], stages: int) -> list[tuple[int, int]]:
    """First and end layer of each stage: whole groups, as many layers each as the groups allow.

    Raises `InvalidValue` for more stages than groups.
    """
    if not 1 <= stages <= len(groups):
        raise InvalidValue("pipeline stages", stages, f"1 to {len(groups)}, the model's index groups")
    first, total = groups[0].first_layer, groups[-1].end - groups[0].first_layer
    cuts, used = [first], 0
    for stage in range(1, stages):
        possible = range(used + 1, len(groups) - (stages - stage) + 1)
        used = min(possible, key=lambda group: abs(groups[group].first_layer - first - stage * total / stages))
        cuts.append(groups[used].first_layer)
    return list(zip(cuts, [*cuts[1:], groups[-1].end], strict=True))


class Stage:
    """This process's end of the line of stages. ``peers`` are the stages in their order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.is_first = peers.index == 0
        self.is_last = peers.index == len(peers) - 1

    def receive(self, out: Tensor) -> None:
        """Fill ``out`` with what the stage before sends."""
        self._peers.receive(out, self._peers.index - 1)

    def send(self, tensor: Tensor) -> None:
        """Send to the next stage."""
        self._peers.send(tensor, self._peers.index + 1)

    def from_last(self, tensor: Tensor) -> None:
        """Have ``tensor`` be what it is on the last stage."""
        self._peers.broadcast(tensor, len(self._peers) - 1)


class StageDecoder(FastDecoder):
    """`FastDecoder` over the layers of one stage. What `forward` gives is the model's on the last stage only."""

    def __init__(
        self, weights: DecodeWeights, device: torch.device, stage: Stage, *, rows: int, kernels: KernelsName | None
    ) -> None:
        super().__init__(weights, device, rows=rows, kernels=kernels)
        self._stage = stage
        entering = 0 if stage.is_first else rows
        self._arrived = torch.zeros((entering, weights.config.hidden_size), device=device)

    def _check_layers(self, weights: DecodeWeights) -> None:
        """Any range will do."""

    def _entering(self, tokens: Tensor) -> Tensor:
        if self._stage.is_first:
            return super()._entering(tokens)
        arrived = self._arrived[: len(tokens)]
        self._stage.receive(arrived)
        return arrived

    def _leaving(self, count: int) -> Tensor:
        if self._stage.is_last:
            return super()._leaving(count)
        hidden = torch.empty((count, self.config.hidden_size), device=self.device)
        self.layers.unnormed(hidden)
        self._stage.send(hidden)
        return hidden


class StageStep(DecodeStep):
    """`DecodeStep` over the layers of one stage, with the tokens of the whole model. Of one row for each session."""

    def __init__(
        self, weights: DecodeWeights, page_format: PageFormat, device: torch.device, stage: Stage, **options: Any
    ) -> None:
        super().__init__(weights, page_format, device, **options)
        self._stage = stage
        self._arrived = torch.zeros_like(self.hidden)

    def replay(self) -> StepOutput:
        """Enqueue one step; what crosses between stages is enqueued around the recorded part."""
        stage = self._stage
        if not stage.is_first:
            stage.receive(self._arrived)
        self.attention.replay(variant=self.sampling)
        if not stage.is_last:
            stage.send(self.hidden)
        stage.from_last(self._report)
        if not stage.is_last:
            self.accepted.copy_(self._report[:, -1])
            kept = (self.accepted > 0)[:, None]
            self.tokens.copy_(torch.where(kept, self.sampled, self.tokens))
        return self._read_out()

    def _entering(self, batch: int) -> Tensor:
        if self._stage.is_first:
            return super()._entering(batch)
        return self._arrived[:batch].flatten(0, 1)
