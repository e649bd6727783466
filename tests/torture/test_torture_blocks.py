"""A thousand deaths of clients of the block store, and fifty of its daemon."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(deaths: int) -> None:
    """In a process that forks its clients, and so has no threads."""
    command = [sys.executable, "-m", "tests.torture.block_clients", "--deaths", str(deaths)]
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_few_clients_of_the_block_store_killed_at_any_point() -> None:
    run(40)


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_clients_of_the_block_store_killed_at_any_point() -> None:
    run(1000)
