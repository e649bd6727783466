"""The hidden state of a page's last token, stored in the page: a history can be resumed at any page boundary.

Rows that a step wrote provisionally are stored as well; the step that writes them again replaces it, and until then the
page is not copied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.append import page_of
from compute.kernels.triton_support import await_kernel_before, launch_options
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def store_hidden(records: Tensor, page_format: PageFormat, positions: Tensor, hidden: Tensor) -> None:
    """Enqueue storing ``hidden`` float32 [batch, rows, hidden size], contiguous, of those rows that end a page.

    ``records`` int64 [batch, `descriptors.FIELDS`] of any one group; ``positions`` int64 [batch, rows], of which those
    outside the session's map are left out. Raises `InvalidValue` for shapes that do not fit.
    """
    size = page_format.hidden_size
    if hidden.shape != (*positions.shape, size) or not hidden.is_contiguous() or len(records) != len(positions):
        raise InvalidValue("hidden states", tuple(hidden.shape), f"contiguous {(*positions.shape, size)}")
    _store_kernel[(positions.shape[1], positions.shape[0])](
        records,
        positions,
        hidden,
        page_format.hidden_offset,
        page_format.stride,
        FIELDS=field.FIELDS,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    records,
    positions,
    hidden,
    hidden_offset,
    stride,
    FIELDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    record = records + tl.program_id(1) * FIELDS
    row = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    position = tl.load(positions + row)
    ends_page = position % _PAGE_TOKENS == _PAGE_TOKENS - 1
    valid = (position >= 0) & (position < tl.load(record + field.MAP_TOKENS)) & ends_page
    if valid:
        column = tl.arange(0, BLOCK)
        own, peer = page_of(record, position, valid, stride)
        value = tl.load(hidden + row * SIZE + column, mask=column < SIZE, other=0.0)
        tl.store((own + hidden_offset).to(tl.pointer_type(tl.float32)) + column, value, mask=column < SIZE)
        if peer != 0:
            tl.store((peer + hidden_offset).to(tl.pointer_type(tl.float32)) + column, value, mask=column < SIZE)
