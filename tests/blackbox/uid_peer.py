"""A peer of another uid: a child process that sends whatever it is told to, and passes back what it is answered.

Run as ``python -m tests.blackbox.uid_peer RUN_DIR UID``; a line of hexadecimal in is a message, one out the reply.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from protocol import codec
from protocol.handles import LeaseRef
from protocol.messages import HandleReply, HandleRequest, Reply, Request
from tests.blackbox.daemon_process import clean_environment
from tests.blackbox.raw import RawPeer


class UidPeer:
    """The process; it has said hello and opened a lease. Descriptors that it is sent it closes after ``read``."""

    def __init__(self, run_dir: Path, uid: int) -> None:
        command = [sys.executable, "-m", "tests.blackbox.uid_peer", str(run_dir), str(uid)]
        self.uid = uid
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
        )
        self._seq = 1
        self.lease = LeaseRef(*(int(word) for word in self._read().split()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def ask(self, request: Request) -> Reply:
        return codec.decode_reply(bytes.fromhex(self._exchange("control", msgspec.msgpack.encode(request))))

    def ask_handle(self, request: HandleRequest) -> tuple[HandleReply, bool]:
        """The reply, and whether a descriptor came with it."""
        reply, descriptors = self._exchange("handle", msgspec.msgpack.encode(request)).split()
        return codec.decode_handle_reply(bytes.fromhex(reply)), descriptors != "0"

    def _exchange(self, socket_name: str, data: bytes) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{socket_name} {data.hex()}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer of uid {self.uid} ended with status {self._process.wait()}"
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    run_dir, uid = Path(sys.argv[1]), int(sys.argv[2])
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    with RawPeer(run_dir) as peer:
        sys.stdout.write(f"{peer.lease.epoch} {peer.lease.number}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            socket_name, _, data = line.strip().partition(" ")
            if socket_name == "control":
                peer.control.send(bytes.fromhex(data))
                answer = peer.control.recv().hex()
            else:
                reply, descriptors = peer.send_packet(bytes.fromhex(data))
                answer = f"{msgspec.msgpack.encode(reply).hex()} {len(descriptors)}"
                for descriptor in descriptors:
                    os.close(descriptor)
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
