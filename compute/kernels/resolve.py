"""Resolve and assign: one round of the hot cache of one index group, for a batch of sessions, in one launch.

The definition is `compute.kernels.reference.resolve`. The work is O(selection), whatever cache and history hold.

Each session has ``PROGRAMS`` programs of ``LANES`` selected positions. A program looks its positions up, stamps the
slots of its hits, and claims its misses by exchange on the table (-1 becomes -2: whoever gets the -1 has the claim, all
others are duplicates), so the table never holds a slot of this round while positions are still looked up. Claims are
listed from the front of a list, duplicates from its back. Then the program takes a ticket, and whoever takes the last
one sees all stamps and claims, and assigns: the m-th claim takes the m-th slot, from the cursor on, without a stamp of
this round. A window of as many slots as were selected always holds enough of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels import state
from compute.kernels.triton_support import await_kernel_before, delay, launch_options, load_pointer
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat

MAX_SELECTED = (1 << 14) - 1
"""Most selected positions of one session in a round: a ticket counts them in fields of 14 bits."""

LANES = 256
WARPS = 8
CHUNK = 2048
"""Slots, and claims, that assign handles at a time."""

_FREE = tl.constexpr(-1)
_CLAIMED = tl.constexpr(-2)
_CURSOR = tl.constexpr(state.CURSOR)
_ROUND = tl.constexpr(state.ROUND)
_MISSES = tl.constexpr(state.MISSES)
_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)

# A ticket word: 8 bits of programs done, then 14 bits for each counter of `GroupCache.counters`.
_PROGRAMS_DONE = tl.constexpr(0xFF)
_COUNT = tl.constexpr((1 << 14) - 1)
_HITS_AT = tl.constexpr(8 + 14 * state.HITS)
_CLAIMS_AT = tl.constexpr(8 + 14 * state.UNIQUE_MISSES)
_RING_HITS_AT = tl.constexpr(8 + 14 * state.RING_HITS)
_DUPLICATES_AT = tl.constexpr(8 + 14 * state.DUPLICATE_MISSES)


@dataclass(frozen=True)
class RoundBuffers:
    """Outputs and scratch of the rounds of a batch, made once: recorded graphs keep their addresses.

    One set serves all index groups in turn: what reads a round's outputs must come before the next round on the stream.
    """

    addresses: Tensor
    """int64 [batch, rows, k]: group row of each selected position, 0 where empty; misses hold theirs after `fetch`."""
    source: Tensor
    """int64 [batch, rows * k]: home of each miss's group row; ``misses`` of them."""
    target: Tensor
    """int64 [batch, rows * k]: address of the slot that each miss took."""
    misses: Tensor
    """int32 [batch]"""
    listed: Tensor
    """int64 [batch, rows * k], scratch: lane << 32 | position; claims from the front, duplicates from the back."""
    free_slots: Tensor
    """int32 [batch, rows * k], scratch: the slots that claims take, in the order of the cursor."""
    tickets: Tensor
    """int64 [batch, 2], scratch, 0 between launches: the ticket word; listed claims and, << 32, duplicates."""

    @classmethod
    def empty(cls, batch: int, rows: int, k: int, device: torch.device) -> RoundBuffers:
        """Buffers for ``rows`` query rows with ``k`` selected positions each, per session."""
        if not 0 < rows * k <= MAX_SELECTED:
            raise InvalidValue("selected positions of one round", rows * k, f"1 to {MAX_SELECTED}")
        flat = (batch, rows * k)
        return cls(
            addresses=torch.zeros((batch, rows, k), dtype=torch.int64, device=device),
            source=torch.zeros(flat, dtype=torch.int64, device=device),
            target=torch.zeros(flat, dtype=torch.int64, device=device),
            misses=torch.zeros(batch, dtype=torch.int32, device=device),
            listed=torch.zeros(flat, dtype=torch.int64, device=device),
            free_slots=torch.zeros(flat, dtype=torch.int32, device=device),
            tickets=torch.zeros((batch, 2), dtype=torch.int64, device=device),
        )


