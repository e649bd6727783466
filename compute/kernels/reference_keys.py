"""Index keys: how they become bytes, and the scores that a query row gives them.

A key in ``e4m3`` is divided by ``s = 2 ** ceil(log2(max(amax, 1e-4) / 448))``; the exponent is taken from the bits of
the quotient, so that no logarithm can round across a power of two. Keys lie block-planar, 64 tokens to a block.

    score[t] = s_t * sum over heads h of w[h] * relu(q_h . k_t * 128 ** -0.5)
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import tiles
from compute.kernels.memory import Memory
from compute.kernels.reference_rows import check_positions, page_addresses
from compute.kernels.state import PageMap
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, PAGE_TOKENS, KeyLayout

KEY_TILE = 512
"""Keys scored by one matrix product. Every product has this shape, whatever the length of the history, so that the
bits of a key's score depend on the query row and the key alone."""

_TILES = 8
"""Tiles decoded at a time: few, so that they are still in a cache when the next row is scored. The result does not
depend on it."""

_E4M3_MAX = 448.0


def encode_keys(keys: Tensor, layout: KeyLayout) -> tuple[Tensor, Tensor]:
    """Values [n, 128] in the layout's dtype and float32 scales [n] of float32 ``keys`` [n, 128].

    Scales are 1 where the layout has none. Raises `InvalidValue` for a NaN or an infinity.
    """
    if keys.dim() != 2 or keys.shape[1] != INDEX_DIM:
        raise InvalidValue("index keys", tuple(keys.shape), f"[n, {INDEX_DIM}]")
    keys = keys.float()
    if not bool(torch.isfinite(keys).all()):
        raise InvalidValue("index key to encode", "NaN or infinite", "finite values")
    if not layout.has_scales:
        return keys, torch.ones(keys.shape[0], device=keys.device)
    quotient = keys.abs().amax(1).clamp_min(1e-4) / _E4M3_MAX  # [n], always a normal number
    bits = quotient.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # rounded up to a power of two
    scales = (exponent.to(torch.int32) << 23).view(torch.float32)
    return (keys / scales[:, None]).to(torch.float8_e4m3fn), scales


def decode_key_block(blocks: Tensor, layout: KeyLayout) -> tuple[Tensor, Tensor]:
    """Values float32 [..., 64, 128], not yet scaled, and scales float32 [..., 64] of uint8 [..., block bytes]."""
    planes = blocks[..., : layout.scales_offset]
    if not layout.has_scales:
        values = planes.view(torch.float32).unflatten(-1, (PAGE_TOKENS, INDEX_DIM))
        return values, torch.ones(values.shape[:-1], device=blocks.device)
    # Looked up: several times as fast as a conversion on a CPU, and equal by construction.
    table = torch.arange(256, dtype=torch.uint8, device=blocks.device).view(torch.float8_e4m3fn).float()
    values = table.index_select(0, planes.int().view(-1)).view(*planes.shape[:-1], PAGE_TOKENS, INDEX_DIM)
    return values, blocks[..., layout.scales_offset :].view(torch.float32).contiguous()


def append_keys(memory: Memory, page_map: PageMap, group: int, positions: Tensor, keys: Tensor) -> None:
    """Encode the keys of ``positions`` int64 [n] and write them twice: where they are read (the key block in VRAM) and
    into the page, from where a history is restored.

    Raises `InvalidValue` for a position outside the map or a value that `encode_keys` refuses; then nothing is written.
    """
    check_positions(page_map, positions)
    layout = page_map.format.encoding.keys
    values, scales = encode_keys(keys, layout)
    data = values.contiguous().view(torch.uint8)  # [n, bytes of a key]
    token = positions % PAGE_TOKENS
    in_vram = page_map.key_block_address[group, positions // PAGE_TOKENS]
    in_page = page_addresses(page_map, positions) + page_map.format.keys_offset(group)
    for block in (in_vram, in_page):
        memory.write(block + token * data.shape[1], data)
        if layout.has_scales:
            memory.write(block + layout.scales_offset + token * 4, scales[:, None].view(torch.uint8))


def index_scores(
    memory: Memory, page_map: PageMap, group: int, query: Tensor, weights: Tensor, positions: Tensor
) -> Tensor:
    """Scores of every key for every query row: float32 [R, T], T = max(positions) + 1; -inf for t > positions[r].

    ``query`` [R, heads, 128] is bfloat16, or float32 with unquantised keys; ``weights`` float32 [R, heads] already hold
    ``heads ** -0.5``. A key's block is read at `PageMap.key_block_address`. Raises `InvalidValue` for a position
    outside the map.
    """
    check_positions(page_map, positions)
    rows, heads, _ = query.shape
    last = positions.tolist()
    tokens = max(last, default=-1) + 1
    query, weights = query.float(), weights * INDEX_DIM**-0.5  # a positive factor may stand outside the relu
    dots = query.new_empty(_TILES, heads, KEY_TILE)
    sums = query.new_empty(_TILES, 1, KEY_TILE)
    scores = query.new_full((rows, tokens), -torch.inf)
    for start in range(0, tokens, _TILES * KEY_TILE):
        keys, scales = _key_tiles(memory, page_map, group, start, tokens)
        for row in range(rows):
            seen = min(last[row] + 1 - start, scales.shape[0])
            if seen > 0:
                used = -(-seen // KEY_TILE)
                tiles.batched(query[row].expand(used, -1, -1), keys[:used], out=dots[:used]).relu_()
                tiles.batched(weights[row].expand(used, 1, -1), dots[:used], out=sums[:used])
                torch.mul(sums.view(-1)[:seen], scales[:seen], out=scores[row, start : start + seen])
    return scores


def _key_tiles(memory: Memory, page_map: PageMap, group: int, start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Up to `_TILES` tiles of keys from position ``start`` on, float32 [tiles, 128, KEY_TILE], and their scales [n].

    The last tile is filled up with its last block, and beyond ``tokens`` keys are whatever memory held: what they score
    is never looked at.
    """
    count = min(-(-(tokens - start) // KEY_TILE), _TILES)
    page = torch.arange(count * KEY_TILE // PAGE_TOKENS, device=page_map.page_address.device) + start // PAGE_TOKENS
    address = page_map.key_block_address[group, page.clamp_max((tokens - 1) // PAGE_TOKENS)]
    layout = page_map.format.encoding.keys
    keys, scales = decode_key_block(memory.read(address, layout.block_bytes), layout)
    return keys.view(count, KEY_TILE, INDEX_DIM).transpose(1, 2), scales.flatten()
