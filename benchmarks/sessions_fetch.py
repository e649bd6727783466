"""How fast the ranks of one model fetch rows from the same pages at the same time, each over its own bus."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import graph_time
from benchmarks.report import Row
from benchmarks.sessions_world import World
from compute.kernels.fetch import fetch
from compute.kernels.resolve import RoundBuffers
from compute.parallel.team import Team
from compute.parallel.worker import ParallelWorker
from protocol.layout import PAGE_TOKENS

_ROWS = 2048
_RUNS = 100
_REPLAYS = 100
"""Some 1 s in all."""


def fetch_rows(world: World, team: Team) -> Iterator[Row]:
    """GB/s of each rank alone, and of all at a time: rows of the first session's largest group, anywhere in it."""
    history, worker = world.offloaded[0], world.worker
    assert history.session is not None
    assert isinstance(worker, ParallelWorker)
    page_format, session = history.format, history.session
    group = max(range(len(page_format.groups)), key=page_format.group_row_bytes)
    row_bytes, device = page_format.group_row_bytes(group), worker.device.torch_device
    generator = torch.Generator().manual_seed(session.number)
    pages = torch.tensor([session.page_address(page) for page in range(session.page_count)])
    slots = torch.empty((_ROWS, row_bytes), dtype=torch.uint8, device=device)
    prepared = []
    for _ in range(_RUNS):
        buffers = RoundBuffers.empty(1, 1, _ROWS, device)
        page = pages[torch.randint(0, len(pages), (_ROWS,), generator=generator)]
        token = torch.randint(0, PAGE_TOKENS, (_ROWS,), generator=generator)
        buffers.source.copy_((page + page_format.group_offset(group) + token * row_bytes)[None])
        buffers.target.copy_((slots.data_ptr() + torch.arange(_ROWS) * row_bytes)[None])
        buffers.misses.fill_(_ROWS)
        prepared.append(buffers)

    def rate() -> float:
        micros = graph_time(lambda run: fetch(prepared[run], row_bytes), _RUNS, replays=_REPLAYS)
        return _ROWS * row_bytes / micros / 1e3

    alone = 0.0
    for turn in range(team.shards):
        if turn == worker.grid.place.rank:
            alone = rate()
        team.together(lambda: None)
    together = team.exchange(rate(), float)
    name = f"fetch of {_ROWS:,} rows of {row_bytes:,} bytes"
    for rank, value in enumerate(team.exchange(alone, float)):
        yield Row(f"{name}: rank {rank} alone", value, "GB/s")
        yield Row(f"{name}: rank {rank} beside the others", together[rank], "GB/s")
    yield Row(f"{name}: all ranks at a time", sum(together), "GB/s")
