"""Products of e4m3 weights with many rows, on Hopper GPUs: in CUDA C++ (``panel_*.cu``), where a weight is converted
while the matrix unit works.

They give the bits of `compute.kernels.triton_linear` and `compute.kernels.triton_many_experts`, in less time: there,
the warps of a program load, convert and multiply a block of columns in step.

``x`` is copied into *panels* first: of each 64 columns, in operand order, all rows, 128 bytes each, so that a tile of
rows is one piece of memory. The 16-byte words of a row change places as the matrix unit wants it (`_panel_kernel`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels.cuda_source import CudaKernel
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.triton_products import operand_columns, split_columns
from compute.kernels.triton_support import INTERPRETED, await_kernel_before, launch_options

SOURCES = ("panel_linear", "panel_gate_up", "panel_down")
MOST_EXPERTS = 320
_ROW_GROUP = 8
"""Rows whose words change places in eight ways."""
_CLUSTER = 2
_CONSUMERS = 256
_STAGES = {64: 6, 96: 5, 128: 4, 160: 3}
"""By the rows of a tile, the blocks of columns of x that there is room for. 160 are too many where K is cut in splits,
as there is one more sum to keep.
"""
_WEIGHT_STAGES = 4
_NEAR = 8
"""Tiles of rows that clusters of one time have; others have other tiles of the weight."""
_COLUMNS = 256
"""Of a program that fills panels."""


def fits_panels(weight: Matrix) -> bool:
    """Whether products with ``weight`` [.., N, K] can be done here."""
    if INTERPRETED or weight.scales is None or not weight.values.is_cuda or torch.version.hip is not None:
        return False
    if weight.shape[-1] % BLOCK or weight.shape[-2] % 2 or weight.values.data_ptr() % 16:
        return False
    return torch.cuda.get_device_capability(weight.device) == (9, 0)


def fits_output(out: Tensor) -> bool:
    """Whether two columns of ``out`` [M, N] can be stored at a time."""
    return out.stride(0) % 2 == 0 and out.data_ptr() % (2 * out.element_size()) == 0


def linear(x: Tensor, weight: Matrix, out: Tensor, splits: int) -> None:
    """``x`` [M, K] by ``weight`` [N, K] into ``out`` [M, N], K in ``splits``."""
    (rows, k), n = x.shape, out.shape[1]
    split, splits = split_columns(k, splits)
    panels = torch.empty(panel_rows(rows) * k, dtype=torch.bfloat16, device=x.device)
    fill_panels(x, panels)
    kernel = _kernel("panel_linear", splits, rows, FLOAT_OUT=int(out.dtype == torch.float32))
    numbers = map(CudaKernel.int32, (rows, n, k, panel_rows(rows), split // BLOCK))
    kernel.launch(
        (_blocks(x.device), 1),
        [
            CudaKernel.address(panels),
            *map(CudaKernel.address, weight.e4m3),
            CudaKernel.address(out),
            CudaKernel.int64(out.stride(0)),
            *numbers,
        ],
    )


def gate_up(
    panels: Tensor, ends: Tensor, weight: Matrix, shared: Matrix, gated: Tensor, pairs: int, each: int, splits: int
) -> None:
    """``gated = silu(gate(x)) * up(x)`` of sorted ``pairs``, from panels to panels.

    ``ends`` int32 [E + 1] says where the pairs of each expert, and of the shared one, end; experts have about ``each``.
    """
    count, inner, hidden = weight.shape[0], weight.shape[1] // 2, weight.shape[2]
    split, splits = split_columns(hidden, splits)
    _kernel("panel_gate_up", splits, each, COUNT=count).launch(
        (_blocks(panels.device), 1),
        [
            *map(CudaKernel.address, (panels, ends)),
            *map(CudaKernel.address, weight.e4m3),
            *map(CudaKernel.address, shared.e4m3),
            CudaKernel.address(gated),
            *map(CudaKernel.int32, (inner, hidden, panel_rows(pairs), split // BLOCK)),
        ],
    )


def down(
    gated: Tensor, order: Tensor, ends: Tensor, weight: Matrix, shared: Matrix, outputs: Tensor, each: int, splits: int
) -> None:
    """``outputs`` float32 [pairs, H]: of the i-th of the sorted pairs, at its number ``order[i]``."""
    count, hidden, inner = weight.shape
    split, splits = split_columns(inner, splits)
    _kernel("panel_down", splits, each, COUNT=count).launch(
        (_blocks(gated.device), 1),
        [
            *map(CudaKernel.address, (gated, order, ends)),
            *map(CudaKernel.address, weight.e4m3),
            *map(CudaKernel.address, shared.e4m3),
            CudaKernel.address(outputs),
            *map(CudaKernel.int32, (hidden, inner, panel_rows(len(order)), split // BLOCK)),
        ],
    )


def panel_rows(rows: int) -> int:
    """Rows that panels have for ``rows``."""
    return -(-rows // _ROW_GROUP) * _ROW_GROUP


def fill_panels(x: Tensor, panels: Tensor, order: Tensor | None = None, places: int = 1) -> None:
    """Rows of ``x`` [M, K], or those of the pairs in ``order``, ``places`` to each row, into bfloat16 ``panels``."""
    rows, k = x.shape[0] if order is None else len(order), x.shape[1]
    _panel_kernel[(panel_rows(rows) // _ROW_GROUP, triton.cdiv(k, _COLUMNS))](
        x,
        order,
        panels,
        rows,
        k,
        x.stride(0),
        places,
        GROUP=_ROW_GROUP,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["rows", "places"])
def _panel_kernel(  # type: ignore[no-untyped-def]
    x, order, panels, rows, K, x_row, places,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Word i of row r, of a panel's 8, goes to place i ^ r % 8."""
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    first = tl.program_id(1) * COLUMNS
    place = first + tl.arange(0, COLUMNS)
    column = first + operand_columns(COLUMNS)
    await_kernel_before(OVERLAPPED)
    source = tl.minimum(row, rows - 1)
    if order is not None:
        source = tl.load(order + source) // places
    values = tl.load(x + source.to(tl.int64)[:, None] * x_row + column[None, :], mask=(column < K)[None, :], other=0.0)
    word = (place // 8 % 8)[None, :] ^ (row % 8)[:, None]
    at = (place // 64)[None, :].to(tl.int64) * (tl.num_programs(0) * GROUP) + row[:, None]
    at = tl.max_contiguous(tl.multiple_of(at * 64 + word * 8 + (place % 8)[None, :], (1, 8)), (1, 8))
    tl.store(panels + at, values.to(tl.bfloat16), mask=(place < K)[None, :])


def _blocks(device: torch.device) -> int:
    """As many as there are multiprocessors: each has a block, which does tile after tile."""
    return torch.cuda.get_device_properties(device).multi_processor_count // _CLUSTER * _CLUSTER


def _kernel(name: str, splits: int, rows: int, **defines: int) -> CudaKernel:
    split = splits > 1
    return _compiled(name, torch.cuda.current_device(), **tuned(split, rows_of_tile(split, rows)), **defines)


def rows_of_tile(split: bool, rows: int) -> int:
    """That many, or somewhat more, tiles of this many take the least time: each takes some beside that of its rows."""
    tiles = [tile for tile in _STAGES if tile <= 128 or not split]
    return min(tiles, key=lambda tile: (-(-max(rows, 1) // tile) * (tile + 48), -tile))


def tuned(split: bool, rows: int) -> dict[str, int]:
    """What sources are compiled with for tiles of ``rows``, if K is cut in splits or not."""
    return {
        "SPLIT": int(split),
        "ROWS": rows,
        "STAGES": _STAGES[rows],
        "WEIGHT_STAGES": _WEIGHT_STAGES,
        "CLUSTER": _CLUSTER,
        "NEAR": _NEAR,
    }


@functools.cache
def _compiled(name: str, _device: int, **defines: int) -> CudaKernel:
    return CudaKernel(name, launch_defines(defines))


def launch_defines(defines: dict[str, int]) -> dict[str, int]:
    """``defines`` with those that follow from them, or are the same for all."""
    rows = defines["ROWS"]
    x = defines["STAGES"] * (rows * 2 * BLOCK + 32)  # with barriers
    weight = defines["WEIGHT_STAGES"] * BLOCK * BLOCK
    splits = rows * _CONSUMERS if defines["SPLIT"] else 16 * _CONSUMERS
    experts = 8 * (defines.get("COUNT", 0) + 1)
    shared_bytes = -(-(x + weight + splits + experts) // 1024) * 1024
    return defines | {"THREADS": _CONSUMERS + 128, "SHARED_BYTES": shared_bytes}
