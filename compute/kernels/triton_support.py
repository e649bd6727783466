"""What the Triton kernels share: pointers from addresses, exact rounding, overlapped launches, delays for tests."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, on the CPU. Decided when triton is imported."""


_whole_edges: list[bool] = []


def launch_options() -> dict[str, Any]:
    """Options of every launch whose kernel begins with `await_kernel_before` and takes ``OVERLAPPED``.

    Where the GPU can (CUDA from 9.0 on), a kernel's programs are set up while the kernel before them still runs.
    """
    if not _can_overlap():
        return {"OVERLAPPED": False}
    return {"OVERLAPPED": True, "launch_pdl": programmatic_edge()}


def programmatic_edge() -> bool:
    """Whether a launch may be set up while the kernel before it on the stream still runs, on a GPU that can do so."""
    return not _whole_edges


@contextmanager
def whole_edges() -> Iterator[None]:
    """Launches within are set up only when all that they depend on is done: for the first one of a branch, which would
    take room from what still runs on the other stream.

    After a join there is no need: a recorded launch then has a programmatic edge from each stream's last kernel, and
    `await_kernel_before` waits for all of them.
    """
    _whole_edges.append(True)
    try:
        yield
    finally:
        _whole_edges.pop()


@functools.cache
def _can_overlap() -> bool:
    if INTERPRETED or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def await_kernel_before(OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return when all that earlier kernels of the stream wrote can be read; to be called before any load or store."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_pointer(record, FIELD: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address in field ``FIELD`` of an int64 record, as a pointer to ``TYPE``."""
    return tl.load(record + FIELD).to(tl.pointer_type(TYPE))


@triton.jit
def spread(COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 … COUNT - 1 with neighbours in neighbouring threads. A thread with a run of them would load wider words, but
    each exchange between these and scattered accesses would go through shared memory and two barriers.
    """
    return tl.max_contiguous(tl.arange(0, COUNT), 1)


@triton.jit
def round_half_even(x):  # type: ignore[no-untyped-def]
    """float32 ``x`` to an integer, ties to even; |x| < 2**22. At 1.5 * 2**23 a float32 has no fraction left."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bfloat16_bits(x):  # type: ignore[no-untyped-def]
    """The bits, int32, of finite float32 ``x`` rounded to bfloat16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def delay(SEED: tl.constexpr, round_number, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Spin for a pseudo-random time, up to some 10 µs, that differs by program, round and place; nothing for seed 0.

    For tests: it moves the programs of one launch against each other, so that a missing order between them shows.
    """
    if SEED != 0:
        program = tl.program_id(0) * 131 + tl.program_id(1)
        state = (program + PLACE * 7919 + round_number * 104729 + SEED).to(tl.uint32) * 2654435761
        state = state ^ (state >> 15)
        turns = ((state >> 20) & 0xFFF).to(tl.int32)
        while turns > 0:
            state = state * 1664525 + 1013904223
            turns = tl.where(state == 0, 0, turns - 1)
