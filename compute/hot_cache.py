"""The hot caches of one session: one per index group, all on the device, changed by kernels only.

The rules of a round are in ``compute.kernels.reference_cache``; the sizes are chosen here.
"""

from __future__ import annotations

import torch

from compute.arena import Arena, Piece
from compute.attach import Attachment
from compute.kernels.state import DUPLICATE_MISSES, HITS, RING_HITS, UNIQUE_MISSES, GroupCache
from protocol.errors import InvalidValue
from protocol.layout import PageFormat


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

    def counters(self) -> dict[str, int]:
        """Totals over the groups. Reads device memory: not for the token path."""
        total = torch.stack([cache.counters for cache in self.groups]).sum(0).tolist()
        return {
            "hits": total[HITS],
            "misses": total[UNIQUE_MISSES],
            "ring_hits": total[RING_HITS],
            "duplicate_misses": total[DUPLICATE_MISSES],
        }

    def free(self) -> None:
        """Give the memory back."""
        self.groups.clear()
        self._rows.free()
        self._tables.free()
