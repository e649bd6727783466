"""Two nodes on one machine: network namespaces with a link between them, which is cut amid a decode and amid a save."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.parallel.launcher import Launcher
from tests.parallel.nodes import start_daemon

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.torture, pytest.mark.timeout(600)]

LENGTH, COUNT = 120, 20
TIMEOUT_S = 6.0
"""Of peers, where a cut link is waited for."""
NODES = ("kvd-test-a", "kvd-test-b")
LINKS = ("kvd-a", "kvd-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Two namespaces and a link. Its ``cut`` and ``mend`` are of the first one's end."""

    def __init__(self) -> None:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)  # of a run that was killed
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", LINKS[0], "netns", NODES[0], "type", "veth", "peer", "name", LINKS[1], "netns", NODES[1])
        for node, link, address in zip(NODES, LINKS, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", node, "link", "set", "lo", "up")
            ip("-n", node, "link", "set", link, "up")

    def cut(self) -> None:
        ip("-n", NODES[0], "link", "set", LINKS[0], "down")

    def mend(self) -> None:
        ip("-n", NODES[0], "link", "set", LINKS[0], "up")

    def close(self) -> None:
        for node in NODES:
            ip("netns", "del", node)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    try:
        made = Network()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    yield made
    made.close()


class TwoNodes:
    """A daemon and a launcher of ranks on each node."""

    def __init__(self, stack: ExitStack, saved: Path) -> None:
        self.daemons: list[DaemonProcess] = []
        self.launchers: list[Launcher] = []
        self._port = 20_000
        for index, node in enumerate(NODES):
            self.daemons.append(start_daemon(stack, saved / str(index)))
            self.launchers.append(stack.enter_context(Launcher(node)))
        for daemon in self.daemons:
            daemon.wait_ready()

    def start(self, scenario: str, **arguments: Any) -> None:
        """One stage on each node; they meet at the first."""
        self._port += 1
        run_dirs = [str(daemon.run_dir) for daemon in self.daemons]
        for rank, launcher in enumerate(self.launchers):
            address = f"{ADDRESSES[0]}:{self._port}"
            launcher.start(
                scenario, [rank], 2, address, run_dirs=run_dirs, interface=LINKS[rank], pipeline=2, **arguments
            )

    def results(self) -> list[Any]:
        return [rank for launcher in self.launchers for rank in launcher.results()]

    def committed(self) -> list[list[int]]:
        return [[session.committed_rows for session in daemon.stat().sessions] for daemon in self.daemons]

    def lose_the_link(self, network: Network, said: object, cut: Path) -> None:
        """Cut the link once both ranks have said ``said``, make the file ``cut``, and mend it when both have seen that.

        Returns when the daemons know that their workers are dead.
        """
        for rank, launcher in enumerate(self.launchers):
            launcher.wait_said(rank, said)
        network.cut()
        cut_at = time.monotonic()
        cut.touch()
        try:
            ends = [launcher.wait()[rank] for rank, launcher in enumerate(self.launchers)]
        finally:
            network.mend()
        for end in ends:
            assert end.error is not None, f"rank {end.number} came through: {end.result}"
            assert end.error["code"] == "peer_lost", end.error
            assert end.ended_at - cut_at < TIMEOUT_S + 30.0  # 30 s for a busy machine
        deadline = time.monotonic() + 30.0
        while any(daemon.stat().leases for daemon in self.daemons):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with ExitStack() as stack:
        made = TwoNodes(stack, tmp_path_factory.mktemp("saved"))
        yield made
        for daemon in made.daemons:
            assert daemon.stat().ledger == "balanced"


@pytest.fixture(scope="module")
def truth(nodes: TwoNodes) -> list[int]:
    run_dir = str(nodes.daemons[0].run_dir)
    nodes.launchers[0].start("alone", [0], 1, "none:0", run_dir=run_dir, length=LENGTH, count=2 * COUNT)
    [output] = nodes.launchers[0].results()
    assert len(set(output)) > 8, "an output of few distinct tokens shows nothing"
    return output


def test_two_nodes_give_the_tokens_of_one_process(nodes: TwoNodes, truth: list[int]) -> None:
    nodes.start("decodes", length=LENGTH, count=COUNT)
    for result in nodes.results():
        assert result["offloaded"] == truth[:COUNT]


def test_a_link_that_is_cut_amid_a_decode(network: Network, nodes: TwoNodes, truth: list[int], tmp_path: Path) -> None:
    nodes.start("begins", name="decode", length=LENGTH, count=300, timeout_s=TIMEOUT_S)
    nodes.lose_the_link(network, 10, tmp_path / "cut")
    common = min(rows for [rows] in nodes.committed())
    nodes.start("goes_on", name="decode", length=LENGTH, count=2 * COUNT)
    for result in nodes.results():
        assert result["rows"] == common
        assert result["output"] == truth
        assert result["logged"] > LENGTH + 10


def test_a_link_that_is_cut_amid_a_save(network: Network, nodes: TwoNodes, truth: list[int], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    nodes.start("begins_and_saves", name="save", length=LENGTH, count=COUNT, timeout_s=TIMEOUT_S, until=str(cut))
    nodes.lose_the_link(network, "saving", cut)
    nodes.start("goes_on", name="save", length=LENGTH, count=2 * COUNT)
    assert all(result["output"] == truth for result in nodes.results())
    nodes.start("goes_on", name="save", length=LENGTH, count=2 * COUNT, restored=True)
    results = nodes.results()
    for result in results:
        assert result["output"] == truth
        assert result["rows"] == results[0]["rows"] >= LENGTH + COUNT - 1
