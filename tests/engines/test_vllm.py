"""The trials of `tests.engines.vllm_trials`, each in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; docs/vllm.md says with which it runs"
)


def _run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.engines.vllm_trials", *words], capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.timeout(1800)
def test_outputs_are_equal_and_can_differ() -> None:
    _run("equal", "--kinds", "llama", "--prompts", "20")


@pytest.mark.timeout(1800)
def test_engines_share_and_strangers_do_not() -> None:
    _run("shared", "seeds", "reset")


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_outputs_of_all_models() -> None:
    _run("equal")


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_engines_and_daemons_killed() -> None:
    _run("kills", "restarts", "--trials", "50")


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_a_soak_of_half_an_hour() -> None:
    _run("soak", "--minutes", "30")


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_daemons_that_cannot_serve() -> None:
    _run("harm", "preempted")
