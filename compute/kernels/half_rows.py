"""A layer's rows of a whole history as float16, for a pass with many query rows.

Such a pass selects each row many times over. So each is converted once, and `compute.kernels.attention_rows` copies it
from here to where the matrix unit reads it, as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.ptx import PTX, scaled_halves
from compute.kernels.triton_support import await_kernel_before, launch_options, load_pointer
from protocol.errors import InvalidValue
from protocol.layout import LATENT_DIM, PAGE_TOKENS, Q8G64, ROPE_DIM, PageFormat

HALF_ROW_DIMS = LATENT_DIM + ROPE_DIM

_ROWS = 16
"""Of a program."""
_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)
_SCALES_OFFSET = tl.constexpr(Q8G64.rows.scales_offset)
_ROPE_OFFSET = tl.constexpr(Q8G64.rows.rope_offset)
_WIDTH = tl.constexpr(HALF_ROW_DIMS)


def fill_half_rows(record: Tensor, page_format: PageFormat, group: int, layer_in_group: int, halves: Tensor) -> None:
    """Write a layer's rows of positions 0, 1, … to ``halves`` float16 [n, 576], as many as the session has, and as fit.

    ``record`` is int64 [`descriptors.FIELDS`]; both are contiguous. A row is 512 latents and 64 ropes, with the bits
    that attention multiplies. Raises `InvalidValue` for another shape or type, or another encoding than `Q8G64`.
    """
    if page_format.encoding != Q8G64:
        raise InvalidValue("encoding of rows", page_format.encoding.name, Q8G64.name)
    if halves.dtype != torch.float16 or halves.shape[1:] != (HALF_ROW_DIMS,) or not halves.is_contiguous():
        raise InvalidValue("halves", (halves.dtype, tuple(halves.shape)), f"contiguous float16 [n, {HALF_ROW_DIMS}]")
    halves_kernel[(triton.cdiv(len(halves), _ROWS),)](
        record,
        halves,
        page_format.group_offset(group) + layer_in_group * Q8G64.rows.row_bytes,
        page_format.group_row_bytes(group),
        page_format.stride,
        len(halves),
        ROWS=_ROWS,
        PTX=PTX,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def halves_kernel(  # type: ignore[no-untyped-def]
    record,
    halves,
    layer_offset,
    group_row_bytes,
    stride,
    room,
    ROWS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, 8)
    dim = tl.arange(0, 64)
    await_kernel_before(OVERLAPPED)
    tokens = tl.load(record + field.MAP_TOKENS)  # an idle place has none
    window = load_pointer(record, field.WINDOW, tl.int64)
    page_address = load_pointer(record, field.PAGE_ADDRESS, tl.int64)
    ring_base = tl.load(record + field.RING_BASE)
    ring_pages = tl.maximum(tl.load(record + field.RING_PAGES).to(tl.int32), 1)
    ring_first = tl.load(window, mask=tokens > 0, other=0)
    length = tl.load(window + 1, mask=tokens > 0, other=0)
    present = (position < tokens) & (position < length) & (position < room)
    home = tl.load(page_address + position // _PAGE_TOKENS, mask=present, other=0)
    in_ring_at = ring_base + (position // _PAGE_TOKENS % ring_pages).to(tl.int64) * stride
    start = tl.where(position >= ring_first, in_ring_at, home)
    start += layer_offset + (position % _PAGE_TOKENS) * group_row_bytes
    scales = (start + _SCALES_OFFSET).to(tl.pointer_type(tl.bfloat16))[:, None] + group[None, :]
    scales = tl.load(tl.multiple_of(scales, [1, 16]), mask=present[:, None], other=0.0).to(tl.float16)
    values = start.to(tl.pointer_type(tl.int8))[:, None, None] + (group[:, None] * 64 + dim[None, :])[None, :, :]
    values = tl.load(tl.multiple_of(values, [1, 1, 16]), mask=present[:, None, None], other=0)
    ropes = (start + _ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16))[:, None] + dim[None, :]
    ropes = tl.load(tl.multiple_of(ropes, [1, 16]), mask=present[:, None], other=0.0)
    latents = scaled_halves(values, tl.broadcast_to(scales[:, :, None], [ROWS, 8, 64]), PTX)
    at = halves + position.to(tl.int64) * _WIDTH
    of_latents = at[:, None, None] + (group[:, None] * 64 + dim[None, :])[None, :, :]
    tl.store(of_latents, latents, mask=present[:, None, None])
    tl.store(at[:, None] + 512 + dim[None, :], ropes.to(tl.float16), mask=present[:, None])
