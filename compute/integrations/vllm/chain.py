"""Keys of a request's blocks: our own chain over token ids and whatever else the engine tells prefixes apart by.

The engine's own block hashes begin with a random or seed-dependent number, and do not outlive it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from protocol.block_keys import chain_start, extend_chain

Extra = Callable[[int, int], object]
"""What a block of tokens (first, end) depends on beside them: plain data, or None."""


class Chain:
    """The keys of one request, as far as its tokens fill blocks of ``block_tokens``. Tokens are only ever added."""

    def __init__(self, model: bytes, block_tokens: int, extra: Extra, salt: bytes = b"") -> None:
        self.keys: list[bytes] = []
        self._block_tokens = block_tokens
        self._extra = extra
        self._last = chain_start(model, salt)

    def extend(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of the full blocks of the first ``count`` of the request's tokens, all of them."""
        size = self._block_tokens
        blocks = count // size
        first = len(self.keys)
        if first < blocks:
            extras = [self._bytes(block * size, (block + 1) * size) for block in range(first, blocks)]
            ids = array("i", tokens[first * size : blocks * size]).tobytes()
            self.keys += extend_chain(self._last, ids, size, extras)
            self._last = self.keys[-1]
        return self.keys[:blocks]

    def _bytes(self, first: int, end: int) -> bytes:
        extra = self._extra(first, end)
        return b"" if extra is None else msgspec.msgpack.encode(extra)
