"""Descriptors: what a kernel must know of one session and one index group, as one int64 record on the device.

A batch's records lie in a tensor int64 [batch, `FIELDS`] that recorded graphs keep the address of: a session that joins
the batch has its record copied in, and a record of zeros is an idle place, for which kernels do nothing. Lengths,
cursors and rounds are not in here; they are device data behind the addresses.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from compute.kernels.state import GroupCache, PageMap
from protocol.errors import InvalidValue

PAGE_ADDRESS = tl.constexpr(0)
"""Address of `PageMap.page_address`; 0 marks an idle place."""
MAP_TOKENS = tl.constexpr(1)
"""`PageMap.max_tokens`."""
KEY_BLOCK_ADDRESS = tl.constexpr(2)
"""Address of the group's row of `PageMap.key_block_address`."""
WINDOW = tl.constexpr(3)
"""Address of `PageMap.window`."""
RING_BASE = tl.constexpr(4)
RING_PAGES = tl.constexpr(5)
PEER_RING_BASE = tl.constexpr(6)
"""Address, seen from here, of a peer's ring of as many pages; 0 without a peer."""
PEER_KEY_BLOCK_ADDRESS = tl.constexpr(7)
"""Like `KEY_BLOCK_ADDRESS`, with the addresses, seen from here, of a peer's key blocks; 0 without a peer."""
TABLE = tl.constexpr(8)
"""Address of `GroupCache.table`; 0 where the session has no hot cache."""
TABLE_TOKENS = tl.constexpr(9)
SLOT_POSITION = tl.constexpr(10)
SLOT_ROUND = tl.constexpr(11)
CONTROL = tl.constexpr(12)
COUNTERS = tl.constexpr(13)
SLOT_ROWS = tl.constexpr(14)
"""Address of `GroupCache.rows`."""
SLOTS = tl.constexpr(15)

FIELDS = 16


def describe(
    page_map: PageMap,
    group: int,
    cache: GroupCache | None = None,
    *,
    selected: int = 0,
    peer_ring_base: int = 0,
    peer_key_block_address: Tensor | None = None,
) -> Tensor:
    """The record of one session and index group: int64 [`FIELDS`] on the CPU.

    It holds addresses: the tensors of ``page_map`` and ``cache`` must outlive its use. ``peer_key_block_address`` is
    int64 [groups, max_pages] on this device. Raises `InvalidValue` if ``cache`` has fewer slots than one round may pin,
    which is ``selected``: query rows times selected positions of each.
    """
    record = [0] * FIELDS
    record[PAGE_ADDRESS.value] = page_map.page_address.data_ptr()
    record[MAP_TOKENS.value] = page_map.max_tokens
    record[KEY_BLOCK_ADDRESS.value] = page_map.key_block_address[group].data_ptr()
    record[WINDOW.value] = page_map.window.data_ptr()
    record[RING_BASE.value] = page_map.ring_base
    record[RING_PAGES.value] = page_map.ring_pages
    record[PEER_RING_BASE.value] = peer_ring_base
    if peer_key_block_address is not None:
        record[PEER_KEY_BLOCK_ADDRESS.value] = peer_key_block_address[group].data_ptr()
    if cache is not None:
        if cache.slots < selected:
            raise InvalidValue("slots of a hot cache", cache.slots, f"at least the {selected} that one round may pin")
        record[TABLE.value] = cache.table.data_ptr()
        record[TABLE_TOKENS.value] = cache.table.shape[0]
        record[SLOT_POSITION.value] = cache.slot_position.data_ptr()
        record[SLOT_ROUND.value] = cache.slot_round.data_ptr()
        record[CONTROL.value] = cache.control.data_ptr()
        record[COUNTERS.value] = cache.counters.data_ptr()
        record[SLOT_ROWS.value] = cache.rows.data_ptr()
        record[SLOTS.value] = cache.slots
    return torch.tensor(record, dtype=torch.int64)
