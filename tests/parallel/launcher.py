"""Ranks as processes, started in a fraction of a second: a launcher that has imported everything forks them.

`Launcher` runs ``python -m tests.parallel.launcher``, in a network namespace if one is given. A rank runs a function of
`tests.parallel.scenarios` (`grid_scenarios`, `serving_scenarios`) and prints JSON lines: what it says on its way, and
what came of it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from protocol.errors import KvdError
from tests.blackbox.daemon_process import clean_environment

READY_S = RESULT_S = 250.0
"""For a busy machine."""
SEEN_S = 90.0
"""A death is seen at once, and not when `PATIENT_S` is over; the rest is for a busy machine."""
PATIENT_S = 200.0
"""The time-out of ranks that are to see a death."""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@dataclass
class Rank:
    """A rank's process: ``said`` on its way, and in the end ``result``, or ``error`` with its code."""

    number: int
    pid: int
    said: list[Any] = field(default_factory=list)
    result: Any = None
    error: dict[str, Any] | None = None
    ended: bool = False
    ended_at: float = 0.0

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # its end has not been heard of yet
            os.kill(self.pid, signal.SIGKILL)


class Launcher:
    """Starts ranks of one node. Use it as a context: it ends them."""

    def __init__(self, namespace: str = "") -> None:
        prefix = ["ip", "netns", "exec", namespace] if namespace else []
        environment = clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.parallel.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        self._lines = selectors.DefaultSelector()
        self._lines.register(self._process.stdout, selectors.EVENT_READ)
        self._rest = b""
        self.ranks: dict[int, Rank] = {}
        self._ready = False
        self._run = 0

    def start(self, scenario: str, numbers: Sequence[int], world: int, address: str, **arguments: Any) -> None:
        """Start ranks ``numbers`` of ``world``, which meet at ``address``, a host and a port."""
        assert self._process.stdin is not None
        self._wait_until(lambda: self._ready, READY_S)
        self._kill()  # those of a test that failed
        self._run += 1
        self.ranks = {}
        order = {
            "run": self._run,
            "scenario": scenario,
            "ranks": list(numbers),
            "world": world,
            "address": address,
            "arguments": arguments,
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        self._wait_until(lambda: len(self.ranks) == len(numbers), READY_S)

    def wait_said(self, rank: int, what: Any) -> None:
        """Return when ``rank`` has said ``what``."""
        found = self.ranks[rank]
        self._wait_until(lambda: what in found.said or found.ended, RESULT_S)
        assert what in found.said, f"rank {rank} ended: {found}"

    def wait(self, timeout_s: float = RESULT_S) -> dict[int, Rank]:
        """All ranks, ended."""
        self._wait_until(lambda: all(rank.ended for rank in self.ranks.values()), timeout_s)
        return self.ranks

    def results(self) -> list[Any]:
        """What all ranks came to, none of them an error."""
        ranks = self.wait()
        assert all(rank.error is None for rank in ranks.values()), [rank.error for rank in ranks.values()]
        return [ranks[number].result for number in sorted(ranks)]

    def lose(self, victim: int, after: int, by: signal.Signals = signal.SIGKILL) -> int:
        """Send ``by`` to rank ``victim`` of two once the other has said ``after`` of `scenarios.begins`, and sees that.

        Returns how many tokens rank 0 has said: those that clients have seen.
        """
        lost, survivor = self.ranks[victim], self.ranks[1 - victim]
        self.wait_said(survivor.number, after)
        lost_at = time.monotonic()
        os.kill(lost.pid, by)
        self._wait_until(lambda: survivor.ended, RESULT_S)
        self._kill()  # one that was stopped is still there
        self.wait()
        assert survivor.error is not None, f"rank {survivor.number} came through: {survivor.result}"
        assert survivor.error["code"] == "peer_lost", survivor.error
        seconds = survivor.ended_at - lost_at
        assert seconds < SEEN_S, f"rank {survivor.number} ended {seconds:.1f} s after the death, on {survivor.error}"
        return len(self.ranks[0].said)

    def refusals(self) -> list[str]:
        """The code and message of the error that each rank ended on."""
        errors = [rank.error for _, rank in sorted(self.wait().items())]
        assert all(errors), self.ranks
        return [f"{error['code']}: {error['message']}" for error in errors if error]

    def _wait_until(self, condition: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"nothing after {timeout_s} s: {self.ranks}"
            for _ in self._lines.select(left):
                data = os.read(self._lines_fd, 1 << 16)
                assert data, f"the launcher ended with status {self._process.wait()}"
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    @property
    def _lines_fd(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _take(self, fact: dict[str, Any]) -> None:
        if fact["kind"] == "ready":
            self._ready = True
        elif fact["run"] != self._run:
            return
        elif fact["kind"] == "started":
            self.ranks[fact["rank"]] = Rank(fact["rank"], fact["pid"])
        else:
            rank = self.ranks[fact["rank"]]
            if fact["kind"] == "said":
                rank.said.append(fact["what"])
            elif fact["kind"] == "ended":
                rank.ended, rank.ended_at = True, time.monotonic()
            else:
                rank.result, rank.error = fact.get("result"), fact.get("error")

    def __enter__(self) -> Self:
        return self

    def _kill(self) -> None:
        for rank in self.ranks.values():
            if not rank.ended:
                rank.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()
        self._process.kill()
        self._process.wait()
        self._lines.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


# The process


def say(**fact: Any) -> None:
    """One line, whole, whoever else writes to the pipe: they are short."""
    os.write(1, json.dumps(fact).encode() + b"\n")


def _serve() -> None:
    from tests.parallel import grid_scenarios, scenarios, serving_scenarios

    known: dict[str, Any] = {}
    for module in (scenarios, grid_scenarios, serving_scenarios):
        own = {
            name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        assert not known.keys() & own.keys(), f"two scenarios of one name: {known.keys() & own.keys()}"
        known |= own
    say(kind="ready")
    running: dict[int, dict[str, int]] = {}
    poll = selectors.DefaultSelector()
    poll.register(0, selectors.EVENT_READ)
    rest = b""
    while True:
        for _ in poll.select(0.01):
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                for rank in order["ranks"]:
                    pid = os.fork()
                    if not pid:
                        _be(rank, order, known[order["scenario"]])
                    running[pid] = {"run": order["run"], "rank": rank}
                    say(kind="started", pid=pid, **running[pid])
        for pid in [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]]:
            say(kind="ended", **running.pop(pid))


def _be(rank: int, order: dict[str, Any], scenario: Any) -> None:
    """Be a rank; does not return."""
    host, port = order["address"].rsplit(":", 1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(order["world"]),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    this: dict[str, Any] = {"run": order["run"], "rank": rank}
    try:
        result = scenario(rank, lambda what: say(kind="said", what=what, **this), **order["arguments"])
        say(kind="result", result=result, **this)
    except KvdError as error:
        say(kind="result", error={"code": error.code, "message": error.message}, **this)
    except BaseException as error:  # noqa: BLE001 - the test is told
        traceback.print_exc()
        say(kind="result", error={"code": type(error).__name__, "message": str(error)[:500]}, **this)
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    _serve()
