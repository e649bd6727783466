"""A selection of one layer as other engines want it: its rows side by side in blocks of 64 tokens, and their indices.

Here the rows of a token's layers lie together, and attention reads them by address. FlashMLA and vLLM keep each layer's
rows apart, ``[blocks][64][row bytes]``, and attend to indices of tokens in it. What is exported is one selection, each
row once for every query row that selected it; with rows in ``fp8_ds_mla`` their kernels can attend to it as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels.memory import Memory
from compute.kernels.triton_support import await_kernel_before, launch_options
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS

ROWS = 8
"""Rows that one program copies."""


def planar_blocks(query_rows: int, k: int) -> int:
    """Blocks of 64 tokens that a selection of ``query_rows`` × ``k`` rows takes."""
    return -(-query_rows * k // PAGE_TOKENS)


def reference_planar_rows(
    memory: Memory, addresses: Tensor, layer_offset: int, blocks: Tensor, indices: Tensor
) -> None:
    """The definition of `planar_rows`."""
    count, row_bytes = _check(addresses, blocks, indices)
    flat = addresses.flatten()
    filled = flat != 0
    rows = memory.read(torch.where(filled, flat + layer_offset, 0), row_bytes)
    blocks.view(-1, row_bytes)[:count][filled] = rows[filled]
    token = torch.arange(count, dtype=torch.int32, device=flat.device)
    indices.copy_(torch.where(filled, token, -1).view_as(indices))


def planar_rows(addresses: Tensor, layer_offset: int, blocks: Tensor, indices: Tensor) -> None:
    """Copy one layer's rows of the group rows at ``addresses`` int64 [R, k], 0 where empty.

    The row of entry (r, j) becomes token r × k + j of ``blocks`` uint8 [planar_blocks(R, k), 64, row bytes]; others are
    left as they are. ``indices`` int32 [R, k] gets that number, or -1. All are contiguous; raises `InvalidValue` for
    what does not fit. ``layer_offset`` is the layer's place in its group × row bytes.
    """
    count, row_bytes = _check(addresses, blocks, indices)
    words = row_bytes // 4
    _planar_kernel[(triton.cdiv(count, ROWS),)](
        addresses,
        layer_offset,
        blocks.view(torch.int32),
        indices,
        count,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        ROWS=ROWS,
        num_warps=4,
        **launch_options(),
    )


def _check(addresses: Tensor, blocks: Tensor, indices: Tensor) -> tuple[int, int]:
    """The number of entries, and of bytes of a row."""
    count = addresses.numel()
    fits = addresses.dtype == torch.int64 and indices.dtype == torch.int32 and indices.shape == addresses.shape
    if not fits or not (addresses.is_contiguous() and indices.is_contiguous()):
        said = (addresses.dtype, tuple(addresses.shape), indices.dtype, tuple(indices.shape))
        raise InvalidValue("addresses and indices", said, "contiguous int64 and int32 of one shape")
    needed = planar_blocks(1, count)
    right = blocks.dtype == torch.uint8 and blocks.dim() == 3 and blocks.shape[1] == PAGE_TOKENS
    if not right or blocks.shape[0] < needed or blocks.shape[2] % 16 or not blocks.is_contiguous():
        raise InvalidValue(
            "blocks",
            (blocks.dtype, tuple(blocks.shape)),
            f"contiguous uint8 [at least {needed}, {PAGE_TOKENS}, row bytes]",
        )
    return count, blocks.shape[2]


@triton.jit
def _planar_kernel(  # type: ignore[no-untyped-def]
    addresses,
    layer_offset,
    blocks,
    indices,
    count,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, BLOCK)
    address = tl.load(addresses + entry, mask=entry < count, other=0)
    filled = address != 0
    wanted = filled[:, None] & (word < WORDS)[None, :]
    source = (address + layer_offset).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
    row = tl.load(tl.multiple_of(source, [1, 16]), mask=wanted, other=0)
    tl.store(blocks + entry.to(tl.int64)[:, None] * WORDS + word[None, :], row, mask=wanted)
    tl.store(indices + entry, tl.where(filled, entry, -1), mask=entry < count)
