"""Append: encode new tokens' rows, and index keys, and store them where they are read; forget them in the hot cache.

The definitions are `compute.kernels.reference.append_rows`, ``append_keys`` and ``forget``; the bytes are the same. A
row goes to the ring from ``ring_first`` on, else to its page's home, and to the same place of a peer's ring if the
record names one. Everything is quantised once. What a reference function refuses (a NaN, a position outside the map)
cannot be refused from here: such a position is left out, and a NaN is the model's to exclude.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.triton_support import (
    await_kernel_before,
    bfloat16_bits,
    launch_options,
    load_pointer,
    round_half_even,
)
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, PAGE_TOKENS, ROPE_DIM, PageFormat

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)
_LATENT_DIM = tl.constexpr(LATENT_DIM)
_ROPE_DIM = tl.constexpr(ROPE_DIM)
_INDEX_DIM = tl.constexpr(INDEX_DIM)


def append_rows(
    records: Tensor,
    page_format: PageFormat,
    group: int,
    layer_in_group: int,
    positions: Tensor,
    latent: Tensor,
    rope: Tensor,
) -> None:
    """Enqueue one layer's rows of ``positions`` int64 [batch, n]: ``latent`` [batch, n, 512], ``rope`` [batch, n, 64].

    ``records`` is int64 [batch, `descriptors.FIELDS`]; values are float32 or bfloat16; all are contiguous. A position
    below 0 is padding. The anchor layer's call (``layer_in_group`` 0) also forgets the positions in the hot cache of
    the group, where a record has one, so it must come before the round that may select them.
    """
    _check("latent and rope", (latent, rope), positions, (LATENT_DIM, ROPE_DIM))
    rows = page_format.encoding.rows
    _append_rows_kernel[(positions.shape[1], positions.shape[0])](
        records,
        positions,
        latent,
        rope,
        page_format.row_offset(group, 0, layer_in_group),
        page_format.group_row_bytes(group),
        page_format.stride,
        FIELDS=field.FIELDS,
        QUANTISED=rows.scale_count > 0,
        E4M3=rows.latent_dtype == "float8_e4m3fn",
        SCALES=max(rows.scale_count, 1),
        SCALES_OFFSET=rows.scales_offset,
        ROPE_OFFSET=rows.rope_offset,
        FORGET=layer_in_group == 0,
        num_warps=1,
        **launch_options(),
    )


def append_keys(records: Tensor, page_format: PageFormat, group: int, positions: Tensor, keys: Tensor) -> None:
    """Enqueue the index keys of ``group``: ``positions`` int64 [batch, n], ``keys`` [batch, n, 128], as `append_rows`.

    A key is written to its block in VRAM, to the peer's block if the record names one, and to the page.
    """
    _check("index keys", (keys,), positions, (INDEX_DIM,))
    layout = page_format.encoding.keys
    _append_keys_kernel[(positions.shape[1], positions.shape[0])](
        records,
        positions,
        keys,
        page_format.keys_offset(group),
        page_format.stride,
        FIELDS=field.FIELDS,
        SCALED=layout.has_scales,
        SCALES_OFFSET=layout.scales_offset,
        num_warps=1,
        **launch_options(),
    )


def _check(what: str, tensors: tuple[Tensor, ...], positions: Tensor, widths: tuple[int, ...]) -> None:
    for tensor, width in zip(tensors, widths, strict=True):
        fits = tensor.shape == (*positions.shape, width) and tensor.dtype in (torch.float32, torch.bfloat16)
        if not (fits and tensor.is_contiguous()):
            raise InvalidValue(
                what, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous, float, {(*positions.shape, width)}"
            )


@triton.jit
def page_of(record, position, valid, stride):  # type: ignore[no-untyped-def]
    """Address of the page that a ``valid`` position is written to, and of the same page in a peer's ring, or 0.

    The record's fields are loaded side by side, before anything is decided: each load that waits for another one costs
    as much as all the rest.
    """
    window = load_pointer(record, field.WINDOW, tl.int64)
    homes = load_pointer(record, field.PAGE_ADDRESS, tl.int64)
    ring, ring_pages = tl.load(record + field.RING_BASE), tl.load(record + field.RING_PAGES)
    peer_ring = tl.load(record + field.PEER_RING_BASE)
    page = position // _PAGE_TOKENS
    in_ring = position >= tl.load(window, mask=valid, other=0)
    home = tl.load(homes + page, mask=valid, other=0)
    offset = page % tl.maximum(ring_pages, 1) * stride
    return tl.where(in_ring, ring + offset, home), tl.where(in_ring & (peer_ring != 0), peer_ring + offset, 0)


@triton.jit
def _append_rows_kernel(  # type: ignore[no-untyped-def]
    records,
    positions,
    latent,
    rope,
    layer_offset,
    group_row_bytes,
    stride,
    FIELDS: tl.constexpr,
    QUANTISED: tl.constexpr,
    E4M3: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    FORGET: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    record = records + tl.program_id(1) * FIELDS
    row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    position = tl.load(positions + row)
    scale_index = tl.arange(0, SCALES)
    latent_index = scale_index[:, None] * (_LATENT_DIM // SCALES) + tl.arange(0, _LATENT_DIM // SCALES)[None, :]
    rope_index = tl.arange(0, _ROPE_DIM)
    x = tl.load(latent + row * _LATENT_DIM + latent_index).to(tl.float32)
    p = tl.load(rope + row * _ROPE_DIM + rope_index).to(tl.float32)
    valid = (position >= 0) & (position < tl.load(record + field.MAP_TOKENS))
    own, peer = page_of(record, position, valid, stride)
    if FORGET:
        slots = load_pointer(record, field.SLOT_POSITION, tl.int32)
        entry = load_pointer(record, field.TABLE, tl.int32) + position
        cached = valid & (position < tl.load(record + field.TABLE_TOKENS))
        slot = tl.load(entry, mask=cached, other=-1)
        tl.store(slots + slot, -1, mask=slot >= 0)
        tl.store(entry, -1, mask=cached)
    if valid:
        offset = layer_offset + (position % _PAGE_TOKENS) * group_row_bytes
        scale_bits = tl.zeros([SCALES], tl.int32)
        if E4M3:
            scale = tl.div_rn(tl.max(tl.abs(x), axis=1), 448.0)
            scale_bits = scale.to(tl.int32, bitcast=True)
            quotient = tl.div_rn(x, tl.where(scale == 0, 1.0, scale)[:, None])
            x = tl.where((scale == 0)[:, None], 0.0, tl.minimum(tl.maximum(quotient, -448.0), 448.0))
        elif QUANTISED:
            scale_bits = bfloat16_bits(tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0))
            scale = (scale_bits << 16).to(tl.float32, bitcast=True)
            quotient = tl.div_rn(x, tl.where(scale == 0, 1.0, scale)[:, None])
            q = tl.minimum(tl.maximum(round_half_even(quotient), -127.0), 127.0)
            x = tl.where((scale == 0)[:, None], 0.0, q)
        _store_row(own + offset, x, scale_bits, p, latent_index, QUANTISED, E4M3, SCALES, SCALES_OFFSET, ROPE_OFFSET)
        if peer != 0:
            _store_row(
                peer + offset, x, scale_bits, p, latent_index, QUANTISED, E4M3, SCALES, SCALES_OFFSET, ROPE_OFFSET
            )


@triton.jit
def _store_row(  # type: ignore[no-untyped-def]
    address,
    x,
    scale_bits,
    p,
    latent_index,
    QUANTISED: tl.constexpr,
    E4M3: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
):
    """Store one encoded row; ``x`` holds the quantised values, still in float32."""
    address = tl.multiple_of(address, 16)
    rope_index = tl.arange(0, _ROPE_DIM)
    if QUANTISED:
        values = address.to(tl.pointer_type(tl.int8)) + latent_index
        if E4M3:
            tl.store(values, _e4m3_bits(x).to(tl.int8))
            scales_at = (address + SCALES_OFFSET).to(tl.pointer_type(tl.int32))
            tl.store(scales_at + tl.arange(0, SCALES), scale_bits)
        else:
            tl.store(values, x.to(tl.int32).to(tl.int8))
            scales_at = (address + SCALES_OFFSET).to(tl.pointer_type(tl.int16))
            tl.store(scales_at + tl.arange(0, SCALES), scale_bits.to(tl.int16))
        tl.store((address + ROPE_OFFSET).to(tl.pointer_type(tl.int16)) + rope_index, bfloat16_bits(p).to(tl.int16))
    else:
        tl.store(address.to(tl.pointer_type(tl.float32)) + latent_index, x)
        tl.store((address + ROPE_OFFSET).to(tl.pointer_type(tl.float32)) + rope_index, p)


@triton.jit
def _append_keys_kernel(  # type: ignore[no-untyped-def]
    records,
    positions,
    keys,
    keys_offset,
    stride,
    FIELDS: tl.constexpr,
    SCALED: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    record = records + tl.program_id(1) * FIELDS
    row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    position = tl.load(positions + row)
    key = tl.load(keys + row * _INDEX_DIM + tl.arange(0, _INDEX_DIM)).to(tl.float32)
    valid = (position >= 0) & (position < tl.load(record + field.MAP_TOKENS))
    page, token = position // _PAGE_TOKENS, position % _PAGE_TOKENS
    peer_blocks = load_pointer(record, field.PEER_KEY_BLOCK_ADDRESS, tl.int64)
    block = tl.load(load_pointer(record, field.KEY_BLOCK_ADDRESS, tl.int64) + page, mask=valid, other=0)
    own, peer = page_of(record, position, valid, stride)
    if valid:
        scale = tl.full([], 1.0, tl.float32)
        if SCALED:
            quotient = tl.div_rn(tl.maximum(tl.max(tl.abs(key)), 1e-4), 448.0)
            bits = quotient.to(tl.int32, bitcast=True)
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # rounded up to a power of two
            scale = (exponent << 23).to(tl.float32, bitcast=True)
            key = tl.div_rn(key, scale)
        _store_key(block, token, key, scale, SCALED, SCALES_OFFSET)
        _store_key(own + keys_offset, token, key, scale, SCALED, SCALES_OFFSET)
        if peer != 0:
            _store_key(peer + keys_offset, token, key, scale, SCALED, SCALES_OFFSET)
        if peer_blocks.to(tl.int64) != 0:
            peer_block = tl.load(peer_blocks + page)
            _store_key(peer_block, token, key, scale, SCALED, SCALES_OFFSET)


@triton.jit
def _store_key(block, token, key, scale, SCALED: tl.constexpr, SCALES_OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store ``key``, already divided by ``scale``, and the scale, in a block of 64 keys."""
    index = token * _INDEX_DIM + tl.arange(0, _INDEX_DIM)
    block = tl.multiple_of(block, 16)
    if SCALED:
        tl.store(block.to(tl.pointer_type(tl.int8)) + index, _e4m3_bits(key).to(tl.int8))
        tl.store((block + SCALES_OFFSET).to(tl.pointer_type(tl.float32)) + token, scale)
    else:
        tl.store(block.to(tl.pointer_type(tl.float32)) + index, key)


@triton.jit
def _e4m3_bits(x):  # type: ignore[no-untyped-def]
    """The bits, int32, of float32 ``x`` rounded to e4m3, ties to even; |x| <= 448. Not every GPU has the conversion."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (
        120 << 3
    )  # three bits of fraction; the bias is 7, not 127
    subnormal = round_half_even(tl.abs(x) * 512.0).to(tl.int32)  # steps of 2 ** -9
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal) | sign
