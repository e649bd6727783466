"""A server on shards: every request has the tokens that it gets alone, and all ranks do the same."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.parallel.launcher import SEEN_S, Launcher, free_address
from tests.parallel.test_command import close

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.torture)])
def test_requests_that_come_at_any_time(launcher: Launcher, daemon: DaemonProcess, seed: int) -> None:
    where = {"run_dirs": [str(daemon.run_dir)], "tensor": 2, "mtp": 2}
    launcher.start("chats", [0, 1], 2, free_address(), **where)
    chats = launcher.results()
    launcher.start("serves", [0, 1], 2, free_address(), seed=seed, **where)
    first, second = launcher.results()
    assert first["lacking"].startswith("rank 1: "), first["lacking"]
    assert first["got"] == first["expected"] == second["expected"]
    assert len({token for tokens in first["got"] for token in tokens}) > 20
    assert first["reasons"] == ["length"] * 6 + ["cancelled", "stop"]
    assert len(first["stopped"]) == 3
    assert first["refused"] == "ContextExceeded"
    assert [[*first["chat"], first["again"][0]]] * 2 == chats
    assert first["again"][1] == 128, "two pages of another history are its own, too"
    assert first["cached"] >= 40
    assert [result["depths"] for result in (first, second)] == [[0, 2]] * 2
    assert all(result["held as before"] for result in (first, second))
    assert daemon.stat().sessions == []


class Served:
    """The command on two ranks."""

    def __init__(self, launcher: Launcher, daemon: DaemonProcess, *others: str) -> None:
        self._launcher, self.address = launcher, free_address()
        arguments = ["--run-dir", str(daemon.run_dir), "--listen", self.address, "--tensor-parallel", "2", *others]
        launcher.start("served", [0, 1], 2, free_address(), arguments=arguments)
        deadline = time.monotonic() + SEEN_S
        while True:
            try:
                assert self.ask("GET", "/v1/models")[0] == 200
                return
            except OSError:
                assert time.monotonic() < deadline
                assert not launcher.ranks[0].ended, launcher.ranks
                time.sleep(0.05)

    def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        return reply.status, json.loads(data or b"null")

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self._launcher.ranks[rank].pid, number)


def test_the_command_serves_and_ends(launcher: Launcher, daemon: DaemonProcess) -> None:
    """All ranks get the signal, and the others wait for rank 0's end."""
    served = Served(launcher, daemon)
    status, reply = served.ask(
        "POST", "/v1/completions", model="demo", prompt="Ranks are", max_tokens=5, session="kept"
    )
    assert status == 200, reply
    assert reply["usage"]["completion_tokens"] == 5
    served.signal(signal.SIGTERM, 1, 0)
    assert launcher.results() == [0, 0]
    [kept] = daemon.stat().sessions
    assert kept.name == "kept"
    close(daemon, "kept")


def test_what_is_under_way_is_answered_before_the_end(launcher: Launcher, daemon: DaemonProcess) -> None:
    """All ranks get the signal in the middle of an answer."""
    served = Served(launcher, daemon)
    asked = {"model": "demo", "prompt": "Ranks are", "max_tokens": 60}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(served.ask, "POST", "/v1/completions", **asked)
        while not served.ask("GET", "/status")[1]["tokens"]:
            time.sleep(0.01)
        served.signal(signal.SIGTERM, 0, 1)
        assert not answer.done(), "it was answered before the signal"
        status, reply = answer.result()
    assert status == 200, reply
    assert reply["usage"]["completion_tokens"] == 60
    assert launcher.results() == [0, 0]
    assert daemon.stat().sessions == []


def test_a_lost_shard_ends_the_server(launcher: Launcher, daemon: DaemonProcess) -> None:
    """In the middle of an answer, which ends with an error."""
    served = Served(launcher, daemon, "--peer-timeout", "200")
    asked = {"model": "demo", "prompt": "Ranks are", "max_tokens": 4000, "session": "kept"}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(served.ask, "POST", "/v1/completions", **asked)
        while not served.ask("GET", "/status")[1]["tokens"]:
            time.sleep(0.01)
        lost_at = time.monotonic()
        served.signal(signal.SIGKILL, 1)
        status, reply = answer.result()
    assert (status, reply["error"]["code"]) == (503, "peer_lost"), reply
    ended = launcher.wait()[0]
    assert ended.result == 69
    assert ended.ended_at - lost_at < SEEN_S
    [kept] = daemon.stat().sessions
    assert kept.name == "kept"
    close(daemon, "kept")
