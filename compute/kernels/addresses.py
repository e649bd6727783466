"""Addresses of a selection as the rows lie when it is made: in the ring, in a slot, or at home.

Without a cache, of resident sessions and prefills, the definition is `compute.kernels.reference.row_addresses`. With
one, a position that has a slot is read there, and one that has none is read at home, in registered host RAM. That
changes nothing in the cache and waits for nothing, so the anchor layer can attend while the round that brings the
missing rows is still under way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels import state
from compute.kernels.triton_support import await_kernel_before, launch_options, load_pointer
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat

LANES = 256
"""Selected positions of one program."""
STAGED_LANES, STAGED_TOGETHER = 128, 16
"""The same where a program may copy the rows that are missing, and how many of them it copies at a time."""
MANY_MISSES = 32
"""Misses of the round before, per query row, beyond which the rows are copied. Attention hides the way of a few single
rows to the host, but has not enough reads in flight for many.
"""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)
_MISSES = tl.constexpr(state.MISSES)


def row_addresses(
    records: Tensor,
    page_format: PageFormat,
    group: int,
    selection: Tensor,
    addresses: Tensor,
    *,
    cached: bool = False,
    staging: Tensor | None = None,
) -> None:
    """Write to ``addresses`` int64 [batch, rows, k] where the rows of ``selection`` int32 [batch, rows, k] lie.

    ``records`` is int64 [batch, `descriptors.FIELDS`]; all are contiguous. 0 stands for what is no position of the
    session. With ``cached``, slots are looked up: a slot of these addresses keeps its row until the round after the one
    that resolves this selection. With ``staging`` too, uint8 [batch, rows, k, row bytes], the group's first row of a
    position without a slot is copied from home to its place there, and that is the address, if the session's last round
    had more than `MANY_MISSES` per row; a position that several rows selected, in ascending order, is copied for the
    first of them. Raises `InvalidValue` for shapes or types that do not fit.
    """
    if selection.shape != addresses.shape or not (selection.is_contiguous() and addresses.is_contiguous()):
        raise InvalidValue("selection and addresses", (selection.shape, addresses.shape), "contiguous, of one shape")
    row_bytes = page_format.encoding.rows.row_bytes
    if staging is not None and (staging.shape != (*selection.shape, row_bytes) or not staging.is_contiguous()):
        raise InvalidValue("staging", tuple(staging.shape), f"contiguous {(*selection.shape, row_bytes)}")
    batch, selected = selection.shape[0], selection[0].numel()
    lanes = LANES if staging is None else STAGED_LANES
    _addresses_kernel[(triton.cdiv(selected, lanes), batch)](
        records,
        selection,
        addresses,
        addresses if staging is None else staging.view(torch.int32),
        page_format.group_offset(group),
        page_format.group_row_bytes(group),
        page_format.stride,
        selected,
        FIELDS=field.FIELDS,
        CACHED=cached,
        STAGED=staging is not None,
        ROWS=selection.shape[1],
        K=selection.shape[2],
        K_BITS=selection.shape[2].bit_length(),
        ROW_WORDS=row_bytes // 4,
        BLOCK_WORDS=triton.next_power_of_2(row_bytes // 4),
        LANES=lanes,
        TOGETHER=STAGED_TOGETHER,
        MANY=MANY_MISSES * selection.shape[1],
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _addresses_kernel(  # type: ignore[no-untyped-def]
    records,
    selection,
    addresses,
    staging,
    group_offset,
    group_row_bytes,
    stride,
    selected,
    FIELDS: tl.constexpr,
    CACHED: tl.constexpr,
    STAGED: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    K_BITS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    TOGETHER: tl.constexpr,
    MANY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    session = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    await_kernel_before(OVERLAPPED)
    record = records + session * FIELDS
    at = session * selected + lane
    position = tl.load(selection + at, mask=lane < selected, other=-1)
    tokens = tl.load(record + (field.TABLE_TOKENS if CACHED else field.MAP_TOKENS))  # an idle place has none
    window = load_pointer(record, field.WINDOW, tl.int64)
    page_address = load_pointer(record, field.PAGE_ADDRESS, tl.int64)
    ring_base = tl.load(record + field.RING_BASE)
    ring_pages = tl.maximum(tl.load(record + field.RING_PAGES).to(tl.int32), 1)
    ring_first = tl.load(window, mask=tokens > 0, other=0)
    length = tl.load(window + 1, mask=tokens > 0, other=0)
    in_map = (position >= 0) & (position < tokens)
    home = tl.load(page_address + position // _PAGE_TOKENS, mask=in_map, other=0)
    token_offset = group_offset + (position % _PAGE_TOKENS) * group_row_bytes
    in_ring_at = ring_base + (position // _PAGE_TOKENS % ring_pages).to(tl.int64) * stride
    in_ring = position >= ring_first
    address = tl.where(in_ring, in_ring_at, home) + token_offset
    if CACHED:
        table = load_pointer(record, field.TABLE, tl.int32)
        slot = tl.load(table + position, mask=in_map, other=-1)
        in_slot_at = tl.load(record + field.SLOT_ROWS) + slot.to(tl.int64) * group_row_bytes
        address = tl.where(in_ring | (slot < 0), address, in_slot_at)
    present = in_map & (position < length)
    if STAGED:
        control = load_pointer(record, field.CONTROL, tl.int32)
        if tl.load(control + _MISSES, mask=tokens > 0, other=0) > MANY:
            missed = present & (slot < 0) & (position < ring_first)
            staged = at
            for other in tl.static_range(ROWS - 1):
                of_other = session * selected + other * K
                later = missed & (lane >= (other + 1) * K)
                found = of_other + _count_below(selection + of_other, position, later, K, K_BITS)
                same = tl.load(selection + found, mask=later & (found < of_other + K), other=-1) == position
                staged = tl.where(same & (staged == at), found, staged)
            own = missed & (staged == at)
            rank = tl.where(own, tl.cumsum(own.to(tl.int32), 0) - 1, -1)
            misses = tl.sum(own.to(tl.int32), 0)
            word = tl.arange(0, BLOCK_WORDS)
            done = 0
            while done < misses:
                number = done + tl.arange(0, TOGETHER)
                one = rank[None, :] == number[:, None]
                source = tl.sum(tl.where(one, address[None, :], 0), 1).to(tl.pointer_type(tl.int32))
                target = staging + tl.sum(tl.where(one, at[None, :], 0), 1) * ROW_WORDS
                wanted = (number < misses)[:, None] & (word < ROW_WORDS)[None, :]
                row = tl.load(tl.multiple_of(source[:, None] + word[None, :], [1, 16]), mask=wanted)
                tl.store(tl.multiple_of(target[:, None] + word[None, :], [1, 16]), row, mask=wanted)
                done += TOGETHER
            address = tl.where(missed, (staging + staged * ROW_WORDS).to(tl.int64), address)
    address = tl.where(present, address, 0)
    tl.store(addresses + at, address, mask=lane < selected)


@triton.jit
def _count_below(ascending, bound, wanted, K: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of ``ascending`` [K], which -1 fills up at its end, are less than ``bound``, for each ``wanted`` one."""
    below = bound * 0
    for bit in tl.static_range(BITS):
        probe = below + (1 << (BITS - 1 - bit))
        value = tl.load(ascending + probe - 1, mask=wanted & (probe <= K), other=-1)
        below = tl.where((value >= 0) & (value < bound), probe, below)
    return below
