"""Kernels in CUDA C++ as programs of the host, under the address and undefined-behaviour sanitizers of a compiler.

``on_host`` has CUDA's words (``host.cuh``), and for each header of PTX a file of its name with the same words; the
kernels' sources are compiled as they are.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

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
