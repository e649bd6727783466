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
    "MULTIPLIER_REGISTERS": 216,
    "FETCHER_REGISTERS": 72,
}
"""What the source is compiled with, beside ``SPLITS``, ``BLOCKS`` and ``BFLOAT16_QUERY``."""

_HEADS = 64
"""Of a split."""


def attend_splits(
    selection: Tensor,
    halves: Tensor,
    query_latent: Tensor,
    query_rope: Tensor,
    partial: Tensor,
    softmax: Tensor,
    scale: float,
    blocks: int,
) -> None:
    """The splits of all query rows, as `compute.kernels.attention_hopper.split_kernel` stores them.

    ``selection`` int32 [n, k] has numbers of rows of ``halves``, -1 where empty. ``scale`` is in units of the exponent
    of 2. There are at most ``blocks`` blocks.
    """
    (rows, k), heads, splits = selection.shape, query_latent.shape[1], partial.shape[1]
    as_given = {query_latent.dtype, query_rope.dtype} in ({torch.bfloat16}, {torch.float16})
    if not as_given or query_latent.data_ptr() % 16 or query_rope.data_ptr() % 16:
        query_latent, query_rope = (part.to(torch.float16, copy=True) for part in (query_latent, query_rope))
    parts, bfloat16 = -(-heads // _HEADS), int(query_latent.dtype == torch.bfloat16)
    _kernel(torch.cuda.current_device(), SPLITS=splits, BLOCKS=parts, BFLOAT16_QUERY=bfloat16).launch(
        (min(blocks, rows * parts * splits), 1),
        [
            *map(CudaKernel.address, (selection, halves, query_latent, query_rope, partial, softmax)),
            *map(CudaKernel.int32, (rows, heads, k)),
            CudaKernel.float32(scale),
        ],
    )


@functools.cache
def _kernel(_device: int, **defines: int) -> CudaKernel:
    return CudaKernel("attention_rows", DEFINES | defines)
