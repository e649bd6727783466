"""Addresses of a selection as the rows lie when it is made: in the ring, in a slot, or at home.

Without a cache, of resident sessions and prefills, the definition is `compute.kernels.reference.row_addresses`. With
one, a position that has a slot is read there, and one that has none is read at home, in registered host RAM. That
changes nothing in the cache and waits for nothing, so the anchor layer can attend while the round that brings the
missing rows is still under way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.triton_support import await_kernel_before, launch_options, load_pointer
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat

LANES = 256
"""Selected positions of one program."""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def row_addresses(
    records: Tensor, page_format: PageFormat, group: int, selection: Tensor, addresses: Tensor, *, cached: bool = False
) -> None:
    """Write to ``addresses`` int64 [batch, rows, k] where the rows of ``selection`` int32 [batch, rows, k] lie.

    ``records`` is int64 [batch, `descriptors.FIELDS`]; all are contiguous. 0 stands for what is no position of the
    session. With ``cached``, slots are looked up: a slot of these addresses keeps its row until the round after the one
    that resolves this selection. Raises `InvalidValue` for shapes or types that do not fit.
    """
    if selection.shape != addresses.shape or not (selection.is_contiguous() and addresses.is_contiguous()):
        raise InvalidValue("selection and addresses", (selection.shape, addresses.shape), "contiguous, of one shape")
    batch, selected = selection.shape[0], selection[0].numel()
    _addresses_kernel[(triton.cdiv(selected, LANES), batch)](
        records,
        selection,
        addresses,
        page_format.group_offset(group),
        page_format.group_row_bytes(group),
        page_format.stride,
        selected,
        FIELDS=field.FIELDS,
        CACHED=cached,
        LANES=LANES,
        num_warps=LANES // 64,
        **launch_options(),
    )


@triton.jit
def _addresses_kernel(  # type: ignore[no-untyped-def]
    records,
    selection,
    addresses,
    group_offset,
    group_row_bytes,
    stride,
    selected,
    FIELDS: tl.constexpr,
    CACHED: tl.constexpr,
    LANES: tl.constexpr,
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
    address = tl.where(in_map & (position < length), address, 0)
    tl.store(addresses + at, address, mask=lane < selected)
