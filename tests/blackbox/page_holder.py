"""A worker process that holds sessions with pages in extents of 4 MiB each, as a test tells it to.

Run as ``python -m tests.blackbox.page_holder RUN_DIR``: it opens, grows and closes sessions by lines on its standard
input, answers each with a line, and its death is that of a worker.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from compute.client import Client
from protocol.errors import KvdError
from protocol.messages import SessionOpened
from tests.blackbox.daemon_process import clean_environment
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.worker_process import COMMIT_BYTES, TOKEN_CAPACITY, publish

EXTENT = 4 << 20


class PageHolder:
    """The process. Its methods return what the daemon answered: ``ok``, or the code of an error."""

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, "-m", "tests.blackbox.page_holder", str(run_dir)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environment(), text=True
        )
        self.lease = int(self._say("lease"))

    def open(self, name: str, pages: int = 1) -> str:
        """Make a session with so many pages, each of which fills an extent, and one row committed if it has any."""
        return self._say(f"open {name} {pages}")

    def extend(self, name: str, pages: int = 1) -> str:
        return self._say(f"extend {name} {pages}")

    def close(self, name: str) -> str:
        return self._say(f"close {name}")

    def save(self, name: str) -> str:
        return self._say(f"save {name}")

    def _say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def _answer(client: Client, sessions: dict[str, SessionOpened], verb: str, *words: str) -> str:
    if verb == "lease":
        return str(client.lease.number)
    name, pages = words[0], int(words[1]) if len(words) > 1 else 0
    if verb == "open":
        sessions[name] = opened = client.create_session(
            name,
            fingerprint=FINGERPRINT,
            encoding="x",
            page_bytes=EXTENT,
            token_capacity=TOKEN_CAPACITY,
            commit_bytes=COMMIT_BYTES,
        )
        if pages:
            client.extend_session(opened.session, opened.generation, pages)
        publish(client.claim(opened.worker_block), opened, tokens=2, rows=min(pages, 1))
    elif verb == "extend":
        client.extend_session(sessions[name].session, sessions[name].generation, pages)
    elif verb == "save":
        client.save_session(name)
    else:
        client.close_session(sessions[name].session, sessions[name].generation)
    return "ok"


def main() -> None:
    with Client(Path(sys.argv[1]), name="page holder") as client:
        sessions: dict[str, SessionOpened] = {}
        for line in sys.stdin:
            try:
                answer = _answer(client, sessions, *line.split())
            except KvdError as error:
                answer = error.code
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
