"""Cases of the hot cache: fetch, resolve with assign, both together, append, copyback.

Baselines are the fastest public kernels measured on the same card (docs name them); they move one layer at a time.
"""

from __future__ import annotations

import functools

import torch

from benchmarks.cache_world import GLM_FORMAT, GROUP, CacheWorld, tagged_pages
from benchmarks.harness import Case, Floors, Work
from benchmarks.host_memory import registered
from compute.kernels import reference
from compute.kernels.append import append_keys, append_rows
from compute.kernels.descriptors import describe
from compute.kernels.fetch import fetch
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.state import GroupCache, PageMap
from protocol.layout import PAGE_TOKENS

_K = 2048
_ROW = GLM_FORMAT.group_row_bytes(GROUP)
_STEP_US = 12_000
"""µs of a decode step that copyback is measured against."""


def cases() -> list[Case]:
    return [*_fetch_cases(), *_resolve_cases(), *_round_cases(), *_append_cases(), *_copyback_cases()]


def _fetch_cases() -> list[Case]:
    named = "fetch, group rows of 4 layers"
    return [
        Case(f"{named}: 2048 of them", functools.partial(_fetch, 2048), goal=48, baseline=25, unit="GB/s"),
        Case(f"{named}: 512 of them", functools.partial(_fetch, 512), goal=43, baseline=25, unit="GB/s"),
        Case(f"{named}: 20 of them", functools.partial(_fetch, 20), goal=4),
    ]


def _fetch(count: int, floors: Floors) -> Work:
    runs = 100 if count < 100 else 20
    host, frames = tagged_pages()
    slots = torch.empty((count, _ROW), dtype=torch.uint8, device="cuda")
    prepared = []
    for run in range(runs):
        generator = torch.Generator().manual_seed(run)
        frame = torch.randint(0, frames, (count,), generator=generator)
        token = torch.randint(0, PAGE_TOKENS, (count,), generator=generator)
        buffers = RoundBuffers.empty(1, 1, count, torch.device("cuda"))
        home = host.data_ptr() + frame * GLM_FORMAT.stride + GLM_FORMAT.group_offset(GROUP) + token * _ROW
        buffers.source.copy_(home[None])
        buffers.target.copy_((slots.data_ptr() + torch.arange(count) * _ROW)[None])
        buffers.misses.fill_(count)
        prepared.append(buffers)
    tags = (frame * PAGE_TOKENS + token).cuda()

    def check() -> None:
        words = slots.view(torch.int64)
        assert torch.equal(words[:, 0], tags), "a slot holds another row's first bytes"
        assert torch.equal(words[:, -1], tags), "a slot holds another row's last bytes"

    nbytes = count * _ROW
    floor = nbytes / floors.upload_us(nbytes) / 1e3 if count >= 100 else floors.upload_us(nbytes)
    return Work(lambda run: fetch(prepared[run], _ROW), runs, floor=floor, payload=nbytes, check=check)


def _resolve_cases() -> list[Case]:
    found = [
        Case(
            f"resolve + assign, 2048 selected, {percent} % miss, {slots} slots, {stamps}",
            functools.partial(_round, 1, slots, 1, percent, 100, after_cursor=after_cursor, fetched=False),
            goal=5,
            baseline=baseline,
        )
        for slots, baseline in ((4096, 17.0), (32768, 101.0))
        for percent in (1, 20)
        for stamps, after_cursor in (("old stamps", False), ("stamped slots right after the cursor", True))
    ]
    four = functools.partial(_round, 1, 32768, 4, 1, 100, fetched=False)
    return [*found, Case("resolve + assign, 4 query rows that share half, 1 % miss, 32768 slots", four, goal=8)]


def _round_cases() -> list[Case]:
    goals = {1: ((1, 8, 118), (20, 31, 177), (100, 120, 483)), 15: ((1, 24, 150), (20, 340, 855), (100, 1650, 3835))}
    runs = {1: 50, 20: 20, 100: 10}
    return [
        Case(
            f"resolve + assign + fetch, group of 4 layers, 32768 slots, {_sessions(sessions)}, {percent} % miss",
            functools.partial(_round, sessions, 32768, 1, percent, runs[percent], fetched=True),
            goal=goal,
            baseline=baseline,
        )
        for sessions, rows in goals.items()
        for percent, goal, baseline in rows
    ]


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def _round(
    batch: int,
    slots: int,
    rows: int,
    percent: int,
    runs: int,
    floors: Floors,
    *,
    fetched: bool,
    after_cursor: bool = False,
) -> Work:
    misses = _K * percent // 100
    world = CacheWorld(batch, slots, rows, _K, misses, runs, after_cursor=after_cursor)

    def launch(run: int) -> None:
        resolve(world.records, GLM_FORMAT, GROUP, world.selections[run], world.buffers)
        if fetched:
            fetch(world.buffers, _ROW)

    nbytes = batch * misses * _ROW if fetched else 0
    floor = floors.upload_us(nbytes) + (floors.empty_kernel_us if fetched else 0)
    return Work(
        launch, runs, floor=floor, payload=nbytes, reset=world.reset, check=lambda: world.check(fetched=fetched)
    )


