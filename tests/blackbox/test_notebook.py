"""The notebook, cell by cell, as a reader runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_notebook_does_what_it_says() -> None:
    cells = json.loads((ROOT / "docs" / "story.ipynb").read_text())["cells"]
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "equal: True" in done.stdout
    assert "the same tokens: True" in done.stdout
    assert not any(cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "kept without outputs"
