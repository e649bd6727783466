"""The splits of sparse attention for many query rows, on Hopper GPUs: in CUDA C++ (``attention_rows.cu``), where
copying, multiplying and storing overlap.

They have the bits of `compute.kernels.attention_hopper`, in less time: there, a multiprocessor holds one program, which
does one of these after the other, and each program converts the rows that it selects. Here rows are float16 already, as
`compute.kernels.half_rows` made them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compute.kernels.cuda_source import CudaKernel

DEFINES = {
    "THREADS": 384,
    "SHARED_BYTES": 227 << 10,
    "AHEAD": 2,
    "SCORED_FIRST": 2,
    "FENCED": 1,
    "STREAMED": 0,
    "MULTIPLIER_REGISTERS": 216,
    "FETCHER_REGISTERS": 72,
}
"""What the source is compiled with, beside ``SPLITS``, ``BLOCKS``, ``TEAM`` and ``BFLOAT16_QUERY``."""

TEAM = 0
"""Blocks that have a query row together and join its splits; 0: they are joined by another kernel."""

_HEADS = 64
"""Of a split."""
_MOST_JOINED = 16
"""Splits of a row: a thread has values of all of them in registers."""


def attend_splits(
    addresses: Tensor,
    query_latent: Tensor,
    query_rope: Tensor,
    partial: Tensor,
    softmax: Tensor,
    out: Tensor,
    counts: Tensor,
    scale: float,
    blocks: int,
) -> bool:
    """The splits of all query rows, as `compute.kernels.attention_hopper.split_kernel` stores them.

    ``addresses`` are of rows of `compute.kernels.half_rows`. ``scale`` is in units of the exponent of 2. There are at
    most ``blocks`` blocks. ``counts`` int32 [at least rows * ceil(heads / 64)] are 0 before and after. Returns whether
    the splits were joined, too, to ``out``.
    """
    (rows, k), heads, splits = addresses.shape, query_latent.shape[1], partial.shape[1]
    halves = {query_latent.dtype, query_rope.dtype} in ({torch.bfloat16}, {torch.float16})
    if not halves or query_latent.data_ptr() % 16 or query_rope.data_ptr() % 16:
        query_latent, query_rope = (part.to(torch.float16, copy=True) for part in (query_latent, query_rope))
    parts, bfloat16 = -(-heads // _HEADS), int(query_latent.dtype == torch.bfloat16)
    team = next(team for team in (TEAM, 2, 1) if splits % team == 0) if TEAM and splits <= _MOST_JOINED else 0
    runs = min(blocks // team, rows * parts) * team if team else min(blocks, rows * parts * splits)
    _kernel(torch.cuda.current_device(), SPLITS=splits, BLOCKS=parts, TEAM=team, BFLOAT16_QUERY=bfloat16).launch(
        (runs, 1),
        [
            *map(CudaKernel.address, (addresses, query_latent, query_rope, partial, softmax, out, counts)),
            *map(CudaKernel.int32, (rows, heads, k)),
            CudaKernel.float32(scale),
        ],
    )
    return team > 0


@functools.cache
def _kernel(_device: int, **defines: int) -> CudaKernel:
    return CudaKernel("attention_rows", DEFINES | defines)
