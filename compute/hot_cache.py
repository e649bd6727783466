"""The hot caches of one session: one per index group, all on the device, changed by kernels only.

The rules of a round are in ``compute.kernels.reference_cache``; the sizes are chosen here.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from compute.arena import Arena, Piece
from compute.attach import Attachment
from compute.device import Copy
from compute.kernels.state import DUPLICATE_MISSES, HITS, RING_HITS, UNIQUE_MISSES, GroupCache
from protocol.errors import InvalidValue
from protocol.layout import PageFormat

WARM_ROUND = 4
"""Selections of one of the rounds that warm a cache, where it holds so many at a time."""


class HotCaches:
    """``slots`` rows for each index group of ``page_format``, for a session of up to ``max_tokens``.

    Raises `InvalidValue` unless a round's selections (query rows times ``topk``) fit the slots.
    """

    def __init__(
        self,
        attachment: Attachment,
        page_format: PageFormat,
        *,
        slots: int,
        max_tokens: int,
        topk: int,
        query_rows: int = 1,
        session: int = 0,
    ) -> None:
        if slots < query_rows * topk:
            raise InvalidValue(
                "hot rows", slots, f"at least {query_rows * topk}: {query_rows} query rows of {topk} selected rows each"
            )
        groups = range(len(page_format.groups))
        self._rows = Arena(
            attachment,
            "hot_cache",
            [Piece((slots, page_format.group_row_bytes(group)), torch.uint8) for group in groups],
            session,
        )
        per_group = [
            Piece((max_tokens,), torch.int32, -1),
            Piece((slots,), torch.int32, -1),
            Piece((slots,), torch.int32, -1),
            Piece((4,), torch.int32),
            Piece((4,), torch.int64),
        ]
        try:
            self._tables = Arena(attachment, "tables", per_group * len(groups), session)
        except BaseException:
            self._rows.free()
            raise
        self.groups: list[GroupCache] = []
        for group in groups:
            rows = self._rows.tensors[group]
            shape = (slots, page_format.groups[group].layers, page_format.encoding.rows.row_bytes)
            table, slot_position, slot_round, control, counters = self._tables.tensors[5 * group : 5 * group + 5]
            self.groups.append(GroupCache(table, slot_position, slot_round, control, counters, rows.view(shape)))
        self._device = attachment.device
        pinned = self._device.torch_device.type == "cuda"
        self._counted = torch.zeros(4, dtype=torch.int64, pin_memory=pinned)
        self._counting: tuple[Copy, torch.Tensor] | None = None

    def warming(self, selections: torch.Tensor, end: int) -> tuple[torch.Tensor, ...]:
        """Rounds, int32 [n, topk] each, that bring the newest positions before ``end`` to half of the slots, and then
        ``selections`` int32 [rows, topk].
        """
        slots, topk = self.groups[0].slots, selections.shape[1]
        positions = torch.arange(max(end - slots // 2, 0), end, dtype=torch.int32, device=selections.device)
        newest = [pad(part, (0, topk - len(part)), value=-1)[None] for part in positions.split(topk) if end]
        every = torch.cat((*newest, selections))
        rows = min(WARM_ROUND, slots // topk)
        return tuple(every[start : start + rows] for start in range(0, len(every), rows))

    def counters(self) -> dict[str, int]:
        """Totals over the groups. Waits for the device: not for the token path."""
        return _named(self._total().tolist())

    def recent_counters(self) -> dict[str, int]:
        """Totals as they were in an earlier call of this; never waits."""
        if self._counting is None or self._counting[0].done():
            self._recent = _named(self._counted.tolist())
            total = self._total()
            copy = self._device.start_copy(self._counted.view(torch.uint8), total.view(torch.uint8))
            self._counting = copy, total  # which must outlive the copy
        return self._recent

    def free(self) -> None:
        """Give the memory back."""
        if self._counting is not None:
            self._counting[0].wait()
        self.groups.clear()
        self._rows.free()
        self._tables.free()

    def _total(self) -> torch.Tensor:
        return torch.stack([cache.counters for cache in self.groups]).sum(0)


def _named(total: list[int]) -> dict[str, int]:
    return {
        "hits": total[HITS],
        "misses": total[UNIQUE_MISSES],
        "ring_hits": total[RING_HITS],
        "duplicate_misses": total[DUPLICATE_MISSES],
    }
