"""Where the pages of SGLang's host memory lie: each is a few pieces, in the order that SGLang gives them in.

Addresses only: which layout the host memory has is SGLang's business. A page is stored as its pieces, one behind the
other; their sizes are part of a space's fingerprint, as is everything else here that their meaning depends on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from protocol.errors import InvalidValue
from protocol.layout import PAGE_ALIGNMENT


class HostPool(Protocol):
    """What is used of SGLang's ``HostKVCache``."""

    page_size: int
    layout: str
    dtype: Any

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes of the pieces of the pages of these tokens, page by page."""


class Pages:
    """The pages of ``pool``, of ``page_tokens`` tokens and ``nbytes`` bytes each.

    Raises `InvalidValue` for a pool whose layout has no such pieces, or whose pages are smaller than a block may be.
    """

    def __init__(self, pool: HostPool) -> None:
        import torch

        self._pool = pool
        self.page_tokens = pool.page_size
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            allowed = f"one whose pages {type(pool).__name__} gives addresses of ({error})"
            raise InvalidValue("hicache_mem_layout", getattr(pool, "layout", None), allowed) from None
        self.sizes = [int(size) for size in sizes]
        self.nbytes = sum(self.sizes)
        if self.nbytes < PAGE_ALIGNMENT:
            allowed = f"at least {PAGE_ALIGNMENT}, by a larger --page-size than {self.page_tokens}"
            raise InvalidValue("bytes of a page", self.nbytes, allowed)

    @property
    def facts(self) -> dict[str, str | int | bytes]:
        """What the meaning of a page's bytes depends on, of the pool's."""
        pool = self._pool
        return {
            "pool": type(pool).__name__,
            "format": str(getattr(pool, "storage_format_tag", None)),
            "dtype": str(pool.dtype),
            "layout": pool.layout,
            "page tokens": self.page_tokens,
            "layers": f"{getattr(pool, 'start_layer', '')} {getattr(pool, 'end_layer', '')}",
            "pieces": " ".join(map(str, self.sizes)),
        }

    def addresses(self, indices: Any, count: int) -> list[list[int]]:
        """Where the pieces of ``count`` pages are, by the indices of their tokens (int64[count × page_tokens]).

        Raises `InvalidValue` for another number of indices.
        """
        if indices is None or len(indices) != count * self.page_tokens:
            given = None if indices is None else len(indices)
            raise InvalidValue("host indices", given, f"{self.page_tokens} for each of {count} pages")
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        if list(sizes) != self.sizes * count:
            raise InvalidValue("sizes of a page's pieces", list(sizes)[: len(self.sizes)], f"{self.sizes}, as before")
        pieces = len(self.sizes)
        return [list(addresses[page * pieces : (page + 1) * pieces]) for page in range(count)]

    def store(self, pieces: Sequence[int], block: int) -> None:
        """Copy a page, by the addresses of its pieces, to the block at an address."""
        for piece, nbytes in zip(pieces, self.sizes, strict=True):
            ctypes.memmove(block, piece, nbytes)
            block += nbytes

    def load(self, pieces: Sequence[int], block: int) -> None:
        """Copy the block at an address to a page, by the addresses of its pieces."""
        for piece, nbytes in zip(pieces, self.sizes, strict=True):
            ctypes.memmove(piece, block, nbytes)
            block += nbytes
