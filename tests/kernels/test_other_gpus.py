"""The kernels compile for GPUs that are not here: AMD's CDNA 3 and RDNA 3, where none of them runs yet, and Hopper."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAILS: dict[str, set[str]] = {"gfx942": set(), "gfx1100": set(), "90": set()}
"""Kernels that do not compile for an architecture, or need more shared memory than it has."""
PRODUCTS = ["linear_kernel", "heads_kernel", "gate_up_kernel", "down_kernel", "many_gate_up_kernel", "many_down_kernel"]
"""Left out for AMD: their tiles take more shared memory than there is, and Triton 3.6 cannot compile some at all."""


@pytest.mark.parametrize(
    ("backend", "architecture", "warp_size", "left_out"),
    [
        ("cuda", "90", 32, []),
        ("hip", "gfx942", 64, PRODUCTS),
        # Attention spills there, which takes the compiler a minute.
        ("hip", "gfx1100", 32, [*PRODUCTS, "split_kernel"]),
        pytest.param("hip", "gfx1100", 32, PRODUCTS, marks=pytest.mark.torture),
    ],
)
def test_kernels_compile(backend: str, architecture: str, warp_size: int, left_out: list[str]) -> None:
    command = [sys.executable, "-m", "tests.kernels.compiled_for", backend, architecture, str(warp_size), *left_out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    failed = {name for name, _, what in lines if what.startswith("FAILED")}
    assert done.returncode == len(failed), done.stderr
    assert len(lines) >= 11, done.stdout
    assert failed == FAILS[architecture], done.stdout
