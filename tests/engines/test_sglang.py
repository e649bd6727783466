"""The trials of `tests.engines.sglang_trials`, each in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed here; docs/sglang.md says with which it runs",
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trial", ["interface", "hashes", "pools", "controller", "engines"])
def test_the_released_package(trial: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.engines.sglang_trials", trial], capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
