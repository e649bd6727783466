"""Copying many pieces from address to address in one launch: VRAM and registered host RAM, in any direction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from protocol.errors import InvalidValue

WORD = 16
"""Addresses and sizes of pieces are multiples of so many bytes, a thread's vector."""
_WORD = tl.constexpr(WORD)
_CHUNK_WORDS = tl.constexpr(2048)
"""int64 words that one program copies at a time."""
PROGRAMS = 264
"""Two for each multiprocessor of an H200: enough reads in flight for the bus, and most of the GPU left alone."""


def copy_pieces(pieces: torch.Tensor, *, programs: int = PROGRAMS) -> None:
    """Copy every piece of int64 [n, 3] (source, destination, bytes) on the current stream.

    Every address is one that the device of ``pieces`` can reach. Ranges do not overlap. No more than ``programs`` of
    the kernel run at a time. Raises `InvalidValue` for a table of another type or shape; addresses are not looked at.
    """
    if pieces.dtype != torch.int64 or pieces.dim() != 2 or pieces.shape[1] != 3 or not pieces.is_contiguous():
        raise InvalidValue("table of pieces", f"{pieces.dtype} {tuple(pieces.shape)}", "contiguous int64 [n, 3]")
    count = pieces.shape[0]
    if count:
        _pieces_kernel[(min(count, programs),)](pieces, count)


@triton.jit(do_not_specialize=["count"])
def _pieces_kernel(pieces, count):  # type: ignore[no-untyped-def]
    word = tl.arange(0, _CHUNK_WORDS)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.multiple_of(tl.load(pieces + 3 * piece).to(tl.pointer_type(tl.int64)), _WORD)
        destination = tl.multiple_of(tl.load(pieces + 3 * piece + 1).to(tl.pointer_type(tl.int64)), _WORD)
        words = tl.multiple_of(tl.load(pieces + 3 * piece + 2) // 8, _WORD // 8)
        for start in range(0, words, _CHUNK_WORDS):
            inside = start + word < words
            tl.store(destination + start + word, tl.load(source + start + word, mask=inside), mask=inside)
