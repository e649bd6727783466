"""Ten minutes of conversations that coverage leads into every branch of the daemon's request handling."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trials import report

MINUTES = 10


@pytest.mark.torture
@pytest.mark.timeout(0)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris: the extra fuzz")
def test_conversations_led_by_coverage(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        f"-max_total_time={60 * MINUTES}",
        f"-artifact_prefix={tmp_path}/",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    [(runs, _)] = re.findall(r"^Done (\d+) runs in (\d+) second", done.stderr, re.MULTILINE)
    [*_, covered] = re.findall(r"cov: (\d+)", done.stderr)
    report("conversations led by coverage", int(runs), branches_seen=covered)
