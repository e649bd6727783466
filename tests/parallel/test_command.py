"""``kvd-worker generate`` on several ranks: what its arguments do on all of them, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.daemon_process import DaemonProcess, clean_environment
from tests.blackbox.test_stat import command
from tests.parallel.launcher import Launcher, free_address
from tests.parallel.nodes import start_daemon

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.timeout(600)]

STAGES, SHARDS = ("--pipeline-parallel", "2"), ("--tensor-parallel", "2")


class Commands:
    """Runs the command on two ranks, of which rank r asks daemon r, or all daemon 0 where shards do."""

    def __init__(self, launcher: Launcher, daemons: list[DaemonProcess], prompt: Path) -> None:
        self._launcher, self._daemons = launcher, daemons
        self.prompt = ("--prompt-file", str(prompt))

    def start(self, *arguments: str, others: tuple[str, ...] | None = None, world: int = 2) -> None:
        """With ``others`` rank 1 has these instead of ``arguments``."""
        given = []
        for rank, own in enumerate((arguments, arguments if others is None else others)):
            daemon = self._daemons[rank if STAGES[0] in arguments else 0]
            given.append(["generate", "--run-dir", str(daemon.run_dir), "--tokens", "8", *own])
        self._launcher.start("commands", range(world), world, free_address(), arguments=given)

    def results(self, *arguments: str, **options: Any) -> list[Any]:
        self.start(*arguments, **options)
        return self._launcher.results()

    def refusals(self, *arguments: str, **options: Any) -> list[str]:
        self.start(*arguments, **options)
        return self._launcher.refusals()


@pytest.fixture(scope="module")
def commands(launcher: Launcher, daemons: list[DaemonProcess], tmp_path_factory: pytest.TempPathFactory) -> Commands:
    prompt = tmp_path_factory.mktemp("prompt") / "notes.txt"
    prompt.write_text("Every rank has a device, and every node has a daemon of its own. " * 2)
    return Commands(launcher, daemons, prompt)


def names(daemon: DaemonProcess) -> list[str]:
    return [session.name for session in daemon.stat().sessions]


def close(daemon: DaemonProcess, name: str) -> None:
    arguments = ("--run-dir", str(daemon.run_dir), "sessions", "close", name)
    assert command("kvd.cli", "admin", *arguments).returncode == 0


def test_a_session_of_two_stages_by_its_arguments(commands: Commands, daemons: list[DaemonProcess]) -> None:
    """Rank 0 alone reads and reports; a session is kept, saved, gone on from, and brought back on both nodes."""
    unread = (*STAGES, "--session", "chat", "--prompt-file", "/nowhere")
    own = (*STAGES, "--session", "chat", *commands.prompt)
    report, nothing = commands.results(*own, "--keep", "--save", others=(*unread, "--keep", "--save"))
    assert nothing is None
    assert report["prompt_tokens"] == 130
    assert report["committed_rows"] == 137
    assert [names(daemon) for daemon in daemons] == [["chat.stage0"], ["chat.stage1"]]
    on, _ = commands.results(*STAGES, "--session", "chat", "--continue")
    assert on["prompt_tokens"] == 138
    assert [names(daemon) for daemon in daemons] == [[], []]
    again, _ = commands.results(*STAGES, "--session", "chat", "--continue", "--restore")
    assert again["output_sha256"] == on["output_sha256"] != report["output_sha256"]


def test_a_session_that_is_on_one_stage_only_is_refused(commands: Commands, daemons: list[DaemonProcess]) -> None:
    """And left as it is."""
    half = (*STAGES, "--session", "half")
    commands.results(*half, *commands.prompt, "--keep")
    close(daemons[0], "half.stage0")
    errors = [commands.refusals(*half, "--continue"), commands.refusals(*half)]
    assert all(error.startswith("unknown_session: rank 0: ") for error in errors[0])
    assert all(error.startswith("session_exists: rank 1: ") for error in errors[1])
    assert [names(daemon) for daemon in daemons] == [[], ["half.stage1"]]
    close(daemons[1], "half.stage1")
    commands.results(*half)


def test_a_session_of_shards_is_one_and_belongs_to_its_cut(commands: Commands, daemons: list[DaemonProcess]) -> None:
    commands.results(*SHARDS, "--session", "shards", *commands.prompt, "--keep")
    assert names(daemons[0]) == ["shards"]
    [alone] = commands.refusals("--session", "shards", "--continue", "--dtype", "bf16", world=1)
    assert alone.startswith("fingerprint_mismatch: ")
    commands.results(*SHARDS, "--session", "shards", "--continue")
    assert names(daemons[0]) == []


@pytest.mark.slow
def test_under_torchrun(commands: Commands, daemons: list[DaemonProcess]) -> None:
    """As the other tests' ranks, which are forked, are told what torchrun tells."""
    arguments = ["generate", "--run-dir", str(daemons[0].run_dir), "--tokens", "8", *SHARDS, *commands.prompt]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "compute.cli", *arguments, "--json"], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    first, second = commands.results(*SHARDS, *commands.prompt)
    assert second is None
    assert json.loads(done.stdout)["output_sha256"] == first["output_sha256"]


def test_a_prompt_that_cannot_be_read_ends_all_ranks(commands: Commands) -> None:
    for error in commands.refusals(*SHARDS, "--prompt-file", "/nowhere"):
        assert error.startswith("invalid_value: ")
        assert "--prompt-file is '/nowhere'" in error


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (("--kernels", "reference"), "argument kernels of rank 1 is 'reference'; allowed: that of rank 0: None"),
        (("--session", "another"), "argument session of rank 1 is 'another'; allowed: that of rank 0: default"),
        (("--seed", "1"), "model of rank 1 is "),
    ],
)
def test_ranks_must_be_given_the_same(commands: Commands, others: tuple[str, ...], said: str) -> None:
    errors = commands.refusals(*SHARDS, others=(*SHARDS, *others))
    assert all(error.startswith(f"invalid_value: {said}") for error in errors), errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SHARDS, "--on-daemon-loss", "wait"), "--on-daemon-loss is 'wait'"),
        ((*STAGES, "--mtp", "1"), "MTP depth with pipeline stages is 1"),
        ((*SHARDS, *STAGES), "ranks started by torchrun is 2; allowed: 4"),
    ],
)
def test_what_several_ranks_cannot_do(commands: Commands, arguments: tuple[str, ...], said: str) -> None:
    assert all(said in error for error in commands.refusals(*arguments))


def test_a_daemon_that_goes_away_ends_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    with ExitStack() as stack:
        kept, lost = (start_daemon(stack, tmp_path / str(node)).wait_ready() for node in range(2))
        run_dirs = [str(daemon.run_dir) for daemon in (kept, lost)]
        launcher.start("asks_until_refused", [0, 1], 2, free_address(), run_dirs=run_dirs, pipeline=2)
        for rank in range(2):
            launcher.wait_said(rank, "begun")
        assert lost.stop() == 0
        for error in launcher.refusals():
            assert error.startswith("daemon_unavailable: ")
            assert "rank 1: " in error or str(lost.run_dir) in error
