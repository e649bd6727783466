"""The selection in one launch, on GPUs with clusters of thread blocks: one cluster per row (``topk_cluster.cu``).

It gives what collect and select of `compute.kernels.topk` give, from the same class maxima, which it leaves as they do,
and needs no other scratch memory. Up to `MAX_CAPACITY` the launch that it saves is worth more than the processors that
a cluster does not have.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compute.kernels.cuda_source import CudaKernel
from compute.kernels.triton_support import INTERPRETED

MAX_CAPACITY = 1 << 18
"""Scores of a row beyond which one cluster reads them more slowly than the portable kernels do."""

DEFINES = {"THREADS": 512, "SHARED_BYTES": 90 << 10, "ROOM": 64, "CAPACITY": 8192}
"""What the source is compiled with, beside ``CLUSTER``. ``ROOM``: candidates that a warp keeps; where it has more, it
looks for them a second time. ``CAPACITY``: candidates that a cluster can keep in shared memory; where there are more,
they are counted in memory.
"""

_FEW_ROWS = 4
"""Rows for which clusters of 16 blocks, the largest, find room at once."""


def fits_cluster(device: torch.device, capacity: int) -> bool:
    """Whether ``device`` is a Hopper GPU, which is where this was measured, and rows are short enough."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None or capacity > MAX_CAPACITY:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def prepare_clusters(device: torch.device, rows: int) -> None:
    """Compile what selections of up to ``rows`` rows need; raises `NoDevice` where that cannot be."""
    with torch.cuda.device(device):
        for cluster in {_cluster_of(1), _cluster_of(rows)}:
            _kernel(torch.cuda.current_device(), cluster)


def select_by_cluster(scores: Tensor, lengths: Tensor, maxima: Tensor, selection: Tensor) -> None:
    """Enqueue the selection of each row; arguments are those of `TopK.select`, checked, and the maxima are known."""
    rows, k = selection.shape
    cluster = _cluster_of(rows)
    _kernel(torch.cuda.current_device(), cluster).launch(
        (cluster, rows),
        [
            CudaKernel.address(scores),
            CudaKernel.address(lengths),
            CudaKernel.address(maxima),
            CudaKernel.address(selection),
            CudaKernel.int64(scores.stride(0)),
            CudaKernel.int32(k),
        ],
    )


def _cluster_of(rows: int) -> int:
    return 16 if rows <= _FEW_ROWS else 8


@functools.cache
def _kernel(_device: int, cluster: int) -> CudaKernel:
    return CudaKernel("topk_cluster", DEFINES | {"CLUSTER": cluster})
