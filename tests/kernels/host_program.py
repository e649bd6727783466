"""Kernels in CUDA C++ as programs of the host, under the address and undefined-behaviour sanitizers of a compiler.

``on_host`` has CUDA's words (``host.cuh``), and for each header of PTX a file of its name with the same words; the
kernels' sources are compiled as they are.
"""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

SOURCES = Path(__file__).parents[2] / "compute" / "kernels"
ON_HOST = Path(__file__).parent / "on_host"
FLAGS = ["-std=c++20", "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-unknown-pragmas"]

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++, to make a program of the kernel's source"
)


def build(folder: Path, name: str, main: str, defines: Mapping[str, int | str]) -> Path:
    """The program ``name`` of ``main``, a file of ``on_host``, made in ``folder``."""
    for file in (*SOURCES.glob("*.cu*"), *ON_HOST.iterdir()):  # the latter in place of those of their names
        shutil.copy(file, folder)
    command = ["g++", *FLAGS, *(f"-D{key}={value}" for key, value in defines.items()), main, "-o", name]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if any(word in built.stderr for word in ("cannot find -lasan", "libasan", "asan_interface.h: No such file")):
        pytest.skip("needs libasan and libubsan, which come with most packages of g++")
    assert built.returncode == 0, built.stderr
    return folder / name


def run(program: Path, given: bytes) -> bytes:
    """What the program writes if it is given ``given``. A sanitizer's findings fail the test."""
    done = subprocess.run([program], input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def programs(folder: Path) -> Callable[..., Path]:
    """The program of a kernel, given its name and defines; it is built once."""

    @functools.cache
    def built(name: str, **defines: int) -> Path:
        file = "-".join(map(str, (name, *defines.values())))
        return build(folder, file, "launch.cpp", defines | {"SOURCE": f'"{name}.cu"', "KERNEL": name})

    return built


def host_kernel(program: Callable[..., Path], seed: int) -> type:
    """What takes the place of `compute.kernels.cuda_source.CudaKernel`: it runs programs of the host."""

    class HostKernel:
        address = staticmethod(lambda tensor: tensor)
        int32 = staticmethod(lambda value: struct.pack("i", value))
        int64 = staticmethod(lambda value: struct.pack("q", value))

        def __init__(self, name: str, defines: dict[str, int]) -> None:
            self._program = program(name, **defines)

        def launch(self, grid: tuple[int, int], arguments: Sequence[Tensor | bytes]) -> None:
            _launch(self._program, struct.pack("3I", *grid, seed), arguments)

    return HostKernel


def _launch(program: Path, head: bytes, arguments: Sequence[Tensor | bytes]) -> None:
    given, tensors = [head], []
    for argument in arguments:
        if isinstance(argument, Tensor):
            span = 1 + sum((n - 1) * step for n, step in zip(argument.shape, argument.stride(), strict=True))
            tensors.append(argument.as_strided((span,), (1,)).view(torch.uint8))
            given += [struct.pack("q", len(tensors[-1])), tensors[-1].numpy().tobytes()]
        else:
            given.append(argument)
    written = run(program, b"".join(given))
    assert len(written) == sum(map(len, tensors))
    after = torch.frombuffer(bytearray(written), dtype=torch.uint8).split([len(tensor) for tensor in tensors])
    for tensor, values in zip(tensors, after, strict=True):
        tensor.copy_(values)
