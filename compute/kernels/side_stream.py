"""Work that goes beside what the current stream has, and may be recorded with it as a branch of one graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second stream of ``device``. Without a GPU all work comes in its turn.

    A launch waits for all programs of those before it to have begun, unless its stream comes first: with a ``priority``
    of -1.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._used = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is enqueued within comes after what is enqueued now, and may be under way beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._used = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is enqueued from now on comes after all that went `beside`."""
        if self._stream is not None and self._used:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._used = False
