"""A program in a mount namespace with a /dev/shm of its own, which it need not share with anybody."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
_NOT_MOUNTED = 32


def run_with_private_shm(script: str, size: str, *arguments: object) -> None:
    """Run a Python ``script`` there; the test is skipped where that is not permitted, and fails with what it said."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own (unshare -m), which is not permitted here")
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm || exit {_NOT_MOUNTED}"
    command = f'{mount}; exec {sys.executable} -c "$SCRIPT" {" ".join(map(str, arguments))}'
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", command],
        cwd=PROJECT,
        env={**os.environ, "SCRIPT": script},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode == _NOT_MOUNTED:
        pytest.skip(f"needs a tmpfs of its own, which cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
