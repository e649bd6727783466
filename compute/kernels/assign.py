"""Assign: the slots that a round's misses take. Run by the program of `resolve` that took a session's last ticket.

The arguments are `resolve.RoundBuffers` of one session, and what its record holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute.kernels import state
from compute.kernels.triton_support import spread

_FREE = tl.constexpr(-1)
_CURSOR = tl.constexpr(state.CURSOR)


@triton.jit
def assign(  # type: ignore[no-untyped-def]
    table,
    slot_round,
    slot_position,
    control,
    slot_rows,
    slots,
    cursor,
    round_number,
    claims,
    duplicates,
    addresses,
    source,
    target,
    listed,
    homes,
    counts,
    free_slots,
    group_row_bytes,
    SELECTED: tl.constexpr,
    SHARED: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Give the listed claims their slots, and all misses their addresses."""
    WIDTH: tl.constexpr = TILE // PROGRAMS
    index = spread(TILE)  # WIDTH claims of each program at a time
    program = index // WIDTH
    nth = index % WIDTH
    # Read as scalars, and before the slots are looked at, so that no trip to memory waits for another.
    before, own = index * 0, index * 0
    most = claims * 0
    for other in tl.static_range(PROGRAMS):
        count = tl.load(counts + other)
        before += tl.where(program > other, count & 0xFFFF, 0)
        own = tl.where(program == other, count, own)
        most = tl.maximum(most, count & 0xFFFF)
    _list_free_slots(slot_round, slot_position, slots, cursor, round_number, claims, free_slots, SELECTED, WINDOW)
    tl.debug_barrier()  # the free slots are listed

    share = program * LANES
    done = claims * 0
    while done < most:
        mine = done + nth < (own & 0xFFFF)
        at = share + done + nth
        rank = before + done + nth
        entry = tl.load(listed + at, mask=mine, other=0)
        home = tl.load(homes + at, mask=mine, other=0)
        free = tl.load(free_slots + rank, mask=mine, other=0)
        position, slot, owner = entry.to(tl.int32), free.to(tl.int32), (free >> 32).to(tl.int32)
        address = slot_rows + slot.to(tl.int64) * group_row_bytes
        tl.store(addresses + (entry >> 32), address, mask=mine)
        tl.store(source + rank, home, mask=mine)
        tl.store(target + rank, address, mask=mine)
        tl.store(table + owner, _FREE, mask=mine & (owner >= 0))
        tl.store(table + position, slot, mask=mine)
        tl.store(slot_position + slot, position, mask=mine)
        tl.store(slot_round + slot, round_number, mask=mine)
        next_slot = tl.where(slot + 1 == slots, 0, slot + 1)
        tl.store(control + _CURSOR + index * 0, next_slot, mask=mine & (rank == claims - 1))
        done += WIDTH

    if SHARED and duplicates > 0:
        tl.debug_barrier()  # the table holds the slots of this round
        most = tl.max(own >> 16)
        done = duplicates * 0
        while done < most:
            mine = done + nth < (own >> 16)
            entry = tl.load(listed + share + LANES - 1 - done - nth, mask=mine, other=0)
            slot = tl.load(table + entry.to(tl.int32), mask=mine, other=0)
            tl.store(addresses + (entry >> 32), slot_rows + slot.to(tl.int64) * group_row_bytes, mask=mine)
            done += WIDTH


@triton.jit
def _list_free_slots(  # type: ignore[no-untyped-def]
    slot_round,
    slot_position,
    slots,
    cursor,
    round_number,
    claims,
    free_slots,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """List the first ``claims`` slots, from the cursor on, without a stamp of this round."""
    index = spread(WINDOW)
    found = claims * 0
    for start in tl.static_range(0, SELECTED, WINDOW):
        if found < claims:
            slot = cursor + start + index
            slot = tl.where(slot >= slots, slot - slots, slot)
            inside = start + index < slots
            stamp = tl.load(slot_round + slot, mask=inside, other=round_number)
            owner = tl.load(slot_position + slot, mask=inside, other=-1)
            is_free = stamp != round_number
            rank = found + tl.cumsum(is_free.to(tl.int32)) - 1
            entry = (owner.to(tl.int64) << 32) + slot
            tl.store(free_slots + rank, entry, mask=is_free & (rank < claims))
            if start + WINDOW < SELECTED:
                found = tl.max(rank) + 1
