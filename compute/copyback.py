"""Copyback: full pages of the ring go to host RAM, one copy each, beside the decoding.

Invariant: a row is committed only when the copy of its page, and of every page before it, has been seen to be done. An
enqueued copy is not a completed copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from compute.device import Copy, Device


class Copyback:
    """Copies pages in order. ``publish(pages)`` is called when the first ``pages`` pages are in host RAM."""

    def __init__(self, device: Device, publish: Callable[[int], None]) -> None:
        self._device = device
        self._publish = publish
        self._under_way: deque[tuple[int, Copy]] = deque()
        self.committed_pages = 0
        self.submitted_pages = 0
        self.copies = 0
        """Pages copied since the start, partial ones included."""

    def restart(self, pages: int) -> None:
        """Count from ``pages`` complete pages in host RAM. No copy may be under way."""
        assert not self._under_way, "restarted with copies under way"
        self.committed_pages = self.submitted_pages = pages

    def submit(self, page: int, home: torch.Tensor, ring_page: torch.Tensor) -> None:
        """Start the copy of ``page``, after all work enqueued so far. Pages come in order, each once."""
        assert page == self.submitted_pages, f"page {page} submitted after {self.submitted_pages} pages"
        self._under_way.append((page, self._device.start_copy(home, ring_page)))
        self.submitted_pages += 1
        self.copies += 1

    def copy_partial(self, home: torch.Tensor, ring_page: torch.Tensor) -> None:
        """Copy a page that is not full yet, and wait for it. It is submitted again when it is full."""
        self._device.start_copy(home, ring_page).wait()
        self.copies += 1

    def poll(self) -> None:
        """Publish what is done. Never waits."""
        before = self.committed_pages
        while self._under_way and self._under_way[0][1].done():
            self._finish()
        if self.committed_pages != before:
            self._publish(self.committed_pages)

    def wait_through(self, pages: int) -> None:
        """Return when the first ``pages`` pages, of those submitted, are committed."""
        while self.committed_pages < min(pages, self.submitted_pages):
            self._under_way[0][1].wait()
            self._finish()
            self._publish(self.committed_pages)

    def _finish(self) -> None:
        page, copy = self._under_way.popleft()
        copy.wait()  # done already; raises what the copy raised
        self.committed_pages = page + 1
