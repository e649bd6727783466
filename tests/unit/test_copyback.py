"""Copyback publishes a page only when its copy, and every copy before it, is done."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch

from compute.copyback import Copyback
from compute.device import Copy, Mapping, OwnMemory


@dataclass
class HeldCopy:
    """A copy that moves its bytes only when it is let go, or waited for."""

    destination: torch.Tensor
    source: torch.Tensor
    finished: bool = False
    error: Exception | None = None

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        if self.error:
            raise self.error
        if not self.finished:
            self.destination.copy_(self.source)
            self.finished = True


class SlowDevice:
    """Copies that complete when the test says so."""

    torch_device = torch.device("cpu")
    uuid = "cpu"

    def __init__(self) -> None:
        self.copies: list[HeldCopy] = []

    def start_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy:
        self.copies.append(HeldCopy(destination, source))
        return self.copies[-1]

    def map_shared(self, fd: int, nbytes: int, *, read_only: bool = False) -> Mapping:
        raise AssertionError("not used")

    map_device = map_shared

    def registering(self, nbytes: int) -> AbstractContextManager[None]:
        raise AssertionError("not used")

    def own_memory(self) -> OwnMemory:
        raise AssertionError("not used")

    def synchronize(self) -> None:
        pass

    warmed_up = synchronize

    def close(self) -> None:
        pass


def page(value: int) -> torch.Tensor:
    return torch.full((64,), value, dtype=torch.uint8)


def test_pages_are_published_in_order_and_only_when_done() -> None:
    device, published = SlowDevice(), list[int]()
    copyback = Copyback(device, published.append)
    homes = [page(0) for _ in range(3)]
    for index, home in enumerate(homes):
        copyback.submit(index, home, page(index + 1))
    copyback.poll()
    assert published == []
    device.copies[1].wait()  # done out of order: page 0 still is not
    copyback.poll()
    assert (published, copyback.committed_pages) == ([], 0)
    device.copies[0].wait()
    copyback.poll()
    assert (published, copyback.committed_pages) == ([2], 2)
    copyback.wait_through(3)
    assert published == [2, 3]
    assert [int(home[0]) for home in homes] == [1, 2, 3]


def test_waiting_publishes_no_further_than_asked() -> None:
    device, published = SlowDevice(), list[int]()
    copyback = Copyback(device, published.append)
    for index in range(3):
        copyback.submit(index, page(0), page(1))
    copyback.wait_through(1)
    assert published == [1]
    assert not device.copies[2].finished
    copyback.wait_through(99)
    assert published == [1, 2, 3]


def test_a_failed_copy_is_raised_and_nothing_of_it_published() -> None:
    device, published = SlowDevice(), list[int]()
    copyback = Copyback(device, published.append)
    copyback.submit(0, page(0), page(1))
    device.copies[0].finished, device.copies[0].error = True, OSError("injected")
    with pytest.raises(OSError, match="injected"):
        copyback.poll()
    assert published == []


def test_a_partial_page_is_copied_at_once_and_submitted_again_when_full() -> None:
    device, published = SlowDevice(), list[int]()
    copyback = Copyback(device, published.append)
    home = page(0)
    copyback.copy_partial(home, page(5))
    assert (int(home[0]), published, copyback.submitted_pages) == (5, [], 0)
    copyback.submit(0, home, page(6))
    copyback.wait_through(1)
    assert (int(home[0]), published, copyback.copies) == (6, [1], 2)
