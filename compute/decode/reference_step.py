"""A step through the kernel sets of its sessions, one place after the other: what `compute.step` records, in the clear.

For the CPU, where the reference kernels serve, and for checks. The host counts here; nothing is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.history import History
from compute.kernels.kernel_set import KernelSet
from compute.kernels.state import LENGTH
from compute.step import Choose, Model, StepInputs, StepShape
from protocol.errors import InvalidValue
from protocol.layout import LATENT_DIM, PAGE_TOKENS, PageFormat


class ReferenceStep:
    """`compute.step.AttentionStep` of the same arguments, with the same inputs, outputs and order of calls."""

    def __init__(
        self,
        page_format: PageFormat,
        shape: StepShape,
        device: torch.device,
        *,
        cached: bool,
        choose: Choose | None = None,
        model: Model | None = None,
        groups: range | None = None,
    ) -> None:
        self.format, self.shape = page_format, shape
        self.inputs = StepInputs.zeros(page_format, shape, device, shared=True)
        self._cached, self._choose, self._model = cached, choose, model or Model()
        self._groups = groups or range(len(page_format.groups))
        places, rows = shape.places, shape.rows
        out = torch.zeros((1, places, rows, shape.heads, LATENT_DIM), device=device)
        self.out = out.expand(page_format.layer_count, *out.shape[1:])
        self.accepted = torch.zeros(places, dtype=torch.int64, device=device)
        self.lengths = torch.zeros_like(self.accepted)
        self.positions = torch.full((places, rows), -1, dtype=torch.int64, device=device)
        self._sessions: dict[int, History] = {}
        self._addresses: dict[int, Tensor] = {}

    def join(self, place: int, history: History) -> None:
        """Put a session into ``place``."""
        if self._cached != bool(history.caches):
            raise InvalidValue("hot caches of a session", bool(history.caches), "if and only if offloaded")
        self._sessions[place] = history
        self.lengths[place] = history.length
        self.accepted[place] = 0

    def leave(self, place: int) -> None:
        """Make ``place`` idle."""
        self._sessions.pop(place, None)

    def close(self) -> None:
        """Nothing was recorded."""

    def replay(self, *, variant: bool = False) -> None:  # noqa: ARG002
        """Run one step of all sessions. Nothing is recorded, so every ``variant`` runs as it is."""
        if not self._sessions:
            raise InvalidValue("sessions of a step", 0, "at least 1")
        batch = max(self._sessions) + 1
        self.positions.fill_(-1)
        self.out.zero_()
        for place, history in self._sessions.items():
            self.lengths[place] += self.accepted[place]
            self.positions[place] = self.lengths[place] + torch.arange(self.shape.rows, device=self.lengths.device)
            history.map.window[LENGTH] = self.lengths[place] + self.shape.rows
        self._model.begin(batch)
        for group in self._groups:
            self._run_group(group, batch)
        self._model.end(batch)

    def attend_again(self, layer: int, row: Tensor, query: tuple[Tensor, Tensor], out: Tensor) -> None:
        """As `compute.step.AttentionStep.attend_again`."""
        in_group = layer - self.format.groups[self.format.group_of_layer(layer)].first_layer
        for place, history in self._sessions.items():
            addresses = self._addresses[place][row[place]][None]
            latent, rope = (part[place][None].float() for part in query)
            out[place] = history.kernels.attend(addresses, in_group, latent, rope, self.shape.softmax_scale)[0]

    def store_hidden(self, hidden: Tensor) -> None:
        """Store ``hidden`` [batch, rows, hidden size] of the rows that end a page; see `compute.kernels.hidden`."""
        for place, history in self._sessions.items():
            for row, position in enumerate(self.positions[place].tolist()):
                if position % PAGE_TOKENS == PAGE_TOKENS - 1:
                    history.store_hidden(position // PAGE_TOKENS, hidden[place, row])

    def _run_group(self, group: int, batch: int) -> None:
        first, layers = self.format.groups[group].first_layer, self.format.groups[group].layers
        for layer in range(first, first + layers):
            self._model.before(layer, batch)
            self._model.queries(layer, batch)
            index = self.format.layer_index(layer)
            for place, history in self._sessions.items():
                kernels, positions, inputs = history.kernels, self.positions[place], self.inputs
                latent, rope = inputs.latent[index, place], inputs.rope[index, place]
                if layer == first:
                    kernels.append_keys(group, positions, inputs.index_keys[group, place])
                kernels.append(group, layer - first, positions, latent, rope)
                if layer == first:
                    self._addresses[place] = self._select(kernels, group, place)
                query = (inputs.query_latent[index, place].float(), inputs.query_rope[index, place].float())
                scale = self.shape.softmax_scale
                self.out[index, place] = kernels.attend(self._addresses[place], layer - first, *query, scale)
            self._model.after(layer, batch)

    def _select(self, kernels: KernelSet, group: int, place: int) -> Tensor:
        query, weights = self.inputs.index_query[group, place], self.inputs.index_weights[group, place]
        selection = kernels.select(group, query, weights, self.positions[place])
        if self._choose is not None:
            self._choose(group, selection[None])
        return kernels.round(group, selection) if self._cached else kernels.in_place(group, selection)