def resolve(
    records: Tensor,
    page_format: PageFormat,
    group: int,
    selection: Tensor,
    buffers: RoundBuffers,
    *,
    delay_seed: int = 0,
) -> None:
    """Enqueue one round of ``group`` for every session of a batch; changes their caches and ``buffers``.

    ``records`` is int64 [batch, `descriptors.FIELDS`], made by `descriptors.describe` for as many selected positions;
    ``selection`` int32 [batch, rows, k]. Both are contiguous. ``delay_seed`` other than 0 is for race tests.
    """
    if selection.dtype != torch.int32 or selection.shape != buffers.addresses.shape or not selection.is_contiguous():
        raise InvalidValue(
            "selection",
            f"{selection.dtype} {tuple(selection.shape)}",
            f"contiguous int32 {tuple(buffers.addresses.shape)}",
        )
    batch, rows, k = selection.shape
    selected = rows * k
    lanes = min(LANES, triton.next_power_of_2(selected))
    programs = triton.cdiv(selected, lanes)
    _resolve_kernel[(programs, batch)](
        records,
        selection,
        buffers.addresses,
        buffers.source,
        buffers.target,
        buffers.misses,
        buffers.listed,
        buffers.free_slots,
        buffers.tickets,
        page_format.group_offset(group),
        page_format.group_row_bytes(group),
        page_format.stride,
        FIELDS=field.FIELDS,
        SELECTED=selected,
        LANES=lanes,
        PROGRAMS=programs,
        CHUNK=min(CHUNK, triton.next_power_of_2(selected)),
        DELAY=delay_seed,
        num_warps=WARPS,
        **launch_options(),
    )


