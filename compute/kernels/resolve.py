"""Resolve and assign: one round of the hot cache of one index group, for a batch of sessions, in one launch.

The definition is `compute.kernels.reference.resolve`. The work is O(selection), whatever cache and history hold.

Each session has ``PROGRAMS`` programs of ``LANES`` selected positions. A program looks its positions up, stamps the
slots of its hits, and claims its misses. Where several query rows may miss the same position, they claim by exchange on
the table (-1 becomes -2: whoever gets the -1 has the claim, all others are duplicates), so the table never holds a slot
of this round while positions are still looked up. A program lists its claims from the front of its share of a list, its
duplicates from the back. Then it takes a ticket, and whoever takes the last one sees all stamps and claims, and
assigns: the m-th claim takes the m-th slot, from the cursor on, without a stamp of this round. A window of as many
slots as were selected always holds enough of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels import state
from compute.kernels.assign import assign
from compute.kernels.triton_support import await_kernel_before, delay, launch_options, load_pointer, spread
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat

MAX_SELECTED = (1 << 14) - 1
"""Most selected positions of one session in a round: a ticket counts them in fields of 14 bits."""

LANES = 256
"""Selected positions of one program, one to a thread."""
WINDOW = 2048
"""Slots that assign looks at in one go."""
TILE = 512
"""Claims that assign gives slots in one go, as many of each program."""

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
    """int64 [batch, lanes], scratch: lane << 32 | position of each claim and duplicate, in each program's share."""
    homes: Tensor
    """int64 [batch, lanes], scratch: home of each claim's group row."""
    counts: Tensor
    """int32 [batch, programs], scratch: claims, and << 16 duplicates, of each program."""
    free_slots: Tensor
    """int64 [batch, rows * k], scratch: old position << 32 | slot of the slots that claims take, from the cursor on."""
    tickets: Tensor
    """int64 [batch], scratch, 0 between launches: the ticket word."""

    @classmethod
    def empty(cls, batch: int, rows: int, k: int, device: torch.device) -> RoundBuffers:
        """Buffers for ``rows`` query rows with ``k`` selected positions each, per session."""
        if not 0 < rows * k <= MAX_SELECTED:
            raise InvalidValue("selected positions of one round", rows * k, f"1 to {MAX_SELECTED}")

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((batch, *shape), dtype=dtype, device=device)

        programs = triton.next_power_of_2(triton.cdiv(rows * k, LANES))
        return cls(
            addresses=zeros(rows, k),
            source=zeros(rows * k),
            target=zeros(rows * k),
            misses=zeros(dtype=torch.int32),
            listed=zeros(programs * LANES),
            homes=zeros(programs * LANES),
            counts=zeros(programs, dtype=torch.int32),
            free_slots=zeros(rows * k),
            tickets=zeros(),
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
    ``selection`` int32 [batch, rows, k], where no row has a position twice. Both are contiguous. ``delay_seed`` other
    than 0 is for race tests.
    """
    if selection.dtype != torch.int32 or selection.shape != buffers.addresses.shape or not selection.is_contiguous():
        raise InvalidValue(
            "selection",
            f"{selection.dtype} {tuple(selection.shape)}",
            f"contiguous int32 {tuple(buffers.addresses.shape)}",
        )
    batch, rows, k = selection.shape
    programs = buffers.counts.shape[1]
    _resolve_kernel[(programs, batch)](
        records,
        selection,
        buffers.addresses,
        buffers.source,
        buffers.target,
        buffers.misses,
        buffers.listed,
        buffers.homes,
        buffers.counts,
        buffers.free_slots,
        buffers.tickets,
        page_format.group_offset(group),
        page_format.group_row_bytes(group),
        page_format.stride,
        FIELDS=field.FIELDS,
        SELECTED=rows * k,
        SHARED=rows > 1,
        LANES=LANES,
        PROGRAMS=programs,
        WINDOW=WINDOW,
        TILE=TILE,
        DELAY=delay_seed,
        num_warps=LANES // 32,
        **launch_options(),
    )


@triton.jit
def _resolve_kernel(  # type: ignore[no-untyped-def]
    records,
    selection,
    addresses,
    source,
    target,
    misses,
    listed,
    homes,
    counts,
    free_slots,
    tickets,
    group_offset,
    group_row_bytes,
    stride,
    FIELDS: tl.constexpr,
    SELECTED: tl.constexpr,
    SHARED: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    DELAY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    session = tl.program_id(1).to(tl.int64)
    record = records + session * FIELDS
    first = session * SELECTED
    lane = tl.program_id(0) * LANES + spread(LANES)
    position = tl.load(selection + first + lane, mask=lane < SELECTED, other=-1)
    table = load_pointer(record, field.TABLE, tl.int32)
    slot_round = load_pointer(record, field.SLOT_ROUND, tl.int32)
    control = load_pointer(record, field.CONTROL, tl.int32)
    window = load_pointer(record, field.WINDOW, tl.int64)
    page_address = load_pointer(record, field.PAGE_ADDRESS, tl.int64)
    slot_position = load_pointer(record, field.SLOT_POSITION, tl.int32)
    counters = load_pointer(record, field.COUNTERS, tl.int64)
    slot_rows = tl.load(record + field.SLOT_ROWS)
    slots = tl.load(record + field.SLOTS).to(tl.int32)
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
    claimed = missed
    if SHARED:
        unclaimed = missed & (found == _FREE)
        mark = tl.full([LANES], _CLAIMED, tl.int32)
        claimed = unclaimed & (tl.atomic_xchg(table + position, mark, mask=unclaimed, sem="relaxed") == _FREE)
    duplicate = missed & ~claimed

    token_offset = group_offset + (position % _PAGE_TOKENS) * group_row_bytes
    ring_page = (position // _PAGE_TOKENS) % tl.maximum(tl.load(record + field.RING_PAGES).to(tl.int32), 1)
    in_ring_at = tl.load(record + field.RING_BASE) + ring_page.to(tl.int64) * stride + token_offset
    in_slot_at = slot_rows + found.to(tl.int64) * group_row_bytes
    address = tl.where(in_ring, in_ring_at, tl.where(hit, in_slot_at, 0))
    tl.store(addresses + first + lane, address, mask=(lane < SELECTED) & ~missed)

    ranks = tl.cumsum(claimed.to(tl.int32) + (duplicate.to(tl.int32) << 16))  # of both, 16 bits each
    share = session * (PROGRAMS * LANES) + tl.program_id(0) * LANES
    at = share + tl.where(claimed, (ranks & 0xFFFF) - 1, LANES - (ranks >> 16))
    tl.store(listed + at, (lane.to(tl.int64) << 32) + position, mask=missed)
    tl.store(homes + at, home + token_offset, mask=claimed)

    entries = (claimed.to(tl.int64) << _CLAIMS_AT) + (duplicate.to(tl.int64) << _DUPLICATES_AT)
    entries += (hit.to(tl.int64) << _HITS_AT) + (in_ring.to(tl.int64) << _RING_HITS_AT)
    word = tl.sum(entries) + 1
    count = ((word >> _CLAIMS_AT) & _COUNT) + (((word >> _DUPLICATES_AT) & _COUNT) << 16)
    counts += session * PROGRAMS
    tl.store(counts + tl.program_id(0), count.to(tl.int32))
    delay(DELAY, round_number, 2)
    tl.debug_barrier()  # so that the ticket publishes what all threads of this program wrote
    if PROGRAMS > 1:
        word += tl.atomic_add(tickets + session, word, sem="acq_rel")
    if (word & _PROGRAMS_DONE) == PROGRAMS:
        delay(DELAY, round_number, 3)
        claims = ((word >> _CLAIMS_AT) & _COUNT).to(tl.int32)
        duplicates = ((word >> _DUPLICATES_AT) & _COUNT).to(tl.int32)
        if claims > 0:
            share = session * (PROGRAMS * LANES)
            assign(
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
                addresses + first,
                source + first,
                target + first,
                listed + share,
                homes + share,
                counts,
                free_slots + first,
                group_row_bytes,
                SELECTED,
                SHARED,
                LANES,
                PROGRAMS,
                WINDOW,
                TILE,
            )
        tl.store(misses + session, claims)
        tl.store(tickets + session, 0)
        tl.store(control + _ROUND, round_number, mask=active)
        tl.store(control + _MISSES, claims, mask=active)
        for counter in tl.static_range(4):
            added = (word >> (8 + 14 * counter)) & _COUNT
            tl.atomic_add(counters + counter, added, mask=active, sem="relaxed")  # an add that waits for nothing
