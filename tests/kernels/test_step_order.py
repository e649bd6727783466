"""Queries and rows beside the selection, or before it: what a model writes when it is asked is what attention gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute import step as step_module
from compute.step import AttentionStep, Model, StepInputs, StepShape
from tests.kernels.pages import DEVICE, format_of
from tests.kernels.test_step import HEADS, INDEX_HEADS, SCALE, Session, _bits, _fill, _step


class InTurn(Model):
    """Writes a layer's inputs only when that layer's turn has come, and takes them back behind it."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        """Of all layers, each in a place of its own."""
        self.into: StepInputs | None = None
        self.calls: list[tuple[str, int]] = []
        self.out: list[Tensor] = []
        self.step: AttentionStep | None = None

    def before(self, layer: int, batch: int) -> None:
        self.calls.append(("before", layer))
        group = next(number for number, part in enumerate(format_of().groups) if part.first_layer <= layer < part.end)
        for name in ("latent", "rope", "query_rope"):
            self._write(name, layer, batch)
        if layer == format_of().groups[group].first_layer:
            for name in ("index_keys", "index_query", "index_weights"):
                self._write(name, group, batch)

    def queries(self, layer: int, batch: int) -> None:
        self.calls.append(("queries", layer))
        self._write("query_latent", layer, batch)

    def after(self, layer: int, batch: int) -> None:
        self.calls.append(("after", layer))
        assert self.step is not None
        assert self.into is not None
        self.out.append(self.step.out[layer, :batch].clone())
        self.into.query_latent[layer, :batch].fill_(torch.nan)

    def _write(self, name: str, index: int, batch: int) -> None:
        assert self.into is not None
        getattr(self.into, name)[index, :batch].copy_(getattr(self.inputs, name)[index, :batch])


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("slots", [0, 200])
def test_a_model_that_writes_each_layer_in_its_turn(slots: int, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [Session(format_of(), 130, 4, slots=slots) for _ in range(2)]
    _fill(sessions)
    plain = _step(format_of(), sessions[:1])
    plain.replay()
    model = InTurn(plain.inputs)
    monkeypatch.setattr(step_module, "SHORT_SELECTION", sessions[0].map.max_tokens if short else 0)
    shape = StepShape(1, 1, 64, HEADS, INDEX_HEADS, SCALE, sessions[1].map.max_tokens)
    model.step = AttentionStep(format_of(), shape, DEVICE, cached=slots > 0, model=model)
    model.into = model.step.inputs
    model.step.join(0, sessions[1].map, sessions[1].caches, sessions[1].tokens)
    model.into.query_latent.fill_(torch.nan)
    model.step.replay()
    layers = format_of().layer_count
    if DEVICE.type == "cpu":  # a GPU's outputs are there once the recorded step has run, into one place
        assert model.calls == [(name, layer) for layer in range(layers) for name in ("before", "queries", "after")]
        assert all(torch.equal(_bits(own), _bits(plain.out[layer])) for layer, own in enumerate(model.out))
    assert torch.equal(_bits(model.step.out[layers - 1]), _bits(plain.out[layers - 1]))
