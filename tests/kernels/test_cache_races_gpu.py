"""The hot cache under thousands of replays on a GPU: wrong orders between programs would show as wrong rows.

Every row carries its session, group, layer and position at both ends; a kernel checks them at the addresses that
resolve gave, right after fetch, on the device. Seeded delays move the programs of a launch against each other.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels.descriptors import describe
from compute.kernels.fetch import fetch
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.state import CURSOR, NO_RING, GroupCache, PageMap
from tests.kernels.pages import assert_inverse, format_of

pytestmark = pytest.mark.gpu

REPLAYS = 10_000
SESSIONS, ROWS, K = 4, 4, 512
SLOTS = 3000
GROUP, LAYERS, ROW_WORDS = 1, 4, 164
PAGES = 1024
HISTORY = PAGES * 64


@triton.jit
def _count_wrong_rows(addresses, selection, wrong, LANES: tl.constexpr):
    session, lane = tl.program_id(1), tl.program_id(0) * 128 + tl.arange(0, 128)
    address = tl.load(addresses + session * LANES + lane)
    position = tl.load(selection + session * LANES + lane)
    differs = address == 0
    for layer in tl.static_range(4):
        row = address.to(tl.pointer_type(tl.int32)) + layer * 164
        for end in tl.static_range(0, 161, 160):
            differs |= tl.load(row + end, mask=address != 0, other=-1) != session
            differs |= tl.load(row + end + 1, mask=address != 0, other=-1) != 1
            differs |= tl.load(row + end + 2, mask=address != 0, other=-1) != layer
            differs |= tl.load(row + end + 3, mask=address != 0, other=-1) != position
    tl.atomic_add(wrong, tl.sum(differs.to(tl.int32)))


class Sessions:
    def __init__(self) -> None:
        page_format = format_of()
        self.homes, self.page_maps, self.caches = [], [], []
        for session in range(SESSIONS):
            home = torch.zeros((PAGES, page_format.stride), dtype=torch.uint8, pin_memory=True)
            frames = torch.randperm(PAGES, generator=torch.Generator().manual_seed(session))
            first, nbytes = page_format.group_offset(GROUP), page_format.group_row_bytes(GROUP)
            words = home.view(torch.int32)[:, first // 4 : (first + 64 * nbytes) // 4]
            words = words.unflatten(1, (64, LAYERS, ROW_WORDS))
            page_of_frame = torch.empty_like(frames)
            page_of_frame[frames] = torch.arange(PAGES)
            for end in (0, ROW_WORDS - 4):
                words[..., end] = session
                words[..., end + 1] = GROUP
                words[..., end + 2] = torch.arange(LAYERS)
                words[..., end + 3] = (page_of_frame[:, None] * 64 + torch.arange(64))[..., None]
            self.homes.append(home)
            self.page_maps.append(
                PageMap(
                    page_address=(home.data_ptr() + frames * page_format.stride).cuda(),
                    key_block_address=torch.zeros((2, PAGES), dtype=torch.int64, device="cuda"),
                    window=torch.tensor([NO_RING, HISTORY], device="cuda"),
                    ring_base=0,
                    ring_pages=1,
                    format=page_format,
                )
            )
            rows = torch.full((SLOTS, LAYERS, 656), 0xFF, dtype=torch.uint8, device="cuda")
            self.caches.append(GroupCache.empty(rows, HISTORY))
        self.format = page_format
        pairs = zip(self.page_maps, self.caches, strict=True)
        self.records = torch.stack([describe(m, GROUP, c, selected=ROWS * K) for m, c in pairs]).cuda()
        self.buffers = RoundBuffers.empty(SESSIONS, ROWS, K, torch.device("cuda"))
        self.selection = torch.zeros((SESSIONS, ROWS, K), dtype=torch.int32, device="cuda")
        self.wrong = torch.zeros(1, dtype=torch.int32, device="cuda")

    def graph(self, delay_seed: int) -> torch.cuda.CUDAGraph:
        def work() -> None:
            resolve(self.records, self.format, GROUP, self.selection, self.buffers, delay_seed=delay_seed)
            fetch(self.buffers, self.format.group_row_bytes(GROUP))
            _count_wrong_rows[(ROWS * K // 128, SESSIONS)](
                self.buffers.addresses, self.selection, self.wrong, LANES=ROWS * K
            )

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.selection.copy_(_pool(0)[:, : ROWS * K].view_as(self.selection))
            work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                work()
        torch.cuda.synchronize()
        return graph


def _pool(seed: int) -> Tensor:
    """Distinct positions for each session, int32 [sessions, ROWS * K]: an odd step visits every position once."""
    index = torch.arange(ROWS * K, device="cuda", dtype=torch.int64)
    step = 2 * (seed * 7919 + torch.arange(SESSIONS, device="cuda")[:, None] * 31) + 1
    return ((index * step + seed * 104729) % HISTORY).int()


def _disjoint(pool: Tensor) -> Tensor:
    return pool.view(SESSIONS, ROWS, K)


def _overlapping(pool: Tensor) -> Tensor:
    """Each row shares seven eighths with the next."""
    return pool.unfold(1, K, K // 8)[:, :ROWS]


def test_ten_thousand_replays_read_no_wrong_row() -> None:
    sessions = Sessions()
    graphs = [sessions.graph(seed) for seed in (0, 1, 77, 4242)]
    replays = 0
    for seed in range(REPLAYS // 5):
        pool, older = _pool(seed + 1), _pool(seed)
        half_new = torch.where(torch.arange(ROWS * K, device="cuda") % 2 == 0, pool, older)
        for mode, selection in enumerate(
            (_disjoint(pool), _disjoint(pool), _overlapping(half_new), _disjoint(half_new), _overlapping(pool))
        ):
            sessions.selection.copy_(selection)
            if mode >= 2:  # the slots that the last full round filled come first: nearly all are about to be stamped
                for cache in sessions.caches:
                    cache.control[CURSOR].sub_(ROWS * K).remainder_(SLOTS)
            graphs[replays % len(graphs)].replay()
            replays += 1
        if seed % 100 == 0:
            assert int(sessions.wrong) == 0, f"{int(sessions.wrong)} wrong rows by replay {replays}"
            for cache in sessions.caches:
                assert_inverse(cache)
    torch.cuda.synchronize()
    assert replays == REPLAYS
    assert int(sessions.wrong) == 0
    for cache in sessions.caches:
        hits, misses, _, duplicates = cache.counters.tolist()
        assert min(hits, misses, duplicates) > REPLAYS  # every kind of entry did occur
        assert_inverse(cache)
    # The check can fail: one corrupted byte of one slot in use.
    sessions.caches[0].rows.view(-1)[::656] ^= 1
    graphs[0].replay()
    assert int(sessions.wrong) > 0
