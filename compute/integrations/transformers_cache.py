"""The cache object that ``transformers`` is given, and what a model's replaced methods call.

`KvdCache` is both a library `Cache`, as far as generation asks it for lengths, and the place where a layer's rows are
appended to histories, selected from and attended to. `compute.integrations.transformers` makes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from compute.histories import Histories, HistorySettings
from compute.history import History
from compute.model.rope import rotate_half_split, rotate_interleaved
from protocol.errors import InvalidValue
from protocol.layout import LATENT_DIM, ROPE_DIM

_NO_MASK = {"indexed_attention": None}
"""What keeps the model from making a mask of all queries by all keys: here a row sees what its position allows."""


@dataclass(frozen=True)
class _Part:
    """The new tokens of one batch entry in one pass: rows ``rows`` of those of all entries, at ``positions``."""

    history: History
    rows: slice
    positions: Tensor


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What ``transformers`` asks of a layer's cache; the rows themselves go another way."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KvdCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, *_: Any) -> None:
        raise self._misuse()

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise self._misuse()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.max_tokens

    def _misuse(self) -> InvalidValue:
        return InvalidValue("model", "another model", "the one that kvd_cache was given, within its block")


class KvdCache(Cache):  # type: ignore[misc]
    """The cache of one model: a history for each entry of a batch. Made by `kvd_cache`."""

    def __init__(self, histories: Histories, settings: Sequence[HistorySettings], chunk: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(histories.config.num_hidden_layers)])
        self.max_tokens = settings[0].max_tokens
        self.length = 0
        """Tokens of the longest entry, padding included, as ``transformers`` counts them."""
        self.histories: list[History] = []
        """Of the batch's entries, from the first pass on."""
        self._maker = histories
        self._settings = settings
        self._chunk = chunk
        self._padding: list[int] = []
        self._parts: list[_Part] = []
        self._valid = torch.empty(0)
        self._addresses: list[Tensor] = []
        self._hidden: list[Tensor | None] = []

    # What a user calls

    @property
    def tokens(self) -> Tensor:
        """Token ids of a single stored session, int64 [1, n]: what a text that goes on from it begins with."""
        [history] = self.histories
        assert history.session is not None, "a resident cache stores no tokens"
        return torch.tensor([history.session.state.tokens()[: history.length]], dtype=torch.int64)

    def barrier(self) -> None:
        """Return when all rows are in host RAM, and would survive this process."""
        for history, hidden in zip(self.histories, self._hidden, strict=True):
            history.barrier(hidden)

    def save(self) -> list[int]:
        """Save every session to disk, as ``kvd save`` does; returns the bytes of each file.

        Raises what that verb raises. The daemon must have a state directory, so an embedded one cannot.
        """
        self.barrier()
        return [self._maker.attachment.client.save_session(item.name).nbytes for item in self._sessions()]

    def counters(self) -> list[dict[str, int]]:
        """Of each entry: selections, hits, misses, ring hits, copybacks."""
        return [history.counters() for history in self.histories]

    # What transformers calls

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every entry; the sign is the library's."""
        if tokens_to_remove > 0:
            raise InvalidValue("tokens to remove", tokens_to_remove, "0 or negative, as for the library's own caches")
        if not tokens_to_remove:
            return
        for history in self.histories:
            history.truncate(max(history.length + tokens_to_remove, 0))
        self.length = max(self.length + tokens_to_remove, 0)
        self._hidden = [None] * len(self.histories)

    def reset(self) -> None:
        """Forget everything: the next pass may be of another batch."""
        self._close(keep=False)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise InvalidValue("num_beams", len(beam_idx), "1: beams exchange histories at every token, kvd's stay")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise InvalidValue("repeats of a batch's cache", repeats, "none: repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise InvalidValue("entries taken from a batch's cache", len(indices), "none: the batch stays as it began")

    # What the model's replaced methods call

    def run(
        self, forward: Callable[..., Any], input_ids: Tensor | None, attention_mask: Tensor | None, **rest: Any
    ) -> Any:
        """A pass of the model over new tokens [batch, n], chunk by chunk; returns what ``forward`` would."""
        if input_ids is None:
            raise InvalidValue("inputs_embeds", "given", "input_ids: a history keeps its tokens")
        if rest.get("output_attentions"):
            raise InvalidValue("output_attentions", True, "False: the weights of a selection are not kept")
        new = self._new(input_ids, attention_mask)
        position_ids = rest.pop("position_ids", None)
        outputs = []
        for start in range(0, input_ids.shape[1], self._chunk):
            part = slice(start, start + self._chunk)
            positions = self._begin(new[:, part], cached=input_ids.shape[1] <= self._cached_rows)
            given = positions if position_ids is None else position_ids[:, part]
            output = forward(input_ids[:, part], _NO_MASK, position_ids=given, **rest)
            self._finish(input_ids[:, part], output.last_hidden_state)
            outputs.append(output)
        return _joined(outputs)

    def attend(self, module: Any, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """The attention output [batch, n, hidden size] of a layer's module, whose rows are appended first."""
        valid, layer, config = self._valid, module.layer_idx, self._maker.config
        x = hidden_states[valid]
        cos, sin = (table.expand(*valid.shape, -1)[valid][:, : ROPE_DIM // 2] for table in angles)
        row = module.kv_a_proj_with_mqa(x)
        latent = module.kv_a_layernorm(row[:, :LATENT_DIM]).float()
        rope = rotate_interleaved(row[:, LATENT_DIM:], cos, sin).float()
        query_latent = module.q_a_layernorm(module.q_a_proj(x))
        query = module.q_b_proj(query_latent).unflatten(1, (module.num_heads, module.qk_head_dim))
        for part in self._parts:
            part.history.append(layer, part.positions, latent[part.rows], rope[part.rows])
        if module.indexer is not None:
            self._addresses = self._select(module.indexer, layer, x, query_latent, cos, sin)

        key, value = absorbed(module)
        query_absorbed = torch.einsum("nhd,hdc->nhc", query[..., : module.qk_nope_head_dim], key).float()
        rotated = rotate_interleaved(query[..., module.qk_nope_head_dim :], cos[:, None], sin[:, None]).float()
        attended = [
            part.history.attend(layer, addresses, query_absorbed[part.rows], rotated[part.rows], config.softmax_scale)
            for part, addresses in zip(self._parts, self._addresses, strict=True)
        ]
        values = torch.einsum("nhc,hvc->nhv", torch.cat(attended).to(x.dtype), value)
        output = torch.zeros_like(hidden_states)
        output[valid] = module.o_proj(values.flatten(1))
        return output

    def _select(
        self, indexer: Any, layer: int, x: Tensor, query_latent: Tensor, cos: Tensor, sin: Tensor
    ) -> list[Tensor]:
        """Append the index keys of the layer's group, and select: where the rows are, for each entry."""
        config, encoding = self._maker.config, self._maker.format.encoding
        group = self._maker.format.group_of_layer(layer)
        rotate = rotate_interleaved if config.indexer_rope_interleaved else rotate_half_split
        keys = indexer.k_norm(indexer.wk(x))
        keys = torch.cat((rotate(keys[:, :ROPE_DIM], cos, sin), keys[:, ROPE_DIM:]), dim=1).float()
        query = indexer.wq_b(query_latent).unflatten(1, (indexer.n_heads, indexer.head_dim))
        rotated = rotate(query[..., :ROPE_DIM], cos[:, None], sin[:, None])
        query = torch.cat((rotated, query[..., ROPE_DIM:]), dim=2)
        # Quantised keys are scored against bfloat16 queries; unquantised ones in float32.
        query = query.to(torch.bfloat16 if encoding.keys.has_scales else torch.float32)
        weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
        found = []
        for part in self._parts:
            part.history.append_keys(group, part.positions, keys[part.rows])
            selection = part.history.select(group, query[part.rows], weights[part.rows], part.positions)
            found.append(part.history.addresses(group, selection))
        return found

    # A pass

    @property
    def _cached_rows(self) -> int:
        """Query rows whose selections the hot cache can hold at once."""
        return self._settings[0].hot_rows // self._maker.config.index_topk

    def _new(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Which of the new tokens are no padding: bool [batch, n]. The first pass opens the histories."""
        batch, count = input_ids.shape
        if not self.histories:
            if batch > len(self._settings):
                raise InvalidValue("batch size", batch, f"at most the batch_size of the cache, {len(self._settings)}")
            self._open([self._maker.history(item) for item in self._settings[:batch]])
        if batch != len(self.histories):
            raise InvalidValue("batch size", batch, f"{len(self.histories)}, as the batch began; reset() forgets it")
        if self.length + count > self.max_tokens:
            raise InvalidValue("tokens of the cache", self.length + count, f"at most {self.max_tokens} (max_tokens)")
        if attention_mask is None:
            return torch.ones_like(input_ids, dtype=torch.bool)
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != (batch, self.length + count):
            said = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
            raise InvalidValue("attention mask", said, f"one of {(batch, self.length + count)}, of 0 and 1")
        mask = attention_mask.bool()
        past, new = mask[:, : self.length], mask[:, self.length :]
        lengths = torch.tensor([history.length for history in self.histories], device=mask.device)
        began = lengths > 0
        if bool((past.sum(1) != lengths).any()) or bool(
            (~new & began[:, None]).any() | (new.diff(dim=1) & ~new[:, 1:]).any()
        ):
            raise InvalidValue("attention mask", "zeros after a token", "left padding only, the same in every pass")
        return new

    def _begin(self, new: Tensor, *, cached: bool) -> Tensor:
        """Make room for the rows of a chunk; returns the position of each of its tokens, int64 [batch, n]."""
        position_ids = torch.zeros_like(new, dtype=torch.int64)
        self._valid, self._parts, done = new, [], 0
        for entry, history in enumerate(self.histories):
            count = int(new[entry].sum())
            if count:
                positions = history.begin(count, cached=cached)
                position_ids[entry, new[entry]] = positions
                self._parts.append(_Part(history, slice(done, done + count), positions))
                done += count
        return position_ids

    def _finish(self, input_ids: Tensor, hidden: Tensor) -> None:
        rows, ids = hidden[self._valid].float(), input_ids[self._valid].tolist()
        for part in self._parts:
            history = part.history
            if history.session:
                history.session.state.append_tokens(ids[part.rows])
            history.finish(part.positions, rows[part.rows])
            self._hidden[self.histories.index(history)] = rows[part.rows.stop - 1]
        self.length += input_ids.shape[1]

    def _sessions(self) -> list[Any]:
        return [history.session for history in self.histories if history.session]

    def _open(self, histories: list[History]) -> None:
        self.histories, self._hidden = histories, [None] * len(histories)

    def _resume(self) -> None:
        """Go on from the stored sessions: all are there, and equally long, or none is."""
        names = {
            session.name for session in self._maker.attachment.client.stat().sessions if session.uid == os.getuid()
        }
        found = [item for item in self._settings if item.name in names]
        if not found:
            return
        self._open([self._maker.stored_history(item) for item in found])
        lengths = {history.length for history in self.histories}
        if len(found) < len(self._settings) or len(lengths) > 1:
            raise InvalidValue("stored sessions", sorted(lengths), f"{len(self._settings)} of one length")
        for history in self.histories:
            assert history.session is not None
            history.session.state.truncate_tokens(history.length)
        [self.length] = lengths

    def _close(self, *, keep: bool) -> None:
        histories = self.histories
        if keep:
            self.barrier()
        self._open([])
        self.length = 0
        with ExitStack() as all_of_them:
            for history in histories:
                all_of_them.callback(history.close, keep=keep)


def absorbed(module: Any) -> tuple[Tensor, Tensor]:
    """The two halves of ``kv_b_proj``, views: [heads, nope, 512] for queries and [heads, v, 512] for outputs."""
    weight = getattr(module.kv_b_proj, "weight", None)
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidValue("kv_b_proj", getattr(weight, "dtype", "no weight"), "a linear layer that is not quantised")
    expanded = weight.view(module.num_heads, -1, LATENT_DIM)
    return expanded[:, : module.qk_nope_head_dim], expanded[:, module.qk_nope_head_dim :]


def _joined(outputs: list[Any]) -> Any:
    """The outputs of a pass's chunks as those of one."""
    [first, *_] = outputs
    if len(outputs) > 1:
        first.last_hidden_state = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        if first.get("hidden_states") is not None:
            layers = zip(*(output.hidden_states for output in outputs), strict=True)
            first.hidden_states = tuple(torch.cat(parts, dim=1) for parts in layers)
    return first
