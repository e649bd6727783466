"""Copies between the engine's blocks and the store's frames: by the CPU, or by a GPU from memory registered with it.

A copy is a list of pieces, each from an address to an address. On a GPU it is one kernel on a stream of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from compute.block_store import MappedExtent
from compute.integrations.vllm.regions import Region
from compute.mapping import REGISTER_CHUNK
from protocol.errors import InvalidValue


class Copies(Protocol):
    """Copies of whole blocks. ``mark`` is called by the engine's thread, all else by the copying thread."""

    def mark(self) -> object:
        """This point in the engine's work: what it has been told to do before is done before a copy `after` it."""

    def adopt(self, known: Sequence[MappedExtent], needed: Sequence[MappedExtent]) -> None:
        """All extents that frames can lie in from now on, and those of them that the next copy is about."""

    def save(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        """Copy the engine's blocks to the frames at these addresses; returns when they are whole."""

    def load(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        """Copy the frames to the engine's blocks; returns when they are whole."""


def pieces(regions: Sequence[Region], blocks: Sequence[int], frames: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(address in the engine, address in a frame, bytes) of every piece of these blocks."""
    for block, frame in zip(blocks, frames, strict=True):
        offset = 0
        for region in regions:
            yield region.address + block * region.stride, frame + offset, region.nbytes
            offset += region.nbytes


class CpuCopies:
    """For an engine on the CPU, whose steps are over when they return."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions

    def mark(self) -> object:
        return None

    def adopt(self, known: Sequence[MappedExtent], needed: Sequence[MappedExtent]) -> None:
        pass

    def save(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        for engine, frame, nbytes in pieces(self._regions, blocks, frames):
            ctypes.memmove(frame, engine, nbytes)

    def load(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        for engine, frame, nbytes in pieces(self._regions, blocks, frames):
            ctypes.memmove(engine, frame, nbytes)


class CudaCopies:
    """For an engine on a GPU: extents are registered with it, and one kernel copies all pieces of a call.

    Registering is by the copying thread, once for each extent; a failure is an error, and what it was for is not
    loaded or saved. Raises `InvalidValue` for a cache whose blocks are not whole words of that kernel's.
    """

    def __init__(self, regions: Sequence[Region], device: Any) -> None:
        import torch

        from compute.kernels.pieces import WORD

        for region in regions:
            for what, value in (("address", region.address), ("stride", region.stride), ("bytes", region.nbytes)):
                if value % WORD:
                    raise InvalidValue(f"{what} of a layer's blocks", value, f"a multiple of {WORD}, on a GPU")
        self._torch = torch
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._registered: dict[int, MappedExtent] = {}
        columns = [(region.address, region.stride, region.nbytes) for region in regions]
        self._address, self._stride, self._nbytes = torch.tensor(columns, dtype=torch.int64).unbind(1)
        self._offset = self._nbytes.cumsum(0) - self._nbytes  # of the region's piece in a frame
        self._table = torch.empty((0, 3), dtype=torch.int64)

    def mark(self) -> object:
        return self._torch.cuda.current_stream(self._device).record_event()

    def adopt(self, known: Sequence[MappedExtent], needed: Sequence[MappedExtent]) -> None:
        # An extent that is registered stays mapped, whatever became of the daemon: its address is no other's.
        for address in self._registered.keys() - {extent.address for extent in known}:
            self._unregister(self._registered.pop(address).nbytes, address)
        for extent in needed:
            if extent.address not in self._registered:
                self._register(extent.nbytes, extent.address)
                self._registered[extent.address] = extent

    def save(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        engine, frame = self._pieces(blocks, frames)
        self._copy(engine, frame, after)

    def load(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        engine, frame = self._pieces(blocks, frames)
        self._copy(frame, engine, after)

    def _pieces(self, blocks: Sequence[int], frames: Sequence[int]) -> tuple[Any, Any]:
        """Addresses in the engine and in frames, int64 [blocks, regions]: what `pieces` lists."""
        tensor, int64 = self._torch.tensor, self._torch.int64
        engine = self._address + tensor(blocks, dtype=int64)[:, None] * self._stride
        return engine, tensor(frames, dtype=int64)[:, None] + self._offset

    def _copy(self, source: Any, destination: Any, after: Any) -> None:
        from compute.kernels.pieces import copy_pieces

        torch = self._torch
        count = source.numel()
        if count > len(self._table):
            self._table = torch.empty((count, 3), dtype=torch.int64).pin_memory()
        table = self._table[:count]  # nobody reads it any more: every copy is waited for
        table.view(*source.shape, 3).copy_(torch.stack((source, destination, self._nbytes.expand_as(source)), dim=2))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            copy_pieces(table.to(self._device, non_blocking=True))
            self._stream.record_event().synchronize()

    def _register(self, nbytes: int, address: int) -> None:
        """All of it, or none."""
        cuda = self._torch.cuda
        for start in range(0, nbytes, REGISTER_CHUNK):
            try:
                cuda.check_error(
                    cuda.cudart().cudaHostRegister(address + start, min(REGISTER_CHUNK, nbytes - start), 0)
                )
            except Exception:
                self._unregister(start, address)
                raise

    def _unregister(self, nbytes: int, address: int) -> None:
        for start in range(0, nbytes, REGISTER_CHUNK):
            self._torch.cuda.check_error(self._torch.cuda.cudart().cudaHostUnregister(address + start))
