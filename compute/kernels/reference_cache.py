"""One round of the hot cache: resolve and assign, then fetch; and what append must forget.

Invariants: a position has at most one slot and a slot at most one position. A slot stamped in a round keeps its row for
the whole round. A slot filled in a round is a hit from the next round on, never within it. Results do not depend on the
order of the misses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compute.kernels.memory import Memory
from compute.kernels.reference_rows import page_addresses, row_offsets, selected
from compute.kernels.state import CURSOR, MISSES, RING_FIRST, ROUND, GroupCache, PageMap
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS


@dataclass(frozen=True)
class Round:
    """What one round decided. The addresses of misses hold their rows only after `fetch`."""

    addresses: Tensor
    """int64 [R, k]: group row of each selected position, in its slot or in the ring; 0 where empty."""
    miss_position: Tensor
    """int32 [m]: the positions to fetch, each once."""
    miss_slot: Tensor
    """int32 [m]: where to."""


def resolve(cache: GroupCache, page_map: PageMap, group: int, selection: Tensor) -> Round:
    """Find every selected position of ``selection`` int32 [R, k], and give the missing ones slots.

    Entries that are -1, or no position of the history, are empty. A position in the ring is read there. One with a slot
    is a hit and stamps the slot with the round. Each other position is claimed once, however many rows selected it.
    When all hits are stamped, the m-th claimed position takes the m-th slot, from the cursor on, that this round has
    not stamped; that slot's old position is unmapped. The cursor moves past the last slot taken.

    ``page_map.window`` must already cover the rows of this round's own tokens. Raises `InvalidValue`, and changes
    nothing, if the selection could pin more slots than there are.
    """
    if selection.numel() > cache.slots:
        raise InvalidValue("selected positions of one round", selection.numel(), f"at most the {cache.slots} slots")
    round_number = cache.control[ROUND] + 1
    valid = selected(page_map, selection) & (selection < cache.table.shape[0])
    positions = selection.where(valid, 0).long()
    in_ring = valid & (positions >= page_map.window[RING_FIRST])
    in_cache = valid & ~in_ring
    found = cache.table[positions]
    hit = in_cache & (found >= 0)
    miss = in_cache & (found < 0)

    cache.slot_round[found[hit].long()] = round_number
    claimed = torch.unique(positions[miss])  # ascending
    # As many slots as were selected always hold enough that are not stamped.
    around = (torch.arange(selection.numel(), device=selection.device) + cache.control[CURSOR]) % cache.slots
    slots = around[cache.slot_round[around] != round_number][: claimed.numel()]
    evicted = cache.slot_position[slots].long()
    cache.table[evicted[evicted >= 0]] = -1
    cache.table[claimed] = slots.int()
    cache.slot_position[slots] = claimed.int()
    cache.slot_round[slots] = round_number
    cache.control[ROUND] = round_number
    cache.control[MISSES] = claimed.numel()
    if claimed.numel():
        cache.control[CURSOR] = (slots[-1] + 1) % cache.slots
    unique, missed = claimed.numel(), int(miss.sum())
    cache.counters += torch.tensor(
        [int(hit.sum()), unique, int(in_ring.sum()), missed - unique], device=selection.device
    )

    slot_address = cache.rows.data_ptr() + cache.table[positions].long() * cache.group_row_bytes
    ring_address = page_addresses(page_map, positions) + row_offsets(page_map, group, positions)
    addresses = torch.where(in_ring, ring_address, slot_address).where(valid, 0)
    return Round(addresses, claimed.int(), slots.int())


def fetch(memory: Memory, cache: GroupCache, page_map: PageMap, group: int, decided: Round) -> None:
    """Copy each miss's rows of all layers of the group, one contiguous read, from the page's home into its slot."""
    if decided.miss_position.numel() == 0:
        return
    positions = decided.miss_position.long()
    home = page_map.page_address[positions // PAGE_TOKENS] + row_offsets(page_map, group, positions)
    rows = memory.read(home, cache.group_row_bytes)
    cache.rows[decided.miss_slot.long()] = rows.view(-1, *cache.rows.shape[1:])


def forget(cache: GroupCache, positions: Tensor) -> None:
    """Unmap ``positions`` int64 [n]: called by every append for what it writes, so that no old row can be hit.

    Positions without a slot are left as they are. Raises `InvalidValue` for one outside the table.
    """
    if positions.numel() == 0:
        return
    for position in (int(bound) for bound in positions.aminmax()):
        if not 0 <= position < cache.table.shape[0]:
            raise InvalidValue("position", position, f"0 to {cache.table.shape[0] - 1}")
    slots = cache.table[positions].long()
    cache.slot_position[slots[slots >= 0]] = -1
    cache.table[positions] = -1
