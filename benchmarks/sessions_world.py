"""What ``kvd-bench sessions`` decodes: a daemon of its own, a model with random weights, and many offloaded sessions.

Drawn: their rows and index keys are random bytes that no model computed, and what they select is drawn (see
`benchmarks.locality`). Real: random tokens are read, and selections are scored. Sessions begin at different rows, so
that their pages fill at different steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.locality import Locality
from benchmarks.random_pages import fill_at_home
from compute.decode.decoder import FastDecoder
from compute.decode.matrices import WeightType
from compute.embedded import EmbeddedDaemon
from compute.histories import HistorySettings, Mode
from compute.history import History
from compute.parallel.grid import Grid, Place
from compute.parallel.team import Team
from compute.parallel.worker import ParallelWorker
from compute.worker import Worker
from kvd.planning.footprint import Footprint
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64, round_up
from protocol.model import ModelConfig

Kind = Literal["drawn", "real"]

PEERS_TIMEOUT_S = 300.0
"""The longest that ranks wait for each other: while rank 0 fills a history, too."""
_SEED = 7


@dataclass(frozen=True)
class SessionsSettings:
    """``sessions`` of up to ``tokens`` tokens each, the last ``room`` of which are there to be decoded."""

    config: ModelConfig
    device: str
    dtype: WeightType
    kind: Kind
    sessions: int
    tokens: int
    room: int
    hot_rows: int
    ring_pages: int
    chunk: int
    tensor: int = 1
    """Ranks under ``torchrun``, each with a part of every layer and a device of its own."""

    def __post_init__(self) -> None:
        if self.tokens % PAGE_TOKENS or self.tokens < self.room + 2 * PAGE_TOKENS:
            least = round_up(self.room + 2 * PAGE_TOKENS, PAGE_TOKENS)
            raise InvalidValue("--tokens", self.tokens, f"a multiple of {PAGE_TOKENS}, at least {least}")

    @property
    def plan(self) -> Footprint:
        """What ``kvd plan`` says of them."""
        return Footprint(self.config, Q8G64, self.tokens, self.hot_rows, 0, self.ring_pages)

    def rows(self, session: int) -> int:
        """Rows that ``session`` begins with: drawn ones nearly all, real ones from half of the tokens on."""
        most = self.tokens - self.room - PAGE_TOKENS
        if self.kind == "real":
            return most - session * (most // 2) // self.sessions
        return most + session * PAGE_TOKENS // self.sessions

    def name(self, session: int) -> str:
        return f"session-{session}"


@dataclass
class World:
    """The sessions, offloaded: histories and the token that each goes on with."""

    settings: SessionsSettings
    worker: Worker
    weights_bytes: int
    team: Team | None = None
    """All ranks, where there are several."""
    offloaded: list[History] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)

    def history_settings(self, mode: Mode, session: int) -> HistorySettings:
        settings = self.settings
        return HistorySettings(mode, settings.tokens, settings.hot_rows, settings.ring_pages, settings.name(session))

    def open_all(self) -> None:
        """Make and fill all sessions."""
        started = time.monotonic()
        for session in range(self.settings.sessions):
            history = self.worker.history(self.history_settings("offloaded", session))
            self.offloaded.append(history)
            self.first_tokens.append(self._fill(history, session))
            history.reserve(self.settings.room + PAGE_TOKENS)
            say(
                f"session {session + 1} of {self.settings.sessions}: {history.length:,} rows, "
                f"{time.monotonic() - started:.0f} s"
            )

    def let_go(self) -> None:
        """Keep the sessions stored, without their caches: VRAM for resident histories. They are at their first rows."""
        while self.offloaded:
            self.worker.end(self.offloaded.pop(), keep=True)

    def resident(self, session: int) -> History:
        """A resident history of the rows that ``session`` began with, which is what it has now."""
        settings = self.history_settings("resident", session)
        if self.offloaded:
            return self.worker.resident_twin(self.offloaded[session], settings)
        return self.worker.resident_copy(settings)

    def draw(self, locality: Locality, percent: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Selections int32 [sessions, steps, groups, k], the rows that they begin at, and what the caches hold before.

        The latter is int64 [groups, slots] of each session. All of it is on the host.
        """
        device = self.worker.device.torch_device
        drawn, cached = [], []
        for session in range(self.settings.sessions):
            below = self.settings.rows(session) // PAGE_TOKENS * PAGE_TOKENS  # the ring has the rest
            selections, held = locality.draw(below, 1, percent, device, seed=1000 * session + round(10 * percent))
            drawn.append(selections[:, :, 0].cpu())
            cached.append(held.cpu())
        first = torch.tensor([self.settings.rows(session) for session in range(self.settings.sessions)])
        return torch.stack(drawn), first, cached

    def committed(self) -> dict[str, int]:
        """Bytes that all sessions have of the daemon, by purpose."""
        purposes = [purpose for tier in self.worker.stat().tiers for purpose in tier.purposes]
        return {item.purpose: item.committed for item in purposes if item.purpose != "unassigned" and item.committed}

    def _fill(self, history: History, session: int) -> int:
        settings, worker = self.settings, self.worker
        rows, generator = settings.rows(session), torch.Generator().manual_seed(_SEED + session)
        vocabulary = settings.config.vocab_size
        if settings.kind == "drawn":
            owns = self.team is None or self.team.is_owner
            fill_at_home(history, rows, _SEED + session, worker.device.torch_device, owns=owns)
            return int(torch.randint(0, vocabulary, (1,), generator=generator))
        tokens: list[int] = torch.randint(0, vocabulary, (rows,), generator=generator).tolist()
        hidden = worker.prefill(history, tokens, settings.chunk)
        history.barrier(hidden)
        return int(worker.decoder.logits(hidden[None])[0].argmax())