def _append_cases() -> list[Case]:
    found = [
        Case("append, one layer, 4 rows", functools.partial(_append, 1, False, False), goal=3),
        Case("append, one layer, 15 sessions with 4 rows each", functools.partial(_append, 15, False, False)),
        Case("append, index keys, 4 rows", functools.partial(_append, 1, True, False), goal=3),
    ]
    if torch.cuda.device_count() > 1:
        found.append(
            Case("append, one layer, 4 rows, and to a peer", functools.partial(_append, 1, False, True), goal=4.5)
        )
    return found


def _append(batch: int, keys: bool, with_peer: bool, floors: Floors) -> Work:
    runs, rows, ring_pages = 200, 4, 32
    ring_bytes = ring_pages * GLM_FORMAT.stride
    ring = torch.zeros(batch * ring_bytes, dtype=torch.uint8, device="cuda")
    peer = ring.to("cuda:1") if with_peer else ring  # the copy also lets each GPU reach the other's memory
    page_maps = [_ring_map(ring.data_ptr() + session * ring_bytes, ring_pages) for session in range(batch)]
    cache = GroupCache.empty(torch.zeros((64, 4, 656), dtype=torch.uint8, device="cuda"), ring_pages * PAGE_TOKENS)
    peer_ring = peer.data_ptr() if with_peer else 0
    records = torch.stack([describe(page_map, GROUP, cache, peer_ring_base=peer_ring) for page_map in page_maps]).cuda()
    positions = torch.stack([(torch.arange(rows) + run * rows).expand(batch, rows) for run in range(runs)]).cuda()
    latent, rope, key = (
        torch.randn((runs, batch, rows, width), device="cuda", dtype=torch.bfloat16) for width in (512, 64, 128)
    )

    def launch(run: int) -> None:
        if keys:
            append_keys(records, GLM_FORMAT, GROUP, positions[run], key[run])
        else:
            append_rows(records, GLM_FORMAT, GROUP, 0, positions[run], latent[run], rope[run])

    def check() -> None:
        memory = reference.Memory(ring)
        written = ring.clone()
        for session, page_map in enumerate(page_maps):
            for run in () if keys else range(runs):
                reference.append_rows(
                    memory, page_map, GROUP, 0, positions[run, session], latent[run, session], rope[run, session]
                )
        assert torch.equal(written, ring), "rows differ from the reference's"
        assert torch.equal(peer.cpu(), ring.cpu()), "the peer's ring differs"

    return Work(launch, runs, floor=floors.empty_kernel_us, check=check)


def _ring_map(ring_base: int, ring_pages: int) -> PageMap:
    """A session whose every position is in its ring. Its key blocks are the copies in the pages."""
    keys = ring_base + torch.arange(ring_pages) * GLM_FORMAT.stride + GLM_FORMAT.keys_offset(GROUP)
    return PageMap(
        page_address=torch.zeros(ring_pages, dtype=torch.int64, device="cuda"),
        key_block_address=keys.repeat(len(GLM_FORMAT.groups), 1).cuda(),
        window=torch.tensor([0, ring_pages * PAGE_TOKENS], device="cuda"),
        ring_base=ring_base,
        ring_pages=ring_pages,
        format=GLM_FORMAT,
    )


def _copyback_cases() -> list[Case]:
    return [
        Case("copyback of a page", _copyback, goal=44, unit="GB/s"),
        Case(
            "copyback of a page, time added to 100 fetches beside it; the goal is 0.1 % of 64 steps",
            _copyback_beside_fetches,
            goal=0.001 * PAGE_TOKENS * _STEP_US,
        ),
    ]


def _copyback(floors: Floors) -> Work:
    nbytes = GLM_FORMAT.stride
    pages = torch.randint(0, 256, (16, nbytes), dtype=torch.uint8, device="cuda")
    homes = registered(16 * nbytes).view(16, nbytes)

    def check() -> None:
        assert torch.equal(homes, pages.cpu()), "a page at home differs"

    return Work(
        lambda run: homes[run].copy_(pages[run], non_blocking=True),
        16,
        floor=floors.copy_to_host / 1e9,
        payload=nbytes,
        check=check,
    )


def _copyback_beside_fetches(floors: Floors) -> Work:
    fetches = _fetch(205, floors)
    copies = _copyback(floors)
    beside = torch.cuda.Stream()

    def without(_run: int) -> None:
        for turn in range(100):
            fetches.launch(turn % fetches.runs)

    def launch(run: int) -> None:
        here = torch.cuda.current_stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            copies.launch(run)
        without(run)
        here.wait_stream(beside)

    return Work(launch, 4, without=without)
