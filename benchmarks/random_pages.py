"""Pages of random rows and index keys: bytes that no model computed, with finite scales, made at memory speed."""

from __future__ import annotations

import torch
from torch import Tensor

from compute.history import History
from protocol.layout import PAGE_TOKENS, PageFormat, round_up

_CHUNK_BYTES = 256 << 20


def randomise(pages: Tensor, page_format: PageFormat, generator: torch.Generator) -> None:
    """Fill ``pages`` uint8 [n, stride], encoded in q8g64 with e4m3 keys, on the device of ``generator``.

    The hidden states of their last tokens are finite too, where there are any.
    """
    layout, keys = page_format.encoding.rows, page_format.encoding.keys
    words = pages.view(torch.int32)
    words.random_(generator=generator)
    rows = words[:, : page_format.rows_bytes // 4].unflatten(1, (-1, layout.row_bytes // 4))
    scales = rows[..., layout.scales_offset // 4 : layout.rope_offset // 4]
    scales.bitwise_and_(0x007F007F).bitwise_or_(0x3C003C00)  # pairs of bfloat16 in [2**-7, 2**-6)
    rope = rows[..., layout.rope_offset // 4 :]
    rope.bitwise_and_(0x807F807F - (1 << 32)).bitwise_or_(0x3F003F00)  # ±[0.5, 1)
    blocks = words[:, page_format.rows_bytes // 4 : page_format.hidden_offset // 4]
    blocks = blocks.unflatten(1, (-1, keys.block_bytes // 4))
    blocks[..., : keys.scales_offset // 4].bitwise_and_(0xBFBFBFBF - (1 << 32))  # e4m3 below 2
    blocks[..., keys.scales_offset // 4 :].view(torch.float32).uniform_(0.005, 0.015, generator=generator)
    hidden = words[:, page_format.hidden_offset // 4 :][:, : page_format.hidden_size].view(torch.float32)
    hidden.normal_(generator=generator)


def fill_at_home(history: History, rows: int, seed: int, device: torch.device, *, owns: bool = True) -> None:
    """Give an empty offloaded history ``rows`` committed random rows: made on ``device``, copied to host RAM.

    Its index keys come to VRAM as those of a restored session do. Of several ranks, the one that ``owns`` the session
    writes the rows, and the others wait for them.
    """
    session, page_format = history.session, history.format
    assert session is not None, "pages at home in host RAM"
    pages = round_up(rows, PAGE_TOKENS) // PAGE_TOKENS
    session.extend(pages)
    if owns:
        generator = torch.Generator(device).manual_seed(seed)
        chunk = max(1, min(_CHUNK_BYTES // page_format.stride, pages))
        made = torch.empty((chunk, page_format.stride), dtype=torch.uint8, device=device)
        start_copy = session.attachment.device.start_copy
        for first in range(0, pages, chunk):
            part = made[: min(chunk, pages - first)]
            randomise(part, page_format, generator)
            for copy in [start_copy(session.page(first + index), page) for index, page in enumerate(part)]:
                copy.wait()
    session.state.logical_rows = rows
    session.publish_commit(rows)
    history.restore(rows)
