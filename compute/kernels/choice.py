"""Which kernels serve a history: chosen by name, never by what happens to work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from compute.kernels.kernel_set import KernelSet, ReferenceKernels
from compute.kernels.memory import Memory
from compute.kernels.state import GroupCache, PageMap
from protocol.errors import InvalidValue

KernelsName = Literal["reference", "triton"]
KERNELS: tuple[KernelsName, ...] = get_args(KernelsName)


def default_kernels(device_type: str) -> KernelsName:
    """The kernels of a device that nobody chose others for: Triton's on a GPU, the reference on a CPU."""
    return "triton" if device_type == "cuda" else "reference"


def make_kernels(
    name: KernelsName, memory: Memory, page_map: PageMap, caches: Sequence[GroupCache], topk: int
) -> KernelSet:
    """The set ``name`` over one session. Raises `InvalidValue` where the Triton kernels cannot serve it."""
    if name == "reference":
        return ReferenceKernels(memory, page_map, caches, topk)
    # Imported where it is used: a CPU worker needs no triton.
    from compute.kernels.triton_set import TritonKernels
    from compute.kernels.triton_support import INTERPRETED

    if page_map.window.device.type != "cuda" and not INTERPRETED:
        raise InvalidValue("device of the Triton kernels", str(page_map.window.device), "cuda, or Triton's interpreter")
    return TritonKernels(page_map, caches, topk)
