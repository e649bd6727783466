"""Small tensors side by side in one buffer of VRAM, so that each of them costs its bytes and not 2 MiB."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compute.attach import Attachment, DeviceBuffer
from protocol.handles import DevicePurpose
from protocol.layout import round_up

_ALIGNMENT = 256


@dataclass(frozen=True)
class Piece:
    """One tensor of an arena: its shape, its type, and what it holds at first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Arena:
    """One allocation cut into ``pieces``, in their order."""

    def __init__(self, attachment: Attachment, purpose: DevicePurpose, pieces: list[Piece], session: int = 0) -> None:
        size = sum(round_up(piece.nbytes, _ALIGNMENT) for piece in pieces)
        self._buffer: DeviceBuffer = attachment.allocate(size, purpose, session)
        self.tensors: list[torch.Tensor] = []
        at = 0
        for piece in pieces:
            tensor = self._buffer.tensor[at : at + piece.nbytes].view(piece.dtype).view(piece.shape)
            if piece.fill:  # new memory is zero
                tensor.fill_(piece.fill)
            self.tensors.append(tensor)
            at += round_up(piece.nbytes, _ALIGNMENT)

    def free(self) -> None:
        """Give the memory back; the tensors are of no more use."""
        self.tensors.clear()
        self._buffer.free()
