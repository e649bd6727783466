"""Products of e4m3 weights with up to `MOST_ROWS` rows, on Hopper GPUs: in CUDA C++ (``strip_*.cu``), where every warp
goes its own way; with more than `_ALONE` rows in teams (``team_*.cu``), of which the warps share the rows of ``x``.

They give the bits of `compute.kernels.triton_linear` and `compute.kernels.triton_experts`, in less time: there, the
warps of a program wait for each other at every block of columns, and while one thing is done the others are not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compute.kernels.cuda_source import Argument, CudaKernel
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.triton_products import Scratch, split_columns
from compute.kernels.triton_support import INTERPRETED

SOURCES = ("strip_linear", "strip_gate_up", "strip_down", "team_linear", "team_gate_up", "team_down")
MOST_ROWS = 16
MOST_EXPERTS = 1024
_ALONE = 4
"""With more rows, a warp by itself would copy more of ``x`` than of the weight."""
_STRIP = 16
_LINEAR_WARPS = 8
"""Of a block of `linear`, at least, where a strip has fewer splits than that."""
_MOST_WARPS = 16
"""Of a block, whose shared memory has room for these."""
_TEAM = 8
"""Warps of a team."""
_STAGES = {1: 3, 2: 3, 4: 2}
"""By the rows that there is room for: as many as let 24 warps or more share a multiprocessor."""
_MULTIPROCESSORS = 132
"""Of an H200."""
_X_STAGES = 4
"""Blocks of ``x`` of a team."""
_LEAST_OF_GATE_UP = 60 << 10
"""Shared memory of a block, so that a multiprocessor holds three: the 1,152 of nine experts are three rounds then."""


def fits_strips(x: Tensor, weight: Matrix, splits: int) -> bool:
    """Whether products of ``x`` [M, K] with an e4m3 ``weight`` [.., N, K], in ``splits``, can be done here."""
    if INTERPRETED or not x.is_cuda or weight.scales is None or torch.version.hip is not None:
        return False
    if not 0 < x.shape[0] <= MOST_ROWS or x.shape[1] % BLOCK or x.dtype != torch.bfloat16:
        return False
    if x.shape[0] <= _ALONE and splits > _MOST_WARPS:
        return False
    if x.data_ptr() % 16 or x.stride(0) % 8 or weight.values.data_ptr() % 16:
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)


def linear(x: Tensor, weight: Matrix, out: Tensor, splits: int, scratch: Scratch) -> None:
    """``x`` bfloat16 [M, K] by ``weight`` [N, K] into ``out`` [M, N], K in ``splits``."""
    (rows, k), n = x.shape, out.shape[1]
    split, splits = split_columns(k, splits)
    alone = rows <= _ALONE
    strips = max(1, _LINEAR_WARPS // splits) if alone else _TEAM
    tiles = -(-n // (_STRIP * strips))
    if not alone:
        scratch.check(tiles * strips * _STRIP * splits * rows, tiles)
    warps = strips * splits if alone else strips
    grid = (tiles if alone else tiles * splits, 1)
    kernel = _kernel("linear", rows, warps, grid, SPLITS=splits, FLOAT_OUT=int(out.dtype == torch.float32))
    kernel.launch(
        grid,
        [
            CudaKernel.address(x),
            *map(CudaKernel.address, weight.e4m3),
            CudaKernel.address(out),
            *_scratch(scratch, rows),
            *map(CudaKernel.int64, (x.stride(0), out.stride(0))),
            *map(CudaKernel.int32, (rows, n, k, split // BLOCK)),
        ],
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
    scratch: Scratch,
) -> None:
    """As `compute.kernels.experts.experts`, K of gate_up in ``splits``. There are `MOST_EXPERTS` at most.

    ``gated`` is scratch, bfloat16 [slots, M, I]: the shared expert's slot, if there is one, then as many as rows may
    choose experts; of ``scratch`` teams need what `compute.kernels.triton_experts` does.
    """
    (rows, hidden), choices, inner = x.shape, chosen.shape[1], down.shape[2]
    split, splits = split_columns(hidden, splits)
    alone = rows <= _ALONE
    base = 0 if shared is None else 1
    slots = gated.numel() // (rows * inner)
    shared_gate_up, shared_down = shared or (gate_up, down)
    warps = 2 * splits if alone else _TEAM
    grid = (inner // _STRIP if alone else inner // (_STRIP * _TEAM // 2) * splits, slots)
    first = _kernel("gate_up", rows, warps, grid, SPLITS=splits, CHOICES=choices, SHARED=base)
    first.launch(
        grid,
        [
            *map(CudaKernel.address, (x, chosen)),
            *map(CudaKernel.address, gate_up.e4m3),
            *map(CudaKernel.address, shared_gate_up.e4m3),
            CudaKernel.address(gated),
            *_scratch(scratch, rows),
            *map(CudaKernel.int32, (rows, inner, hidden, split // BLOCK)),
        ],
    )
    warps = min(base + choices, _MOST_WARPS) if alone else _TEAM
    grid = (-(-hidden // _STRIP), 1) if alone else (-(-hidden // (_STRIP * _TEAM)), slots)
    second = _kernel("down", rows, warps, grid, CHOICES=choices, SHARED=base)
    second.launch(
        grid,
        [
            *map(CudaKernel.address, (gated, chosen, weights)),
            *map(CudaKernel.address, down.e4m3),
            *map(CudaKernel.address, shared_down.e4m3),
            CudaKernel.address(out),
            *_scratch(scratch, rows),
            *map(CudaKernel.int32, (rows, hidden, inner)),
        ],
    )


def _scratch(scratch: Scratch, rows: int) -> list[Argument]:
    """What only teams need."""
    return [] if rows <= _ALONE else [CudaKernel.address(scratch.memory), CudaKernel.address(scratch.tickets)]


def _kernel(product: str, rows: int, warps: int, grid: tuple[int, int], **defines: int) -> CudaKernel:
    defines |= {"ROWS": 1 << (rows - 1).bit_length(), "THREADS": 32 * warps}
    if rows <= _ALONE:
        return _compiled(f"strip_{product}", torch.cuda.current_device(), **defines)
    return _compiled(f"team_{product}", torch.cuda.current_device(), STAGES=_team_stages(grid[0] * grid[1]), **defines)


def _team_stages(teams: int) -> int:
    """Four of the weight's, of which a multiprocessor has room for two teams; or three, for three of them, and two, for
    four, where that saves a round.
    """
    rounds = {stages: -(-teams // (_MULTIPROCESSORS * together)) for stages, together in ((4, 2), (3, 3), (2, 4))}
    return min(rounds, key=lambda stages: (rounds[stages], -stages))


@functools.cache
def _compiled(name: str, _device: int, **defines: int) -> CudaKernel:
    return CudaKernel(name, launch_defines(defines))


def launch_defines(defines: dict[str, int]) -> dict[str, int]:
    """``defines`` with those that follow from them, or are the same for all."""
    rows, warps = defines["ROWS"], defines["THREADS"] // 32
    stages = defines.get("STAGES") or _STAGES[rows]
    choices = defines.get("CHOICES", 0)
    defines = defines | {"STAGES": stages, "MOST_EXPERTS": MOST_EXPERTS}
    weights = warps * stages * _STRIP * BLOCK
    experts = MOST_EXPERTS // 8 + -(-rows * choices // 4) * 16
    if rows > _ALONE:
        x_row, barrier = 2 * BLOCK + 16, 16
        shared_bytes = weights + _X_STAGES * (rows * x_row + barrier) + experts
        return defines | {"X_STAGES": _X_STAGES, "SHARED_BYTES": shared_bytes}
    x = warps * stages * 2 * rows * BLOCK
    outputs = rows * (1 + choices) * _STRIP * 4
    shared_bytes = weights + x + warps * rows * _STRIP * 4 + outputs + experts
    if "SPLITS" in defines and "CHOICES" in defines:
        shared_bytes = max(shared_bytes, _LEAST_OF_GATE_UP)
    return defines | {"SHARED_BYTES": shared_bytes}
