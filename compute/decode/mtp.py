"""Multi-token prediction: the MTP layer drafts, the next step verifies all drafts at once, and keeps what is right.

A step of ``depth + 1`` rows computes the token y that is known and the drafts behind it, d1 … dK. The drafts that equal
what the model samples stay, j of them, with y; one more token, sampled behind the last of them, is the next y. So a
step gives j + 1 tokens, and they are those of decoding without drafts: a row's bits do not depend on its company.

Rows of the MTP layer are numbered so that a page depends on no later token: index i is made of the token at i and the
hidden state at i - 1, after the final norm, with the rotation of position i - 1. Index 0 is empty and never read.

    u = eh_proj(cat(enorm(embedding(x_i)), hnorm(h_{i-1})));  z = layer(u);  g = shared_head.norm(z);  logits = head(g)

After a step that began at n the true rows n + 1 … n + 1 + j are made, all at once; those behind them are provisional,
and the next step writes them again. Drafting goes on from the last true one: its selection serves all drafts, the
hidden state of a draft is the g before it, and drafts store no rows. The history's rows below n + 1 + j are settled by
then in the MTP layer too, so whatever page `History.settle` copies back is final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor

from compute.decode.draft_layer import DraftLayer, append_draft_rows
from compute.decode.generate import AHEAD, RESERVED
from compute.decode.layers import LayerInputs
from compute.decode.reference_step import ReferenceStep
from compute.decode.step import DecodeStep, StepOutput, inputs_of
from compute.decode.weights import DecodeWeights
from compute.histories import MAX_DRAFTS
from compute.history import History
from compute.kernels.choice import KernelsName
from compute.step import AttentionStep, Choose, Model, Overlap, StepShape
from protocol.errors import InvalidValue
from protocol.layout import PageFormat

OnQuery = Callable[[int, int], None]
"""As `compute.decode.step.DecodeStep` takes it."""


class Speculation(Model):
    """Steps of up to ``places`` sessions that draft ``depth`` tokens each, and verify those of the step before.

    With a depth of 0 nothing is drafted, but the MTP layer's rows are kept up, so that drafting can begin at any step.
    ``page_format`` has the MTP layer as its last group. ``choose`` and ``on_query`` are for the main model's groups,
    ``draft_choose`` and ``draft_on_query`` for the MTP layer's, whose rows are one position further.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        page_format: PageFormat,
        device: torch.device,
        *,
        places: int,
        depth: int,
        max_tokens: int,
        cached: bool,
        kernels: KernelsName | None = None,
        overlap: Overlap = "late",
        choose: Choose | None = None,
        on_query: OnQuery | None = None,
        draft_choose: Choose | None = None,
        draft_on_query: OnQuery | None = None,
    ) -> None:
        config = weights.config
        if not 0 <= depth <= MAX_DRAFTS:
            raise InvalidValue("MTP depth", depth, f"0 to {MAX_DRAFTS}")
        if page_format.groups[-1].first_layer != config.num_hidden_layers:
            raise InvalidValue("last layer of the page format", page_format.groups[-1].end - 1, "the MTP layer")
        rows = depth + 1
        self.depth, self.cached, self.max_tokens = depth, cached, max_tokens
        self.step = DecodeStep(
            weights,
            page_format,
            device,
            places=places,
            rows=rows,
            max_tokens=max_tokens,
            cached=cached,
            kernels=kernels,
            overlap=overlap,
            choose=choose,
            on_query=on_query,
            sample=self._sample,
        )
        self._layer = DraftLayer(self.step.layers, weights)
        self._group = len(page_format.groups) - 1
        self._on_query = draft_on_query
        shape = StepShape(
            places=places,
            rows=rows,
            topk=config.index_topk,
            heads=config.num_attention_heads,
            index_heads=config.index_n_heads,
            softmax_scale=config.softmax_scale,
            max_tokens=max_tokens,
        )
        groups, choose_draft = range(self._group, self._group + 1), _without_first(draft_choose)
        self.draft: AttentionStep | ReferenceStep
        if isinstance(self.step.attention, ReferenceStep):
            self.draft = ReferenceStep(
                page_format, shape, device, cached=cached, choose=choose_draft, model=self, groups=groups
            )
        else:
            # Serial: behind a branch, none of the launches up to the end of the drafting could overlap.
            self.draft = AttentionStep(
                page_format,
                shape,
                device,
                cached=cached,
                overlap="serial",
                choose=choose_draft,
                model=self,
                groups=groups,
            )
        self.script = torch.full((places, max_tokens + rows), -1, dtype=torch.int64, device=device)
        """int64 [places, positions]: what is drafted at a position instead of what the MTP layer says, where not -1."""
        self._inputs = LayerInputs.empty(config, places, device)
        self._hidden = torch.empty((places * rows, config.hidden_size), device=device)
        self.draft_state = torch.empty((places, config.hidden_size), device=device)
        """float32 [places, hidden]: the g that the last draft of a step was made of."""
        self._attended = torch.empty((places, config.num_attention_heads, 512), device=device)
        self._logits = torch.empty((places, config.vocab_size), device=device)
        self._matching = torch.zeros(places, dtype=torch.int64, device=device)
        self._drafts = torch.zeros((places, depth), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def join(self, place: int, history: History, hidden: Tensor, token: int) -> None:
        """Put a session into ``place``: ``hidden`` [H] is its last row's, after the final norm, ``token`` the next one.

        Its MTP rows are there up to its last row (`append_draft_rows`); the one of ``token`` is written here. Raises
        `InvalidValue` if the session does not fit, or has no row.
        """
        if history.length < 1:
            raise InvalidValue("rows of a session with drafts", history.length, "at least 1")
        history.prepare(1)
        first = torch.tensor([history.length], device=hidden.device)
        known = torch.tensor([token], device=hidden.device)
        append_draft_rows(self._layer, self._inputs, history, first, known, hidden[None])
        self.step.join(place, history, token)
        self.step.tokens[place] = token  # nothing is drafted yet
        if isinstance(self.draft, ReferenceStep):
            self.draft.join(place, history)
        else:
            caches = history.caches.groups if history.caches else []
            self.draft.join(place, history.map, caches, history.length)
        self.draft.lengths[place] = history.length + 1

    def leave(self, place: int) -> None:
        """Make ``place`` idle."""
        self.step.leave(place)
        self.draft.leave(place)
        self.script[place] = -1

    def close(self) -> None:
        """Give up what was recorded."""
        self.step.close()
        self.draft.close()

    def replay(self) -> StepOutput:
        """Enqueue one step of all sessions.

        For each of them `History.prepare` has made room for the rows of all steps under way, and for one more.
        """
        return self.step.replay()

    # The MTP layer's rows of a step: what `compute.step` calls for ``draft``.

    def begin(self, batch: int) -> None:
        step = self.step
        tokens, positions = step.sampled[:batch].flatten(), step.attention.positions[:batch].flatten()
        self._layer.begin(tokens, step.hidden[:batch].flatten(0, 1), positions)

    def before(self, layer: int, batch: int) -> None:
        index = self.step.format.layer_index(layer)
        self._layer.project(inputs_of(self.draft.inputs, index, self._group, batch))
        if self._on_query is not None:
            self._on_query(batch, self._group)

    def queries(self, layer: int, batch: int) -> None:
        index = self.step.format.layer_index(layer)
        self._layer.absorb(inputs_of(self.draft.inputs, index, self._group, batch))

    def after(self, layer: int, batch: int) -> None:
        if not self.depth:
            return  # its rows are stored, and nothing is drafted from what it makes of them
        self._layer.feed(self.draft.out[self.step.format.layer_index(layer), :batch].flatten(0, 1))

    def end(self, batch: int) -> None:
        """All true rows are stored; draft on from the last of them."""
        if not self.depth:
            return
        rows, last = self.depth + 1, self._matching[:batch]
        every, state = self._hidden[: batch * rows], self.draft_state[:batch]
        self._layer.finish(every)
        state.copy_(every.view(batch, rows, -1)[torch.arange(batch, device=every.device), last])
        position = self.step.attention.positions[:batch, 0] + last + 1
        inputs, attended, logits = self._inputs.first(batch), self._attended[:batch], self._logits[:batch]
        for number in range(self.depth):
            self._layer.logits(state, logits)
            draft = logits.argmax(-1)
            self._drafts[:batch, number] = draft
            if number + 1 == self.depth:
                return
            self._layer.begin(draft, state, position + number)
            self._layer.project(inputs)
            self._layer.absorb(inputs)
            query = (inputs.query_latent, inputs.query_rope)
            self.draft.attend_again(self._layer.number, last, query, attended)
            self._layer.feed(attended)
            self._layer.finish(state)

    def _sample(self, batch: int) -> None:
        """Keep the drafts that are right, and make the next ones."""
        step = self.step
        positions, sampled = step.attention.positions[:batch], step.sampled[:batch]
        active = positions[:, :1] >= 0
        matching = (step.tokens[:batch, 1:] == sampled[:, :-1]).long().cumprod(1).sum(1, keepdim=True)
        self._matching[:batch] = matching[:, 0]
        step.accepted[:batch] = torch.where(active, matching + 1, 0)[:, 0]
        self._draft(batch)
        self.draft.accepted[:batch] = step.accepted[:batch]
        last = self.script.shape[1] - 1
        following = positions[:, :1] + matching + torch.arange(2, self.depth + 2, device=positions.device)
        scripted = self.script[:batch].gather(1, following.clamp(0, last))
        drafts = torch.where(scripted >= 0, scripted, self._drafts[:batch])
        tokens = torch.cat((sampled.gather(1, matching), drafts), dim=1)
        step.tokens[:batch] = torch.where(active, tokens, step.tokens[:batch])

    def _draft(self, batch: int) -> None:
        if isinstance(self.draft, ReferenceStep):
            self.draft.replay()
            return
        assert isinstance(self.step.attention, AttentionStep)
        self.draft.run_within(self.step.attention, batch)


def generate(
    speculation: Speculation, history: History, hidden: Tensor, token: int, count: int
) -> Generator[int, None, None]:
    """Yield the ``count`` tokens that follow ``token``, as `compute.decode.generate.generate` does, with drafts.

    The row of a token is settled when the next one is asked for: whoever logs a token before that has logged all whose
    rows can be committed.
    """
    with closing(_steps(speculation, history, hidden, token, count)) as steps:
        for arrived in steps:
            for following in arrived:
                history.settle(history.length + 1)
                yield following


def generate_steps(
    speculation: Speculation, history: History, hidden: Tensor, token: int, count: int
) -> Iterator[list[int]]:
    """The same, the tokens of each step together: those of its drafts that stay, and one more.

    The rows of all of them but the last are settled when the next step is asked for, or when this ends.
    """
    with closing(_steps(speculation, history, hidden, token, count)) as steps:
        for arrived in steps:
            end = history.length + len(arrived)
            history.settle(history.length + 1)
            try:
                yield arrived
            finally:
                history.settle(end)


def _steps(
    speculation: Speculation, history: History, hidden: Tensor, token: int, count: int
) -> Generator[list[int], None, None]:
    """What each step gives. Its rows, as many as it gives tokens, are to be settled before the next one is asked for.

    ``hidden`` [H] is the history's last row's, after the final norm. Drafts need room behind the tokens: raises
    `InvalidValue` where the history has less.
    """
    rows = speculation.depth + 1
    needed = history.length + count + AHEAD * rows + 1
    if needed > history.max_tokens:
        raise InvalidValue("rows of the history, drafts included", needed, f"at most {history.max_tokens}")
    history.reserve(min(count, RESERVED) + AHEAD * rows + 1)
    speculation.join(0, history, hidden, token)
    outputs: deque[StepOutput] = deque()
    produced = 0
    try:
        while produced < count:
            while len(outputs) < min(AHEAD, count - produced):
                history.prepare((len(outputs) + 1) * rows + 1)
                outputs.append(speculation.replay())
            sampled, kept = outputs.popleft().wait()
            accepted = min(kept[0], count - produced)
            produced += accepted
            yield sampled[0][:accepted]
    finally:
        speculation.leave(0)
        history.settled()


def _without_first(choose: Choose | None) -> Choose:
    """Take index 0, which is empty, out of the selections, then do what ``choose`` does."""

    def change(group: int, selection: Tensor) -> None:
        selection.masked_fill_(selection == 0, -1)
        if choose is not None:
            choose(group, selection)

    return change
