"""Kernels of prefills, of the layers' inputs and of exports once, on a small session; part of `sanitized_run`."""

from __future__ import annotations

import torch

from compute.kernels.addresses import row_addresses
from compute.kernels.append import append_keys, append_rows
from compute.kernels.blend import blend
from compute.kernels.descriptors import describe
from compute.kernels.hidden import store_hidden
from compute.kernels.inputs import Angles, IndexerRows, hidden_inputs, query_inputs
from compute.kernels.planar import planar_blocks, planar_rows
from compute.kernels.stage import Stage
from protocol.layout import FP8_DS_MLA, PAGE_TOKENS, PageFormat
from tests.kernels.pages import DEVICE, GROUPS, Pages

MODULES = ("planar", "hidden", "inputs", "blend")
PAGES, HOME, K, ROWS, MANY_ROWS = 6, 4, 75, 3, 65


def main() -> None:
    """Raises what the kernels raise; results are the tests' business."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    def session() -> Pages:
        page_format = PageFormat(FP8_DS_MLA, GROUPS, hidden_size=200)
        length, ring_first = PAGES * PAGE_TOKENS, HOME * PAGE_TOKENS
        return Pages.random(page_format, PAGES, length=length, ring_first=ring_first, ring_pages=2)

    pages, peer = session(), session()
    page_format = pages.page_map.format
    ring, blocks = peer.page_map.ring_base, peer.page_map.key_block_address
    records = [describe(pages.page_map, g, peer_ring_base=ring, peer_key_block_address=blocks) for g in range(2)]
    on_device = torch.stack(records).to(DEVICE)

    positions = torch.tensor([[63, HOME * PAGE_TOKENS, PAGES * PAGE_TOKENS - 1]], device=DEVICE)
    store_hidden(on_device[:1], page_format, positions, normal(1, ROWS, 200))
    append_keys(on_device[:1], page_format, 0, positions, normal(1, ROWS, 128))
    append_rows(on_device[1:], page_format, 1, 2, positions, normal(1, ROWS, 512), normal(1, ROWS, 64))

    stage = Stage(pages.page_map, on_device, HOME)
    selection = torch.arange(ROWS * K, dtype=torch.int32, device=DEVICE).view(1, ROWS, K)
    addresses = torch.empty(selection.shape, dtype=torch.int64, device=DEVICE)
    for group in range(2):
        row_addresses(stage.record(group, pages.at_home(HOME)), page_format, group, selection, addresses)
    row_bytes = page_format.encoding.rows.row_bytes
    exported = torch.empty((planar_blocks(ROWS, K), PAGE_TOKENS, row_bytes), dtype=torch.uint8, device=DEVICE)
    planar_rows(addresses[0], 2 * row_bytes, exported, torch.empty_like(selection[0]))

    heads, nope = 5, 40
    angles = Angles(normal(ROWS, 32), normal(ROWS, 32))
    index = IndexerRows((normal(128), normal(128)), True, normal(ROWS, 128), normal(ROWS, heads))
    latent, rope = normal(ROWS, 512), normal(ROWS, 64)
    query_latent = normal(ROWS, 96).bfloat16()
    hidden = normal(ROWS, 896 + heads)
    norms = (normal(96), normal(512))
    hidden_inputs(hidden, (0, 128, 768, 896), norms, angles, query_latent, latent, rope, index, "triton")
    query_rope, index_query = normal(ROWS, heads, 64).bfloat16(), normal(ROWS, heads, 128).bfloat16()
    start = heads * (nope + 64)
    projected = normal(ROWS, start + heads * 128).bfloat16()
    query_inputs(projected, start, nope, angles, query_rope, index_query, "triton", interleaved=True)
    many, angles = projected.repeat(MANY_ROWS, 1)[:MANY_ROWS], Angles(normal(MANY_ROWS, 32), normal(MANY_ROWS, 32))
    ropes = torch.empty(MANY_ROWS, heads, 64, dtype=torch.bfloat16, device=DEVICE)
    queries = torch.empty(MANY_ROWS, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    for interleaved in (True, False):
        query_inputs(many, start, nope, angles, ropes, queries, "triton", interleaved=interleaved)
    state, accepted = torch.zeros(1, ROWS + 1, heads * 129, device=DEVICE), torch.ones(1, dtype=torch.int64).to(DEVICE)
    blend(state, index_query[None], normal(1, ROWS, heads), accepted, 0.9, kernels="triton")
