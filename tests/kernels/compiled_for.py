"""Compile the Triton kernels for a GPU that need not be there: ``python -m tests.kernels.compiled_for hip gfx942 64``.

The launches of `sanitized_run` are made on CPU tensors with a driver that knows only what it compiles for: nothing
runs. Kernels named after these three arguments are left out. Prints a line for each kernel: the seconds that it took,
or why it cannot run there or should not. The exit status is how many of the latter there are.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from compute.kernels import attention, triton_support


class CompilingDriver:
    """What triton asks of a driver on the way to machine code."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


COPIES = {"addresses_kernel", "fetch_kernel", "planar_kernel"}
"""Kernels whose work is to copy rows."""
WIDE_LOAD = re.compile(r"ld\.global[.\w:]*\.v(?:4\.[bfu]32|2\.[bfu]64)")
"""16 bytes at a time, in PTX; what a bus to the host needs."""
SHARED_BYTES = {"hip": 64 << 10, "cuda": 227 << 10}
"""Shared memory that a program may have; a kernel that needs more is compiled, but would be refused when launched."""


def main(backend: str, architecture: str, warp_size: str, *left_out: str) -> int:
    name = int(architecture) if architecture.isdigit() else architecture
    driver.set_active(CompilingDriver(GPUTarget(backend, name, int(warp_size))))
    triton_support._can_overlap = lambda: backend == "cuda"  # type: ignore[assignment]
    hopper_programs = 132 if (backend, architecture) == ("cuda", "90") else 0
    attention.hopper_programs = lambda _device: hopper_programs  # type: ignore[assignment]
    run = JITFunction.run
    outcome: dict[str, str] = {}

    def compile_only(self: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        name = self.fn.__name__.lstrip("_")
        if name in left_out or outcome.get(name, "").startswith("FAILED"):
            return
        if backend != "cuda":
            options.pop("maxnreg", None)
            options |= {"PTX": False} if "PTX" in options else {}
        started = time.monotonic()
        try:
            made = run(self, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is what is reported
            outcome[name] = f"FAILED: {' '.join(str(error).split())[-200:] or type(error).__name__}"
            return
        if made.metadata.shared > SHARED_BYTES[backend]:
            outcome[name] = f"FAILED: {made.metadata.shared} bytes of shared memory, at most {SHARED_BYTES[backend]}"
        elif (
            backend == "cuda"
            and name in COPIES
            and options.get("STAGED", True)
            and not WIDE_LOAD.search(made.asm["ptx"])
        ):
            outcome[name] = "FAILED: it loads less than 16 bytes at a time"
        else:
            outcome.setdefault(name, f"{time.monotonic() - started:.1f} s")

    JITFunction.run = compile_only
    from tests.kernels import sanitized_run

    sanitized_run.main()
    for name, what in sorted(outcome.items()):
        sys.stdout.write(f"{name}: {what}\n")
    return sum(what.startswith("FAILED") for what in outcome.values())


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
