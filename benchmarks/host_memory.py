"""Host RAM registered with the GPU, for benches: huge pages advised, populated in parallel, made once per process."""

from __future__ import annotations

import functools
import mmap
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from protocol.errors import OsFailure

_CHUNK = 4 << 30
_REGISTERED = 64 << 30  # one copy must not cross from one registration to the next
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; not in the mmap module
_PORTABLE = 1  # cudaHostRegisterPortable


@functools.cache
def registered(nbytes: int) -> Tensor:
    """uint8 [nbytes] of host RAM that kernels can read in place: the same for every call, kept until the process ends.

    Raises `OsFailure` if the driver refuses to register it.
    """
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)

    def populate(start: int) -> None:
        memory.madvise(_POPULATE_WRITE, start, min(_CHUNK, nbytes - start))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(populate, range(0, nbytes, _CHUNK)))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    for start in range(0, nbytes, _REGISTERED):
        size = min(_REGISTERED, nbytes - start)
        status = int(runtime.cudaHostRegister(tensor.data_ptr() + start, size, _PORTABLE))
        if status:
            raise OsFailure(f"cudaHostRegister of {size} bytes failed: error {status}", call="cudaHostRegister")
    return tensor
