"""Index keys in VRAM that forks share: counted, copied before they are written, given back with the last history."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from compute.attach import Attachment
from compute.client import Client
from compute.device import open_device
from compute.history import History
from compute.index_keys import KeyBlocks
from compute.session import HostSession
from kvd.planning.footprint import slabs_of
from protocol.layout import LEAST_SLAB_BYTES, PAGE_TOKENS, Q8G64, IndexGroup, PageFormat, round_up
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT

FORMAT = PageFormat(Q8G64, (IndexGroup(0, 1), IndexGroup(1, 1)))
GROUPS, BLOCK = len(FORMAT.groups), Q8G64.keys.block_bytes
RING_PAGES = 4
PREFIX = 50_000


class Node:
    """A worker's memory under a daemon of its own: histories without a model, and what is committed for them."""

    def __init__(self, attachment: Attachment, tokens: int) -> None:
        self.attachment = attachment
        self.keys = KeyBlocks(attachment, FORMAT)
        self._tokens = tokens

    def history(self, session: HostSession) -> History:
        return History(
            self.attachment,
            FORMAT,
            self.keys,
            session,
            max_tokens=session.token_capacity,
            topk=64,
            ring_pages=RING_PAGES,
            caches=None,
            session=session,
        )

    def filled(self, name: str, tokens: int, seed: int = 0) -> History:
        """A new history of ``tokens`` rows, at its barrier."""
        session = HostSession.create(
            self.attachment, name, FORMAT, fingerprint=FINGERPRINT, token_capacity=self._tokens
        )
        history = self.history(session)
        append(history, tokens, seed)
        history.barrier()
        return history

    def fork(self, source: History, name: str, rows: int | None = None) -> History:
        assert source.session is not None
        fork = self.history(source.session.fork(source.length if rows is None else rows, name))
        assert fork.session is not None
        fork.restore(fork.session.committed_rows, source)
        return fork

    def committed(self, tier: str, *purposes: str) -> int:
        [found] = [stats for stats in self.attachment.client.stat().tiers if stats.tier == tier]
        return sum(purpose.committed for purpose in found.purposes if purpose.purpose in purposes)

    def slab_bytes(self) -> int:
        return self.committed("vram:cpu", "index_keys")

    def pages(self) -> int:
        return self.committed("host", "pages", "shared_pages") // FORMAT.stride

    def keys_of_pages(self, history: History) -> list[bytes]:
        """Of each page, what the kernels find of its rows by the history's own table."""
        pages = range(round_up(history.length, PAGE_TOKENS) // PAGE_TOKENS)
        found = self.attachment.memory.read(history.map.key_block_address[:, : len(pages)], BLOCK)
        rows = [min(PAGE_TOKENS, history.length - page * PAGE_TOKENS) for page in pages]
        return [
            b"".join(
                block[:count].numpy().tobytes()
                for block in (
                    found[:, page, : 128 * PAGE_TOKENS].unflatten(1, (PAGE_TOKENS, 128)).transpose(0, 1),
                    found[:, page, 128 * PAGE_TOKENS :].unflatten(1, (PAGE_TOKENS, 4)).transpose(0, 1),
                )
            )
            for page, count in zip(pages, rows, strict=True)
        ]


@contextmanager
def node(tokens: int, *, host: str, vram: str) -> Iterator[Node]:
    run_dir = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    settings = {"host_capacity": host, "host_extent": "16MiB", "host_state_capacity": "1GiB", "vram_capacity": vram}
    limits = {"limits_max_sessions": "1024", "limits_max_handles": "8000"}
    with DaemonProcess(run_dir, drain_timeout_s="0", **settings, **limits) as daemon:
        daemon.wait_ready()
        device = open_device("cpu")
        with Client(run_dir) as client, Attachment(client, device) as attachment:
            yield Node(attachment, tokens)
            assert client.stat().ledger == "balanced"
        device.close()
    shutil.rmtree(run_dir)


def append(history: History, tokens: int, seed: int = 0) -> None:
    """Append rows whose keys tell their ``seed``, group and position."""
    step = (RING_PAGES - 1) * PAGE_TOKENS
    for start in range(0, tokens, step):
        positions = history.begin(min(step, tokens - start), cached=False)
        for group in range(GROUPS):
            history.append_keys(group, positions, keys_of(positions, seed, group))
        history.finish(positions, torch.zeros(len(positions), 0))


def keys_of(positions: torch.Tensor, seed: int, group: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + group)
    return torch.randn(4096, 128, generator=generator)[positions % 4096] + positions[:, None] / 1e4


def test_forks_share_the_blocks_of_whole_pages_and_copy_what_they_write() -> None:
    with node(1024, host="64MiB", vram="256MiB") as world:
        source = world.filled("source", 300)
        before = world.keys_of_pages(source)
        fork = world.fork(source, "fork")
        table = [history.map.key_block_address[:, :5] for history in (source, fork)]
        assert torch.equal(table[0][:, :4], table[1][:, :4]), "whole pages are shared"
        assert not (table[0][:, 4] == table[1][:, 4]).any(), "the page that is written next is not"
        assert world.keys_of_pages(fork) == before
        source.truncate(130)
        append(source, 100, seed=1)
        changed = world.keys_of_pages(source)
        assert (changed[:2], changed[2] != before[2]) == (before[:2], True)
        assert world.keys_of_pages(fork) == before, "the fork keeps what it shared"
        fork.truncate(64)
        fork.rewind()
        append(fork, 1, seed=2)
        assert world.keys_of_pages(fork)[0] != before[0]
        assert world.keys_of_pages(source)[0] == before[0], "a row computed again goes to a block of one's own"
        source.close()
        assert world.slab_bytes() == LEAST_SLAB_BYTES
        append(fork, 100, seed=2)
        fork.close()
        assert (world.slab_bytes(), world.pages()) == (0, 0)


def test_histories_that_end_in_any_order_give_all_blocks_back() -> None:
    with node(1024, host="64MiB", vram="256MiB") as world:
        first = world.filled("first", 640)
        second = world.fork(first, "second", 500)
        third = world.fork(second, "third", 400)
        expected = world.keys_of_pages(first)
        second.close()
        first.close()
        assert world.keys_of_pages(third)[:6] == expected[:6]
        assert world.slab_bytes() == LEAST_SLAB_BYTES
        third.close()
        assert (world.slab_bytes(), world.pages()) == (0, 0)


@pytest.mark.parametrize(
    "sessions",
    [
        pytest.param(20, id="twenty"),
        pytest.param(1000, marks=[pytest.mark.torture, pytest.mark.timeout(0)], id="a thousand"),
    ],
)
def test_sessions_over_one_prefix_take_their_tails_only(sessions: int) -> None:
    """Each over 50,000 tokens: one page in host RAM and one block a group in VRAM is what each adds, and no more."""
    with node(round_up(PREFIX, PAGE_TOKENS), host="512MiB", vram="8GiB") as world:
        source = world.filled("source", PREFIX)
        pages, blocks = world.pages(), GROUPS * round_up(PREFIX, PAGE_TOKENS) // PAGE_TOKENS
        assert world.slab_bytes() == slabs_of(blocks, world.keys.block_bytes).nbytes
        forks = [world.fork(source, f"fork-{index}") for index in range(sessions)]
        assert world.pages() == pages + sessions
        taken = blocks + sessions * GROUPS
        assert world.slab_bytes() == slabs_of(taken, world.keys.block_bytes).nbytes
        for history in (source, *forks):
            history.close()
        assert (world.slab_bytes(), world.pages()) == (0, 0)
