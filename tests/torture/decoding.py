"""The other end of `tests.torture.decoding_process`: orders workers and keeps what they have shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.blackbox.daemon_process import clean_environment
from tests.torture.decoding_process import Order


class Decoders:
    """A server of workers. One works at a time; `read` goes on to its next line."""

    def __init__(self, run_dir: Path, setup: str = "cpu") -> None:
        command = [sys.executable, "-m", "tests.torture.decoding_process", str(run_dir), setup]
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**clean_environment(), **threads}
        )
        self.pid = 0
        self.tokens: list[int] = []
        """What the present worker has shown."""
        self.is_done = False
        self.error = ""
        self.saved = ""
        """The digest of what a worker has had saved last, until it is cleared."""

    def start(self, order: Order) -> None:
        """Have the next worker begin."""
        self.tokens, self.is_done, self.error, self.pid = [], False, "", 0
        assert self._process.stdin is not None
        self._process.stdin.write(order.line())
        self._process.stdin.flush()

    def read(self) -> bool:
        """Take in one line; False when the worker has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, f"the server of workers ended with status {self._process.poll()}"
        what, _, value = line.partition(" ")
        match what:
            case "pid":
                self.pid = int(value)
            case "t":
                self.tokens.append(int(value))
            case "saved":
                self.saved = value
            case "done":
                self.is_done = True
            case "error":
                self.error = value
        return what != "end"

    def lines(self) -> Iterator[None]:
        """Once for each line until the worker has ended."""
        while self.read():
            yield

    def run(self, order: Order) -> list[int]:
        """A whole worker; returns what it has shown."""
        self.start(order)
        for _ in self.lines():
            pass
        return self.tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
