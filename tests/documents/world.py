"""Where the examples in the documents are run: this machine, with ``/run``, ``/etc``, ``/var/lib`` and ``/dev/shm`` of
its own, a daemon, and what the examples speak of.

Run as ``python -m tests.documents.world`` in a mount namespace of its own, as root; prints one JSON object: by the name
of a block, what was wrong with it.

There are three users' sessions: ``chat-1`` of this one and of uid 1001, stored; ``talk`` of uid 1002, held by lease 4;
and ``notes`` of this one, saved and not in memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvd.control import ask_stats
from protocol.errors import DaemonUnavailable
from protocol.model import GLM_5_3
from tests.blackbox.daemon_process import clean_environment
from tests.blackbox.worker_process import WorkerProcess
from tests.documents.examples import ROOT, Block, blocks, missing

RUN_DIR = Path("/run/kvd")
SETTINGS = """
device = "cpu"
host.capacity = "1536MiB"
host.extent = "512MiB"
host.state_capacity = "64MiB"
vram.capacity = "512MiB"
disk.state_dir = "/var/lib/kvd"
socket.mode = "0666"
drain_timeout_s = 0
"""
OWN_SETTINGS = 'device = "cpu"\nhost.extent = "64MiB"\nhost.capacity = "256MiB"\ndrain_timeout_s = 0\n'
COMMAND_TIMEOUT_S = 100.0


class World:
    """The daemon, and a folder that commands are run in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {
            **clean_environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        self._daemon: subprocess.Popen[bytes] | None = None
        (folder / "FILE").write_text("What was said before. " * 8)
        (folder / "kvd.toml").write_text(OWN_SETTINGS)
        (folder / "path/to").mkdir(parents=True)
        (folder / "path/to/config.json").write_text(
            json.dumps({"model_type": "glm_moe_dsa", **dataclasses.asdict(GLM_5_3)})
        )

    def run(self, block: Block) -> list[str]:
        """What is wrong with the block: nothing, if its commands end and say what it says that they do."""
        if after := block.mark.partition("after a reload: ")[2]:
            self._reload(after)
        wrong = []
        for command in block.commands():
            status, output = self._run(command.line)
            lacking = missing(command.expected, output, exactly=block.mark == "run exactly")
            is_refusal = any(line.startswith(("kvd: ", "kvd-stat: ")) for line in command.expected)
            if lacking or bool(status) != is_refusal:
                wrong.append(f"$ {command.line}\nstatus {status}, lacking {lacking} in:\n{output}")
        self._stop_own()
        return wrong

    def start(self) -> None:
        """The daemon, and the sessions."""
        Path("/etc/kvd/kvd.d").mkdir(parents=True)
        Path("/etc/kvd/kvd.toml").write_text(SETTINGS)
        self._daemon = self._start("exec kvd run")
        for session, uid in (("notes", None), ("chat-1", None), ("chat-1", 1001)):
            with WorkerProcess(RUN_DIR, "committed", session=session, uid=uid) as worker:
                worker.kill()
            self._wait_for_leases(0)
        for line in ("kvd save notes", "kvd admin sessions close notes"):
            status, output = self._run(line)
            assert not status, output
        self.holder = WorkerProcess(RUN_DIR, "committed", session="talk", uid=1002)

    def stop(self) -> None:
        self.holder.end()
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait()

    def _run(self, line: str) -> tuple[int, str]:
        """Exit status and output, both streams as they come. A daemon is left running."""
        if line.startswith("kvd run"):
            self._own = self._start(f"exec {line}")
            return 0, ""
        ended = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        return ended.returncode, ended.stdout

    def _start(self, line: str) -> subprocess.Popen[bytes]:
        """A daemon, which answers."""
        log = (self._folder / "log").open("ab")
        daemon = subprocess.Popen(["bash", "-c", line], cwd=self._folder, env=self._environment, stderr=log)
        log.close()
        while True:
            try:
                ask_stats(RUN_DIR)
                return daemon
            except DaemonUnavailable:
                if daemon.poll() is not None:
                    raise AssertionError((self._folder / "log").read_text()) from None
                time.sleep(0.05)

    _own: subprocess.Popen[bytes] | None = None

    def _stop_own(self) -> None:
        if self._own is not None:
            self._own.terminate()
            self._own.wait()
            self._own = None

    def _reload(self, settings: str) -> None:
        assert self._daemon is not None
        Path("/etc/kvd/kvd.d/90-changed.toml").write_text(settings.replace("; ", "\n"))
        log = self._folder / "log"
        before = log.read_text().count("settings reloaded")
        self._daemon.send_signal(signal.SIGHUP)
        while log.read_text().count("settings reloaded") == before:
            time.sleep(0.05)

    def _wait_for_leases(self, count: int) -> None:
        while len(ask_stats(RUN_DIR).leases) != count:
            time.sleep(0.02)


def make_private() -> None:
    """This process's mount namespace is its own: what examples write to is not this machine's."""
    commands = [
        "mount -t tmpfs tmpfs /run",
        "mkdir -p /run/overlay/upper /run/overlay/work",
        "mount -t overlay -o lowerdir=/etc,upperdir=/run/overlay/upper,workdir=/run/overlay/work overlay /etc",
        "mount -t tmpfs tmpfs /var/lib",
        "mount -t tmpfs -o size=6g tmpfs /dev/shm",
    ]
    for command in commands:
        subprocess.run(command.split(), check=True)


def main() -> None:
    make_private()
    with tempfile.TemporaryDirectory(prefix="kvd-documents-") as folder:
        world = World(Path(folder))
        results = {}
        alone = [block for block in blocks() if block.mark == "run on its own"]
        others = [block for block in blocks() if block.is_run and block not in alone]
        for block in alone:
            results[block.name] = world.run(block)
        world.start()
        try:
            for block in others:
                results[block.name] = world.run(block)
        finally:
            world.stop()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
