"""An engine's blocks on a GPU, copied to registered host memory and back."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from compute.block_store import MappedExtent
from compute.integrations.vllm.copies import CudaCopies, pieces
from compute.integrations.vllm.regions import Region, block_bytes
from protocol.layout import round_up

BLOCKS = 40
LAYERS = ((4096, 5), (41_984, 3), (18, 1))
"""Bytes of a piece, and layers of that size, which lie in one tensor."""


@pytest.mark.gpu
def test_blocks_go_to_their_frames_and_come_back_elsewhere() -> None:
    tensors = [torch.randint(0, 256, (n, BLOCKS, size), dtype=torch.uint8, device="cuda") for size, n in LAYERS]
    layers = [layer for tensor in tensors for layer in tensor]
    regions = [Region(layer.data_ptr(), layer.shape[1], layer.shape[1]) for layer in layers]
    memory = mmap.mmap(-1, 2 << 20)
    held = ctypes.c_char.from_buffer(memory)
    start, frame = ctypes.addressof(held), round_up(block_bytes(regions), 4096)
    extent = MappedExtent(0, start, len(memory), memory)
    copies = CudaCopies(regions, "cuda")
    copies.adopt([extent], [extent])
    saved, loaded = [7, 0, 39, 11], [1, 38, 2, 5]
    frames = [start + frame * index for index in (3, 0, 8, 5)]
    for turn in range(20):
        torch.cuda._sleep(1_000_000)  # what the engine does goes on for a while: the copy has to wait for it
        for layer in layers:
            layer[saved] = layer[saved] + turn
        before = [layer.clone() for layer in layers]
        copies.save(saved, frames, copies.mark())
        for engine, at, nbytes in pieces(regions, saved, frames):
            layer, block = next(
                (layer, block)
                for layer, region in zip(before, regions, strict=True)
                for block in saved
                if region.address + block * region.stride == engine
            )
            assert ctypes.string_at(at, nbytes) == bytes(layer[block].cpu().numpy())
        copies.load(loaded, frames, copies.mark())
        for layer, old in zip(layers, before, strict=True):
            old[loaded] = old[saved]
            assert torch.equal(layer, old), "the blocks that were loaded, and no others"
    copies.adopt([], [])  # given up, before it is unmapped
    del held
    memory.close()
