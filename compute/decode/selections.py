"""Selections of a run: recorded, measured, and replayed from a file.

A trace is a safetensors file with one tensor and four numbers, as decimal text, in the header's metadata:

    selections       int32 [tokens, groups, k]: the positions that the row of a token attends to, in each index group;
                     ascending, below or at the row's own position, -1 behind the last
    format           "kvd-selections-1"
    first_position   position of the first token's row
    groups, topk     the tensor's second and third size, which must be those of the model

A row that was computed several times, because drafts before it were rejected, is there once, as it was computed last.
Nothing is unpickled: a trace may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compute.kernels.state import RING_FIRST, GroupCache, PageMap
from protocol.errors import InvalidValue

FORMAT = "kvd-selections-1"
BINS = 4096
"""Parts of a history that missed positions are counted in."""
_NOTHING = torch.iinfo(torch.int32).max
_COMPARED = 32  # tokens at a time


Change = Callable[[Tensor, int, Tensor], None]
"""Called with the positions of a step's rows, int64 [places, rows], a group, and their selections int32
[batch, rows, k]; enqueues what reads or replaces these."""


@dataclass(frozen=True)
class Trace:
    """Selections int32 [tokens, groups, k] of consecutive tokens, the first of which is at ``first_position``."""

    selections: Tensor
    first_position: int

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        _, groups, topk = self.selections.shape
        metadata = {
            "format": FORMAT,
            "first_position": str(self.first_position),
            "groups": str(groups),
            "topk": str(topk),
        }
        save_file({"selections": self.selections.cpu().contiguous()}, path, metadata)

    @classmethod
    def load(cls, path: Path, groups: int, topk: int) -> Trace:
        """Read a trace of a model of ``groups`` index groups. Raises `InvalidValue` for what is no such file."""
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
                found: Tensor = opened.get_tensor("selections")
        except (OSError, SafetensorError) as error:
            raise InvalidValue("trace", str(path), f"a safetensors file with selections ({error})") from None
        first = metadata.get("first_position", "")
        if metadata.get("format") != FORMAT or not first.isdecimal() or len(first) > 12:
            raise InvalidValue(f"metadata of trace {path}", str(metadata), f"format {FORMAT} and a first_position")
        if found.dtype != torch.int32 or found.dim() != 3 or found.shape[1:] != (groups, topk) or not len(found):
            shape = f"{found.dtype} {tuple(found.shape)}"
            raise InvalidValue(f"selections of trace {path}", shape, f"int32 [tokens, {groups}, {topk}]")
        trace = cls(found, int(first))
        trace._check(path)
        return trace

    def _check(self, path: Path) -> None:
        for token, selection in enumerate(self.selections):
            position = self.first_position + token
            filled = torch.where(selection < 0, _NOTHING, selection)
            rising = (filled[:, 1:] > filled[:, :-1]) | (filled[:, 1:] == _NOTHING)
            fits = (selection >= -1) & (selection <= position)
            if not bool(fits.all()) or not bool(rising.all()):
                allowed = f"ascending positions up to {position}, then -1"
                raise InvalidValue(f"trace {path}", f"selection of position {position}", allowed)

    def overlaps(self) -> list[float]:
        """Of each group, the part of a selection that the token before had selected too: the mean over all tokens."""
        filled = torch.where(self.selections < 0, _NOTHING, self.selections)
        shared = torch.zeros(filled.shape[1], dtype=torch.float64, device=filled.device)
        for start in range(0, len(filled) - 1, _COMPARED):
            before, after = filled[start : start + _COMPARED], filled[start + 1 : start + 1 + _COMPARED]
            before = before[: len(after)].contiguous()
            at = torch.searchsorted(before, after.contiguous()).clamp_max(filled.shape[2] - 1)
            real = after != _NOTHING
            same = (before.gather(2, at) == after) & real
            shared += (same.sum(2) / real.sum(2).clamp_min(1)).double().sum(0)
        return (shared / max(len(filled) - 1, 1)).tolist()

    def replay(self, device: torch.device) -> Change:
        """What replaces the selections of rows in this trace, and leaves those of others."""
        selections, first, count = self.selections.to(device), self.first_position, len(self.selections)

        def change(positions: Tensor, group: int, selection: Tensor) -> None:
            token = positions[: len(selection)] - first  # [batch, rows]
            recorded = selections[token.clamp(0, count - 1), group]
            inside = (token >= 0) & (token < count)
            selection.copy_(torch.where(inside[:, :, None], recorded, selection))

        return change


class Recorder:
    """Records the selections of the session in place 0, and where its hot caches miss: a `Change`, for diagnoses.

    It works on the device, inside recorded graphs too, and is not for runs that are timed.
    """

    def __init__(
        self,
        groups: int,
        topk: int,
        *,
        first_position: int,
        tokens: int,
        device: torch.device,
        page_map: PageMap | None = None,
        caches: Sequence[GroupCache] = (),
    ) -> None:
        """Positions from ``first_position`` on, ``tokens`` of them. Misses are looked up in ``caches``, if given."""
        self._first, self._tokens = first_position, tokens
        self._map, self._caches = page_map, caches
        # One more than there are tokens: rows that are not wanted go there.
        self._selections = torch.full((tokens + 1, groups, topk), -1, dtype=torch.int32, device=device)
        self._missed = torch.zeros((groups, BINS), dtype=torch.int64, device=device)

    def __call__(self, positions: Tensor, group: int, selection: Tensor) -> None:
        token = positions[0] - self._first
        wanted = torch.where((token >= 0) & (token < self._tokens), token, self._tokens)
        self._selections[:, group].index_copy_(0, wanted, selection[0])
        if self._map is None or not self._caches:
            return
        table = self._caches[group].table
        position = selection[0].flatten().long()
        old = (position >= 0) & (position < self._map.window[RING_FIRST])
        missed = old & (table[position.clamp_min(0)] < 0)
        self._missed[group].index_add_(0, position.clamp_min(0) * BINS // len(table), missed.long())

    def trace(self) -> Trace:
        """What was recorded, on the CPU. Waits for the device."""
        return Trace(self._selections[: self._tokens].cpu(), self._first)

    def missed_percentiles(self, tokens: int, percents: Sequence[float] = (10, 90)) -> list[list[float]]:
        """Of each group, the positions below which ``percents`` of the misses lie, as parts of a history of ``tokens``.

        Empty lists where nothing was missed.
        """
        if not self._caches:
            return [[] for _ in range(len(self._missed))]
        counts = self._missed.double().cumsum(1).cpu()
        of_history = len(self._caches[0].table) / tokens
        return [
            [int((row < row[-1] * percent / 100).sum()) / BINS * of_history for percent in percents] if row[-1] else []
            for row in counts
        ]
