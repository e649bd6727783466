"""Products of e4m3 weights with up to `MOST_ROWS` rows, on Hopper GPUs: in CUDA C++ (``strip_*.cu``), where every warp
goes its own way.

They give the bits of `compute.kernels.triton_linear` and `compute.kernels.triton_experts`, in less time: there, the
warps of a program wait for each other at every block of columns, and while one thing is done the others are not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compute.kernels.cuda_source import Argument, CudaKernel
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.triton_products import split_columns
from compute.kernels.triton_support import INTERPRETED

SOURCES = ("strip_linear", "strip_gate_up", "strip_down")
MOST_ROWS = 4
"""With more, each warp would copy more of ``x`` than of the weight."""
MOST_EXPERTS = 1024
_STRIP = 16
_LINEAR_WARPS = 8
"""Of a block of `linear`, at least, where a strip has fewer splits than that."""
_MOST_WARPS = 16
"""Of a block, whose shared memory has room for these."""
_STAGES = {1: 3, 2: 3, 4: 2}
"""By the rows that there is room for: as many as let 24 warps or more share a multiprocessor."""
_LEAST_OF_GATE_UP = 60 << 10
"""Shared memory of a block, so that a multiprocessor holds three: the 1,152 of nine experts are three rounds then."""


def fits_strips(x: Tensor, weight: Matrix, splits: int) -> bool:
    """Whether products of ``x`` [M, K] with an e4m3 ``weight`` [.., N, K], in ``splits``, can be done here."""
    if INTERPRETED or not x.is_cuda or weight.scales is None or torch.version.hip is not None:
        return False
    if not 0 < x.shape[0] <= MOST_ROWS or x.shape[1] % BLOCK or x.dtype != torch.bfloat16 or splits > _MOST_WARPS:
        return False
    if x.data_ptr() % 16 or x.stride(0) % 8 or weight.values.data_ptr() % 16:
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)


def linear(x: Tensor, weight: Matrix, out: Tensor, splits: int) -> None:
    """``x`` bfloat16 [M, K] by ``weight`` [N, K] into ``out`` [M, N], K in ``splits``."""
    (rows, k), n = x.shape, out.shape[1]
    split, splits = split_columns(k, splits)
    strips = max(1, _LINEAR_WARPS // splits)
    kernel = _kernel("strip_linear", rows, strips * splits, SPLITS=splits, FLOAT_OUT=int(out.dtype == torch.float32))
    numbers = map(CudaKernel.int32, (rows, n, k, split // BLOCK))
    strides = CudaKernel.int64(x.stride(0)), CudaKernel.int64(out.stride(0))
    blocks = -(-n // (_STRIP * strips))
    kernel.launch(
        (blocks, 1), [CudaKernel.address(x), *_addresses(weight), CudaKernel.address(out), *strides, *numbers]
    )


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    shared: tuple[Matrix, Matrix] | None,
    out: Tensor,
    gated: Tensor,
    splits: int,
) -> None:
    """As `compute.kernels.experts.experts`, K of gate_up in ``splits``. There are `MOST_EXPERTS` at most.

    ``gated`` is scratch, bfloat16 [slots, M, I]: the shared expert's slot, if there is one, then as many as rows may
    choose experts.
    """
    (rows, hidden), choices, inner = x.shape, chosen.shape[1], down.shape[2]
    split, splits = split_columns(hidden, splits)
    base = 0 if shared is None else 1
    slots = gated.numel() // (rows * inner)
    shared_gate_up, shared_down = shared or (gate_up, down)
    first = _kernel("strip_gate_up", rows, 2 * splits, SPLITS=splits, CHOICES=choices, SHARED=base)
    first.launch(
        (inner // _STRIP, slots),
        [
            *map(CudaKernel.address, (x, chosen)),
            *_addresses(gate_up),
            *_addresses(shared_gate_up),
            CudaKernel.address(gated),
            *map(CudaKernel.int32, (rows, inner, hidden, split // BLOCK)),
        ],
    )
    second = _kernel("strip_down", rows, min(base + choices, _MOST_WARPS), CHOICES=choices, SHARED=base)
    second.launch(
        (-(-hidden // _STRIP), 1),
        [
            *map(CudaKernel.address, (gated, chosen, weights)),
            *_addresses(down),
            *_addresses(shared_down),
            CudaKernel.address(out),
            *map(CudaKernel.int32, (rows, hidden, inner)),
        ],
    )


def _addresses(matrix: Matrix) -> tuple[Argument, Argument]:
    assert matrix.scales is not None
    return CudaKernel.address(matrix.values), CudaKernel.address(matrix.scales)


def _kernel(name: str, rows: int, warps: int, **defines: int) -> CudaKernel:
    room = 1 << (rows - 1).bit_length()
    return _compiled(name, torch.cuda.current_device(), ROWS=room, THREADS=32 * warps, **defines)


@functools.cache
def _compiled(name: str, _device: int, **defines: int) -> CudaKernel:
    return CudaKernel(name, launch_defines(defines))


def launch_defines(defines: dict[str, int]) -> dict[str, int]:
    """``defines`` with those that follow from them, or are the same for all."""
    rows, warps = defines["ROWS"], defines["THREADS"] // 32
    stages = _STAGES[rows] * (_STRIP + 2 * rows) * BLOCK
    choices = defines.get("CHOICES", 0)
    outputs = rows * (1 + choices) * _STRIP * 4
    shared_bytes = warps * (stages + rows * _STRIP * 4) + outputs + MOST_EXPERTS // 8 + -(-rows * choices // 4) * 16
    if "SPLITS" in defines and "CHOICES" in defines:
        shared_bytes = max(shared_bytes, _LEAST_OF_GATE_UP)
    return defines | {"STAGES": _STAGES[rows], "MOST_EXPERTS": MOST_EXPERTS, "SHARED_BYTES": shared_bytes}