@triton.jit
def _spread(COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 … COUNT - 1 with neighbours in neighbouring threads. A thread with a run of them would load wider words, but
    each exchange between these and scattered accesses would go through shared memory and two barriers.
    """
    return tl.max_contiguous(tl.arange(0, COUNT), 1)


@triton.jit
def _resolve_kernel(  # type: ignore[no-untyped-def]
    records,
    selection,
    addresses,
    source,
    target,
    misses,
    listed,
    free_slots,
    tickets,
    group_offset,
    group_row_bytes,
    stride,
    FIELDS: tl.constexpr,
    SELECTED: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    DELAY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    session = tl.program_id(1).to(tl.int64)
    record = records + session * FIELDS
    first = session * SELECTED
    lane = tl.program_id(0) * LANES + _spread(LANES)
    position = tl.load(selection + first + lane, mask=lane < SELECTED, other=-1)
    table = load_pointer(record, field.TABLE, tl.int32)
    slot_round = load_pointer(record, field.SLOT_ROUND, tl.int32)
    control = load_pointer(record, field.CONTROL, tl.int32)
    window = load_pointer(record, field.WINDOW, tl.int64)
    page_address = load_pointer(record, field.PAGE_ADDRESS, tl.int64)
    slot_rows = tl.load(record + field.SLOT_ROWS)
    table_tokens = tl.load(record + field.TABLE_TOKENS)
    active = table_tokens > 0  # an idle place has no tokens
    in_table = (position >= 0) & (position < table_tokens)
    ring_first = tl.load(window, mask=active, other=0)
    length = tl.load(window + 1, mask=active, other=0)
    cursor = tl.load(control + _CURSOR, mask=active, other=0)
    round_number = tl.load(control + _ROUND, mask=active, other=0) + 1
    delay(DELAY, round_number, 0)
    found = tl.load(table + position, mask=in_table, other=_FREE)

    valid = in_table & (position < length)
    in_ring = valid & (position >= ring_first)
    cached = valid & (position < ring_first)
    hit = cached & (found >= 0)
    tl.store(slot_round + found, round_number, mask=hit)
    delay(DELAY, round_number, 1)
    missed = cached & (found < 0)
    home = tl.load(page_address + position // _PAGE_TOKENS, mask=missed, other=0)
    unclaimed = missed & (found == _FREE)
    before = tl.atomic_xchg(table + position, tl.full([LANES], _CLAIMED, tl.int32), mask=unclaimed, sem="relaxed")
    claimed = unclaimed & (before == _FREE)
    duplicate = missed & ~claimed

    token_offset = group_offset + (position % _PAGE_TOKENS) * group_row_bytes
    ring_page = (position // _PAGE_TOKENS) % tl.maximum(tl.load(record + field.RING_PAGES).to(tl.int32), 1)
    in_ring_at = tl.load(record + field.RING_BASE) + ring_page.to(tl.int64) * stride + token_offset
    in_slot_at = slot_rows + found.to(tl.int64) * group_row_bytes
    address = tl.where(in_ring, in_ring_at, tl.where(hit, in_slot_at, 0))
    tl.store(addresses + first + lane, address, mask=(lane < SELECTED) & ~missed)

    ranks = tl.cumsum(claimed.to(tl.int32) + (duplicate.to(tl.int32) << 16))  # of both, 16 bits each
    counts = claimed.to(tl.int64) << _CLAIMS_AT
    counts += (duplicate.to(tl.int64) << _DUPLICATES_AT) + (hit.to(tl.int64) << _HITS_AT)
    word = tl.sum(counts + (in_ring.to(tl.int64) << _RING_HITS_AT)) + 1
    claims, duplicates = (word >> _CLAIMS_AT) & _COUNT, (word >> _DUPLICATES_AT) & _COUNT
    listed_before = claims * 0
    if PROGRAMS > 1 and claims + duplicates > 0:
        listed_before = tl.atomic_add(tickets + 2 * session + 1, claims + (duplicates << 32), sem="relaxed")
    claim_index = (listed_before & 0xFFFFFFFF) + (ranks & 0xFFFF) - 1
    duplicate_index = SELECTED - (listed_before >> 32) - (ranks >> 16)
    entry = (lane.to(tl.int64) << 32) + position
    tl.store(listed + first + tl.where(claimed, claim_index, duplicate_index), entry, mask=missed)
    tl.store(source + first + claim_index, home + token_offset, mask=claimed)

    delay(DELAY, round_number, 2)
    tl.debug_barrier()  # so that the ticket publishes what all threads of this program wrote
    if PROGRAMS > 1:
        word += tl.atomic_add(tickets + 2 * session, word, sem="acq_rel")
    if (word & _PROGRAMS_DONE) == PROGRAMS:
        delay(DELAY, round_number, 3)
        all_claims = ((word >> _CLAIMS_AT) & _COUNT).to(tl.int32)
        all_duplicates = ((word >> _DUPLICATES_AT) & _COUNT).to(tl.int32)
        if all_claims > 0:
            _assign(
                record,
                cursor,
                round_number,
                all_claims,
                all_duplicates,
                addresses + first,
                target + first,
                listed + first,
                free_slots + first,
                group_row_bytes,
                SELECTED,
                CHUNK,
            )
        tl.store(misses + session, all_claims)
        tl.store(tickets + 2 * session, 0)
        tl.store(tickets + 2 * session + 1, 0)
        tl.store(control + _ROUND, round_number, mask=active)
        tl.store(control + _MISSES, all_claims, mask=active)
        counters = load_pointer(record, field.COUNTERS, tl.int64)
        for counter in tl.static_range(4):
            added = (word >> (8 + 14 * counter)) & _COUNT
            tl.atomic_add(counters + counter, added, mask=active, sem="relaxed")  # an add that waits for nothing


@triton.jit
def _assign(  # type: ignore[no-untyped-def]
    record,
    cursor,
    round_number,
    claims,
    duplicates,
    addresses,
    target,
    listed,
    free_slots,
    group_row_bytes,
    SELECTED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Give the listed claims their slots, and all misses their addresses. Run by one program, after all stamps."""
    table = load_pointer(record, field.TABLE, tl.int32)
    slot_round = load_pointer(record, field.SLOT_ROUND, tl.int32)
    slot_position = load_pointer(record, field.SLOT_POSITION, tl.int32)
    control = load_pointer(record, field.CONTROL, tl.int32)
    slots = tl.load(record + field.SLOTS).to(tl.int32)
    slot_rows = tl.load(record + field.SLOT_ROWS)

    index = _spread(CHUNK)
    free, scanned = claims * 0, claims * 0
    while free < claims:
        slot = cursor + scanned + index
        slot = tl.where(slot >= slots, slot - slots, slot)
        inside = scanned + index < slots
        stamp = tl.load(slot_round + slot, mask=inside, other=round_number)
        owner = tl.load(slot_position + slot, mask=inside, other=-1)
        rank = free + tl.cumsum((stamp != round_number).to(tl.int32)) - 1
        taken = (stamp != round_number) & (rank < claims)
        tl.store(free_slots + rank, slot, mask=taken)
        tl.store(table + owner, _FREE, mask=taken & (owner >= 0))
        last = taken & (rank == claims - 1)
        tl.store(control + _CURSOR + index * 0, tl.where(slot + 1 == slots, 0, slot + 1), mask=last)
        free = tl.max(rank) + 1
        scanned += CHUNK
    tl.debug_barrier()  # the free slots are listed

    done = claims * 0
    while done < claims:
        mine = done + index < claims
        entry = tl.load(listed + done + index, mask=mine, other=0)
        slot = tl.load(free_slots + done + index, mask=mine, other=0)
        position = entry.to(tl.int32)
        address = slot_rows + slot.to(tl.int64) * group_row_bytes
        tl.store(target + done + index, address, mask=mine)
        tl.store(addresses + (entry >> 32), address, mask=mine)
        tl.store(table + position, slot, mask=mine)
        tl.store(slot_position + slot, position, mask=mine)
        tl.store(slot_round + slot, round_number, mask=mine)
        done += CHUNK

    if duplicates > 0:
        tl.debug_barrier()  # the table holds the slots of this round
        done = duplicates * 0
        while done < duplicates:
            mine = done + index < duplicates
            entry = tl.load(listed + SELECTED - 1 - done - index, mask=mine, other=0)
            slot = tl.load(table + entry.to(tl.int32), mask=mine, other=0)
            tl.store(addresses + (entry >> 32), slot_rows + slot.to(tl.int64) * group_row_bytes, mask=mine)
            done += CHUNK
