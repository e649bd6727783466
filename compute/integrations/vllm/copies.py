"""Copies between the engine's blocks and the store's frames: by the CPU, or by a GPU from memory registered with it.

A copy is a list of pieces, each from an address to an address. On a GPU its copy engines do it, on two streams.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from compute.block_store import MappedExtent
from compute.integrations.vllm.regions import Region, Run, runs_of
from compute.mapping import REGISTER_CHUNK
from protocol.errors import NoDevice, OsFailure

STREAMS = 2
"""On a GPU: from one copy to the next a stream takes 3 to 8 µs, in which another one has the bus."""


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
    """For an engine on a GPU: extents are registered with it, and its copy engines copy a block's pieces run by run.

    No kernel: one that keeps the bus busy takes multiprocessors from the engine's steps, which then wait for it.

    Registering is by the copying thread, once for each extent; a failure is an error, and what it was for is not
    loaded or saved. Raises `NoDevice` where ``cuda-bindings`` is missing.
    """

    def __init__(self, regions: Sequence[Region], device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
        self._runs = [_CudaRun(run) for run in runs_of(regions)]
        self._registered: dict[int, MappedExtent] = {}

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
        with self._copying(after) as streams:
            for (block, frame), stream in zip(zip(blocks, frames, strict=True), streams, strict=False):
                for run in self._runs:
                    run.save(block, frame, stream)

    def load(self, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        with self._copying(after) as streams:
            for (block, frame), stream in zip(zip(blocks, frames, strict=True), streams, strict=False):
                for run in self._runs:
                    run.load(block, frame, stream)

    @contextmanager
    def _copying(self, after: Any) -> Iterator[Iterator[int]]:
        """Streams for one block after the other, which are waited for in the end, whatever happens."""
        with self._torch.cuda.device(self._device):
            for stream in self._streams:
                stream.wait_event(after)
            try:
                yield itertools.cycle([stream.cuda_stream for stream in self._streams])
            finally:
                for stream in self._streams:
                    stream.synchronize()

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


class _CudaRun:
    """A run's copies, each one call: a box of the engine's memory that is ``count`` deep, and a line of a frame."""

    def __init__(self, run: Run) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise NoDevice("the package cuda-bindings is missing: install kvd-tier[cuda]", device="cuda") from None
        self._driver = driver
        self._run = run
        engine, frame = (run.pitch, run.rows), (run.region.nbytes, 1)
        self._saved, self._loaded = self._box(engine, frame), self._box(frame, engine)

    def save(self, block: int, frame: int, stream: int) -> None:
        self._saved.srcDevice, self._saved.dstDevice = self._addresses(block, frame)
        self._enqueue(self._saved, stream)

    def load(self, block: int, frame: int, stream: int) -> None:
        self._loaded.dstDevice, self._loaded.srcDevice = self._addresses(block, frame)
        self._enqueue(self._loaded, stream)

    def _addresses(self, block: int, frame: int) -> tuple[int, int]:
        region = self._run.region
        return region.address + block * region.stride, frame + self._run.offset

    def _box(self, source: tuple[int, int], target: tuple[int, int]) -> Any:
        copy = self._driver.CUDA_MEMCPY3D()
        unified = self._driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED  # addresses say themselves where they are
        copy.srcMemoryType = copy.dstMemoryType = unified
        copy.srcPitch, copy.srcHeight = source
        copy.dstPitch, copy.dstHeight = target
        copy.WidthInBytes, copy.Height, copy.Depth = self._run.region.nbytes, 1, self._run.count
        return copy

    def _enqueue(self, copy: Any, stream: int) -> None:
        [status] = self._driver.cuMemcpy3DAsync(copy, stream)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise OsFailure(f"copy between the GPU and host memory: {status.name}", status=status.name)
