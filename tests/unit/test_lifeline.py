"""Ranks in threads of one process, which find each other through a store of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from torch._C._distributed_c10d import HashStore

from compute.parallel.lifeline import Lifeline

SOON_S = 30.0


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def connected(store: HashStore, world: int, stack: ExitStack) -> list[Lifeline]:
    with ThreadPoolExecutor(world) as threads:
        made = list(threads.map(lambda rank: Lifeline(store, rank, world, SOON_S), range(world)))
    for lifeline in made:
        stack.callback(lifeline.close)
    return made


@pytest.fixture
def three() -> Iterator[list[Lifeline]]:
    with ExitStack() as stack:
        yield connected(HashStore(), 3, stack)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_all_hear_who_is_lost(three: list[Lifeline], lost: int) -> None:
    assert not any(lifeline.lost.done() for lifeline in three)
    three[lost].close()
    for rank, lifeline in enumerate(three):
        if rank != lost:
            assert lifeline.lost.result(SOON_S) == lost


def test_who_ends_in_good_order_has_lost_nobody(three: list[Lifeline]) -> None:
    for lifeline in three:
        lifeline.close()
    assert not three[0].lost.done()


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    store = HashStore()
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        first = thread.submit(Lifeline, store, 0, 2, SOON_S)
        store.wait(["kvd-lifeline"])
        port = int(store.get("kvd-lifeline").split()[0])
        for said in (bytes(16) + b"\1\0\0\0", b"GET"):
            stranger = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        second = Lifeline(store, 1, 2, SOON_S)
        stack.callback(second.close)
        lifeline = first.result(SOON_S)
        stack.callback(lifeline.close)
        stranger.close()
        time.sleep(0.05)
        assert not lifeline.lost.done()
        second.close()
        assert lifeline.lost.result(SOON_S) == 1


def test_ranks_that_do_not_come_are_not_waited_for_longer() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"^of ranks 1, 2 nothing came to port \d+ of rank 0$"):
        Lifeline(store, 0, 3, 0.05)
    with pytest.raises(OSError, match=r"^rank 0 is not reached at 127\.0\.0\.1, port \d+: .*refused"):
        Lifeline(store, 1, 3, 1.0)


def test_one_rank_needs_no_connection() -> None:
    Lifeline(HashStore(), 0, 1, SOON_S).close()
