"""A decode step of the whole model: tokens in, tokens out, one CUDA graph per batch size.

    embedding -> layers -> final norm -> logits -> sampler

Between the kernels of `compute.step`, which keep and read the histories, a layer is `compute.decode.layers`. Sampled
tokens and lengths are fed back on the device, so the host can enqueue a step before it has read the one before. It
reads through a ring of pinned buffers, each with an event; nothing that a step waits for is in its hands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compute.decode.layers import LayerInputs, Layers
from compute.decode.reference_step import ReferenceStep
from compute.decode.sampler import Sampler
from compute.decode.weights import DecodeWeights
from compute.history import History
from compute.kernels.choice import KernelsName
from compute.step import AttentionStep, Choose, Model, Overlap, StepInputs, StepShape
from protocol.errors import InvalidValue
from protocol.layout import PageFormat

READ_AHEAD = 4
"""Steps whose outputs may be unread at a time."""

Hook = Callable[[int], None]
"""Called with the batch; enqueues."""
WaitUntil = Callable[[Callable[[], bool]], None]
"""Returns once what it is called with is true; raises `PeerLost` where that is not in time."""


@dataclass(frozen=True)
class StepOutput:
    """What a step sampled, on its way to the host. Overwritten by the `READ_AHEAD`-th step after it."""

    report: Tensor
    event: torch.cuda.Event | None
    wait_until: WaitUntil | None = None

    def wait(self) -> tuple[list[list[int]], list[int]]:
        """Of each place: the token sampled behind each of its rows, and how many of the rows stay.

        Raises `PeerLost` where a step that depends on other ranks is not done in time.
        """
        if self.event is not None:
            if self.wait_until is not None:
                self.wait_until(self.event.query)
            self.event.synchronize()
        values = self.report.tolist()
        return [row[:-1] for row in values], [row[-1] for row in values]


class DecodeStep(Model):
    """Steps of up to ``places`` sessions with ``rows`` rows each: resident ones, or with ``cached``, offloaded ones.

    Tokens are the most likely ones, or while `sampling`, what `sampler` chooses for each place. By default one row is
    kept: the next step's first token is the one sampled behind this step's first. ``sample`` does otherwise (drafting,
    verifying): it reads ``sampled`` and ``hidden`` and writes ``tokens`` and ``accepted``.
    ``on_query`` is called with a batch and a group once the index inputs of the group are there. A weights range
    without the last layer gives hidden states of its last layer and no tokens.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        page_format: PageFormat,
        device: torch.device,
        *,
        places: int,
        rows: int = 1,
        max_tokens: int,
        cached: bool,
        kernels: KernelsName | None = None,
        overlap: Overlap = "late",
        choose: Choose | None = None,
        on_query: Callable[[int, int], None] | None = None,
        sample: Hook | None = None,
    ) -> None:
        config = weights.config
        self.weights, self.format = weights, page_format
        self.cached, self.max_tokens = cached, max_tokens
        self.layers = Layers(config, weights, places * rows, device, kernels)
        self._sample, self._on_query = sample or self._greedy, on_query
        shape = StepShape(
            places=places,
            rows=rows,
            topk=config.index_topk,
            heads=config.num_attention_heads,
            index_heads=config.index_n_heads,
            softmax_scale=config.softmax_scale,
            max_tokens=max_tokens,
        )
        main = [group for group in page_format.groups if group.first_layer < weights.end_layer]
        groups = range(len(main))
        self.attention: AttentionStep | ReferenceStep
        if self.layers.kernels == "reference":
            self.attention = ReferenceStep(
                page_format, shape, device, cached=cached, choose=choose, model=self, groups=groups
            )
        else:
            self.attention = AttentionStep(
                page_format, shape, device, cached=cached, overlap=overlap, choose=choose, model=self, groups=groups
            )
        self.tokens = torch.zeros((places, rows), dtype=torch.int64, device=device)
        """int64 [places, rows]: the step's input, written by the sampler of the step before."""
        self.hidden = torch.zeros((places, rows, config.hidden_size), device=device)
        """float32 [places, rows, hidden]: after the final norm."""
        self.logits = torch.zeros((places, rows, config.vocab_size if weights.head else 0), device=device)
        self._report = torch.zeros((places, rows + 1), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._read = [torch.zeros((places, rows + 1), dtype=torch.int64, pin_memory=pinned) for _ in range(READ_AHEAD)]
        self._events = [torch.cuda.Event() if pinned else None for _ in range(READ_AHEAD)]
        self._steps = 0
        self.sampler = Sampler(places, device)
        self.sampling = False
        """Whether steps from now on are recorded with the sampler; greedy ones do not pay for it."""
        self.wait_until: WaitUntil | None = None
        """Set where a step depends on other ranks, and may never be done."""
        self._anchors = {group.first_layer: index for index, group in enumerate(main)}

    @property
    def accepted(self) -> Tensor:
        """int64 [places]: rows of the last step that stay; the sampler's to write."""
        return self.attention.accepted

    @property
    def sampled(self) -> Tensor:
        """int64 [places, rows]: the token chosen behind each row."""
        return self._report[:, :-1]

    def join(self, place: int, history: History, token: int) -> None:
        """Put a session into ``place``; ``token`` is the next one, of which no row is there yet.

        Raises `InvalidValue` if the session does not fit.
        """
        if not 0 <= token < self.weights.config.vocab_size:
            raise InvalidValue("token", token, f"0 to {self.weights.config.vocab_size - 1}")
        if isinstance(self.attention, ReferenceStep):
            self.attention.join(place, history)
        else:
            caches = history.caches.groups if history.caches else []
            self.attention.join(place, history.map, caches, history.length)
        self.tokens[place] = token

    def leave(self, place: int) -> None:
        """Make ``place`` idle."""
        self.attention.leave(place)

    def close(self) -> None:
        """Give up what was recorded."""
        self.attention.close()

    def record(self) -> None:
        """Compile and record the steps of every batch size now, rather than when the first session is there for it."""
        if isinstance(self.attention, AttentionStep):
            self.attention.record_all(variant=self.sampling)

    def replay(self) -> StepOutput:
        """Enqueue one step of all sessions, for each of which `History.prepare` has made room."""
        self.attention.replay(variant=self.sampling)
        return self._read_out()

    def _read_out(self) -> StepOutput:
        """Enqueue the copy of what the last step sampled."""
        turn = self._steps % READ_AHEAD
        self._steps += 1
        self._read[turn].copy_(self._report, non_blocking=True)
        event = self._events[turn]
        if event is not None:
            event.record()
        return StepOutput(self._read[turn], event, self.wait_until)

    # What `compute.step` calls

    def begin(self, batch: int) -> None:
        self.layers.begin(self._entering(batch), self.attention.positions[:batch].flatten())

    def before(self, layer: int, batch: int) -> None:
        group, index = self.format.group_of_layer(layer), self.format.layer_index(layer)
        self.layers.project(self.weights.layer(layer), inputs_of(self.attention.inputs, index, group, batch))
        if self._on_query is not None and layer in self._anchors:
            self._on_query(batch, group)

    def queries(self, layer: int, batch: int) -> None:
        group, index = self.format.group_of_layer(layer), self.format.layer_index(layer)
        self.layers.absorb(self.weights.layer(layer), inputs_of(self.attention.inputs, index, group, batch))

    def after(self, layer: int, batch: int) -> None:
        index = self.format.layer_index(layer)
        self.layers.feed(self.weights.layer(layer), self.attention.out[index, :batch].flatten(0, 1))

    def end(self, batch: int) -> None:
        hidden = self.hidden[:batch]
        if self.weights.norm is None or self.weights.head is None:
            self.layers.unnormed(hidden.flatten(0, 1))
            self.accepted[:batch] = (self.attention.positions[:batch, 0] >= 0).long()
            return
        self.layers.finish(self.weights.norm, hidden.flatten(0, 1))
        self.attention.store_hidden(hidden)
        logits = self.logits[:batch]
        self.layers.logits(hidden.flatten(0, 1), logits.flatten(0, 1))
        if self.sampling:
            self.sampled[:batch] = self.sampler.choose(logits, self.attention.positions[:batch] + 1)
        else:
            self.sampled[:batch] = logits.argmax(-1)
        self._sample(batch)
        self._report[:batch, -1] = self.accepted[:batch]

    def _entering(self, batch: int) -> Tensor:
        """What goes into the first layer, [batch * rows, hidden]."""
        assert self.weights.embedding is not None, "the embedding is with the first layer"
        embedded: Tensor = self.weights.embedding[self.tokens[:batch].flatten()]
        return embedded

    def _greedy(self, batch: int) -> None:
        active = self.attention.positions[:batch, 0] >= 0
        self.tokens[:batch, 0] = torch.where(active, self.sampled[:batch, 0], self.tokens[:batch, 0])
        self.accepted[:batch] = active.long()


def inputs_of(inputs: StepInputs, layer: int, group: int, batch: int) -> LayerInputs:
    """Where the first ``batch`` places' rows of one layer, by its place in the page, are written."""
    of_layer = (inputs.latent, inputs.rope, inputs.query_latent, inputs.query_rope)
    of_group = (inputs.index_keys, inputs.index_query, inputs.index_weights)
    flat = [tensor[layer, :batch].flatten(0, 1) for tensor in of_layer]
    return LayerInputs(*flat, *(tensor[group, :batch].flatten(0, 1) for tensor in of_group))
