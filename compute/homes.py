"""Where a history's pages are at home: in VRAM (resident), or in host RAM (offloaded, a `HostSession`)."""

from __future__ import annotations

from typing import Protocol

import torch

from compute.attach import Attachment, DeviceBuffer
from protocol.layout import PAGE_TOKENS, PageFormat, round_up


class Home(Protocol):
    """Pages in order, each at an address that stays."""

    @property
    def page_count(self) -> int: ...

    def page_address(self, page: int) -> int: ...

    def page(self, page: int) -> torch.Tensor:
        """uint8 [stride]"""

    def fetch(self, first: int, pages: int) -> None:
        """Return when ``pages`` pages from ``first`` on are there, wherever they have to come from."""

    def extend(self, pages: int) -> None:
        """Add pages at the end; raises `OutOfCapacity` and adds none."""

    def truncate(self, tokens: int, *, logged: int | None = None) -> None:
        """Keep the pages of the first ``tokens`` tokens; where tokens are logged, ``logged`` of them, or as many."""

    def close(self) -> None:
        """Give the memory back."""


class ResidentPages:
    """Pages in VRAM, in chunks of a few pages so that a short history does not cost a long one's memory."""

    CHUNK_BYTES = 64 << 20

    def __init__(self, attachment: Attachment, page_format: PageFormat, session: int = 0) -> None:
        self._attachment = attachment
        self._format = page_format
        self._session = session
        self._chunks: list[DeviceBuffer] = []
        self._pages_per_chunk = max(1, self.CHUNK_BYTES // page_format.stride)
        self.page_count = 0

    def page_address(self, page: int) -> int:
        chunk, index = divmod(page, self._pages_per_chunk)
        return self._chunks[chunk].address + index * self._format.stride

    def page(self, page: int) -> torch.Tensor:
        chunk, index = divmod(page, self._pages_per_chunk)
        return self._chunks[chunk].tensor[index * self._format.stride : (index + 1) * self._format.stride]

    def fetch(self, first: int, pages: int) -> None:
        """They never are anywhere else."""

    def extend(self, pages: int) -> None:
        needed = round_up(self.page_count + pages, self._pages_per_chunk) // self._pages_per_chunk
        while len(self._chunks) < needed:
            nbytes = self._pages_per_chunk * self._format.stride
            self._chunks.append(self._attachment.allocate(nbytes, "resident_pages", self._session))
        self.page_count += pages

    def truncate(self, tokens: int, *, logged: int | None = None) -> None:  # noqa: ARG002
        self.page_count = min(self.page_count, round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS)

    def close(self) -> None:
        while self._chunks:
            self._chunks.pop().free()
        self.page_count = 0