def fill_cache(history: History, cached: Tensor) -> None:
    """Empty all hot caches of ``history`` and let them hold ``cached`` int64 [groups, slots], first in, first out."""
    assert history.caches is not None, "a resident history has no hot caches"
    for group, cache in enumerate(history.caches.groups):
        for tensor, value in ((cache.table, -1), (cache.slot_position, -1), (cache.slot_round, -1), (cache.control, 0)):
            tensor.fill_(value)
        for part in cached[group].to(cache.table.device).split(history.topk):
            filled = torch.full((1, history.topk), -1, dtype=torch.int32, device=part.device)
            filled[0, : len(part)] = part.sort()[0].int()
            history.kernels.round(group, filled)
        cache.counters.zero_()


@contextmanager
def opened(settings: SessionsSettings) -> Iterator[World]:
    """A world without sessions yet. Raises `InvalidValue` where the device has less memory than they take.

    On several ranks the daemon is rank 0's, and has gone when all have closed their workers.
    """
    with ExitStack() as stack:
        team = None
        worker_type: Callable[..., Worker] = Worker
        device = settings.device
        if settings.tensor > 1:
            place = Place.of_environment(settings.tensor, 1, os.environ)
            device = place.device(settings.device)
            grid = stack.enter_context(Grid(place, device=device, timeout_s=PEERS_TIMEOUT_S))
            team = Team(grid.control, place.tensor)
            worker_type = partial(ParallelWorker, grid=grid)
        run_dir = _started(settings, stack, team)
        started = time.monotonic()
        before = torch.cuda.memory_allocated() if settings.device != "cpu" else 0
        with worker_type(run_dir, device, settings.config, Q8G64, dtype=settings.dtype, rows=settings.chunk) as worker:
            assert isinstance(worker.decoder, FastDecoder)
            after = torch.cuda.memory_allocated() if settings.device != "cpu" else 0
            say(f"model made in {time.monotonic() - started:.1f} s")
            yield World(settings, worker, after - before, team)
        if team is not None:
            team.together(lambda: None)


def _started(settings: SessionsSettings, stack: ExitStack, team: Team | None) -> Path:
    """Where the daemon that is entered into ``stack`` listens."""
    sizes, begun = _sizes(settings), time.monotonic()

    def start() -> str:
        if team is not None and not team.is_owner:
            return ""
        return str(stack.enter_context(EmbeddedDaemon(settings.device, **sizes)).run_dir)

    found = start() if team is None else team.share(team.together(start), str)
    say(f"daemon with {sizes['host_bytes'] / 2**30:.1f} GiB of host RAM after {time.monotonic() - begun:.1f} s")
    return Path(found)


def _sizes(settings: SessionsSettings) -> dict[str, int]:
    """Of the daemon, so that all sessions fit, and resident ones beside them."""
    plan, on_gpu = settings.plan, settings.device != "cpu"
    extent = 1 << 30 if on_gpu else round_up(4 * plan.page_format.stride, 4 << 20)
    frames = settings.sessions * plan.pages
    extents = -(-frames // (extent // plan.page_format.stride))
    host = extent * extents + round_up(settings.sessions * plan.session_state_bytes, extent)
    if on_gpu:
        vram = torch.cuda.get_device_properties(torch.device(settings.device)).total_memory
    else:
        resident = settings.sessions * round_up(plan.pages * plan.page_format.stride, 64 << 20)
        vram = settings.tensor * (2 * plan.vram_bytes(settings.sessions) + resident) + (256 << 20)
    return {"host_bytes": host, "extent_bytes": extent, "vram_bytes": vram // (2 << 20) * (2 << 20)}


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
