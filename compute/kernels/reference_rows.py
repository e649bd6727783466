"""Rows: how one token's MLA latent and rope become bytes, and where the bytes lie.

Formulas: ``q8g64`` divides each group of 64 latent values by ``s = bfloat16(amax / 127)`` and rounds to int8, half to
even; where s is 0 the group is 0. The rope is bfloat16. ``f32`` stores both as they are. All arithmetic is float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compute.kernels.memory import Memory
from compute.kernels.state import LENGTH, RING_FIRST, PageMap
from protocol.errors import InvalidValue
from protocol.layout import LATENT_DIM, PAGE_TOKENS, ROPE_DIM, RowLayout

LARGEST = {"int8": 127, "float8_e4m3fn": 448}
"""What the largest latent value of a group becomes, by its dtype."""


def encode_rows(latent: Tensor, rope: Tensor, layout: RowLayout) -> Tensor:
    """Rows of float32 ``latent`` [n, 512] and ``rope`` [n, 64]: uint8 [n, row bytes].

    Raises `InvalidValue` for a NaN, an infinity, or a rope value that its dtype cannot hold.
    """
    if latent.shape[1:] != (LATENT_DIM,) or rope.shape != (latent.shape[0], ROPE_DIM):
        raise InvalidValue("latent and rope", (tuple(latent.shape), tuple(rope.shape)), "[n, 512] and [n, 64]")
    latent, rope = latent.float(), rope.float().to(_dtype(layout.rope_dtype))
    if not (math.isfinite(_largest(latent)) and math.isfinite(_largest(rope))):
        raise InvalidValue("row to encode", "NaN or infinite", f"values that {layout.name} can hold")
    rows = torch.empty((latent.shape[0], layout.row_bytes), dtype=torch.uint8, device=latent.device)
    if layout.scale_count:
        largest = LARGEST[layout.latent_dtype]
        groups = latent.view(-1, layout.scale_count, layout.scale_group)  # [n, 8, 64], or [n, 4, 128]
        most = groups.abs().amax(2)
        # By a tensor: on a GPU a division by a number is a product with its reciprocal, which rounds differently.
        scales = (most / torch.full_like(most, largest)).to(_dtype(layout.scale_dtype))
        divisor = scales.float()[:, :, None]
        scaled = torch.where(divisor == 0, 0.0, groups / divisor).clamp(-largest, largest)
        if layout.latent_dtype == "int8":
            scaled = scaled.round()
        latent = scaled.to(_dtype(layout.latent_dtype)).view(-1, LATENT_DIM)
        rows[:, layout.scales_offset : layout.rope_offset] = scales.view(torch.uint8)
    rows[:, : layout.scales_offset] = latent.contiguous().view(torch.uint8)
    rows[:, layout.rope_offset :] = rope.contiguous().view(torch.uint8)
    return rows


def decode_joined(rows: Tensor, layout: RowLayout) -> Tensor:
    """Rows uint8 [..., row bytes] as float32 [..., 576]: the 512 latent values, then the 64 rope values."""
    out = torch.empty((*rows.shape[:-1], LATENT_DIM + ROPE_DIM), dtype=torch.float32, device=rows.device)
    latent = rows[..., : layout.scales_offset].view(_dtype(layout.latent_dtype))
    out[..., :LATENT_DIM] = latent
    if layout.scale_count:
        scales = rows[..., layout.scales_offset : layout.rope_offset].view(_dtype(layout.scale_dtype)).float()
        out[..., :LATENT_DIM].unflatten(-1, (layout.scale_count, -1)).mul_(scales.unsqueeze(-1))
    out[..., LATENT_DIM:] = rows[..., layout.rope_offset :].view(_dtype(layout.rope_dtype))
    return out


def decode_rows(rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Latent float32 [..., 512] and rope float32 [..., 64] of rows uint8 [..., row bytes]."""
    joined = decode_joined(rows, layout)
    return joined[..., :LATENT_DIM], joined[..., LATENT_DIM:]


def page_addresses(page_map: PageMap, positions: Tensor) -> Tensor:
    """Address of the page, in the ring or at home, that each position is in: int64, shaped as ``positions``.

    ``positions`` must be within the map.
    """
    positions = positions.long()  # NO_RING is beyond int32
    page = positions // PAGE_TOKENS
    home = page_map.page_address[page]
    in_ring = page_map.ring_base + page % page_map.ring_pages * page_map.format.stride
    return torch.where(positions >= page_map.window[RING_FIRST], in_ring, home)


def row_offsets(page_map: PageMap, group: int, positions: Tensor) -> Tensor:
    """Offset in its page of each position's group row: int64, shaped as ``positions``."""
    token = positions.long() % PAGE_TOKENS
    return page_map.format.group_offset(group) + token * page_map.format.group_row_bytes(group)


def selected(page_map: PageMap, selection: Tensor) -> Tensor:
    """Which entries name a token of the history; all others (-1, negative, from the length on) count as empty."""
    return (selection >= 0) & (selection < page_map.window[LENGTH])


def row_addresses(page_map: PageMap, group: int, selection: Tensor) -> Tensor:
    """Addresses of the selected group rows, without a cache: int32 [R, k] -> int64 [R, k], 0 where empty.

    The way of a resident session and of a prefill over pages in VRAM.
    """
    valid = selected(page_map, selection)
    positions = selection.where(valid, 0)
    return (page_addresses(page_map, positions) + row_offsets(page_map, group, positions)).where(valid, 0)


def append_rows(
    memory: Memory,
    page_map: PageMap,
    group: int,
    layer_in_group: int,
    positions: Tensor,
    latent: Tensor,
    rope: Tensor,
) -> None:
    """Encode and write one layer's rows of ``positions`` int64 [n], which are distinct.

    Raises `InvalidValue` for a position outside the map or a value that `encode_rows` refuses; then nothing is written.
    """
    check_positions(page_map, positions)
    rows = encode_rows(latent, rope, page_map.format.encoding.rows)
    first = page_addresses(page_map, positions) + row_offsets(page_map, group, positions)
    memory.write(first + layer_in_group * page_map.format.encoding.rows.row_bytes, rows)


def check_positions(page_map: PageMap, positions: Tensor) -> None:
    """Raise `InvalidValue` if a position is outside the map."""
    if positions.numel() == 0:
        return
    for position in (int(bound) for bound in positions.aminmax()):
        if not 0 <= position < page_map.max_tokens:
            raise InvalidValue("position", position, f"0 to {page_map.max_tokens - 1}")


def _largest(x: Tensor) -> float:
    """The largest magnitude in ``x``, NaN if there is one."""
    return float(x.abs().amax()) if x.numel() else 0.0


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
