"""Coverage-guided fuzzing of the daemon's request handling, with atheris (the extra ``fuzz``).

    python -m tests.fuzz.guided [CORPUS_DIR] [-runs=N] [-max_total_time=SECONDS] …

The daemon's own server answers in this process, without its sockets in between: an input is a conversation, of frames
that are taken as they are or with a lease and session that there are, so that they come past the first checks. Every
frame is answered by what can be read; no request may fail for another reason than a typed error; after every
conversation the books add up, and when its lease has ended all memory is back. Inputs that fail are written to the
working directory by libFuzzer; give such a file as the only argument to see it again.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import atheris
import msgspec
import structlog
import zmq

with atheris.instrument_imports(include=["kvd", "protocol"]):
    from kvd.config import load
    from kvd.leases import Lease
    from kvd.loop import Loop
    from kvd.node import BALANCED, Node
    from kvd.peers import Peer, Process, peer_of_socket
    from kvd.server import ControlServer
    from protocol import codec

from tests.fuzz.malformed import GOLDEN

REQUESTS = [bytes.fromhex(entry["hex"]) for entry in GOLDEN.values() if entry["socket"] == "control_request"]
MOST_FRAMES = 12
JOB_LIMIT_S = 30
_PACK = msgspec.msgpack.Encoder().encode
SETTINGS = {
    "device": "cpu",
    "host.capacity": "64MiB",
    "host.extent": "4MiB",
    "host.state_capacity": "32MiB",
    "vram.capacity": "64MiB",
    "limits.max_sessions": "4",
    "limits.max_handles": "8",
    "limits.max_leases": "4",
}


class Conversation:
    """One lease of this process on a real node, and the server that answers it."""

    def __init__(self, stack: ExitStack, folder: Path, prefix: str) -> None:
        config = load(
            {**SETTINGS, "run_dir": str(folder), "disk.state_dir": str(folder / "state")}, {}, Path(os.devnull)
        )
        self.failures: list[BaseException] = []
        self._identity = 0  # of the connection: each conversation has one of its own
        log = structlog.wrap_logger(None, processors=[self._listen])
        self.node = Node(config, prefix, log, lambda done, total: None)
        stack.callback(self.node.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        loop = Loop(log)
        self._server = ControlServer(
            folder / "kvd.sock", folder / "handles.sock", context, loop, self.node, config.files_needed, log
        )
        stack.callback(self._server.close)
        self._ends = [stack.enter_context(end) for end in socket.socketpair()]
        self.peer: Peer = peer_of_socket(self._ends[0])

    def _listen(self, _: object, method: str, event: structlog.typing.EventDict) -> str:
        """Keep what a request failed with: `ControlServer` answers even then, and says so in the log."""
        if method == "error":
            raised = event.get("exc_info")
            self.failures.append(raised if isinstance(raised, BaseException) else AssertionError(str(event)))
        raise structlog.DropEvent

    def hold(self, frames: list[tuple[bool, bytes]]) -> None:
        """Have ``frames`` answered, each as it is or with the names of things that there are; then end the lease."""
        self._identity += 1
        lease = self.node.open_lease(self.peer, Process(self._ends[0], self.peer), "fuzz")
        self._say(_PACK({"type": "hello", "seq": 1, "major": 1, "minor": 0, "client": "fuzz"}))
        for number, (named, frame) in enumerate(frames):
            self._say(self._named(frame, lease, number + 2) if named else frame)
            while self.node.jobs:
                assert select.select([self.node.jobs.wake], [], [], JOB_LIMIT_S)[0], "a job does not end"
                self.node.jobs.resume()
        assert self.node.check() == BALANCED, self.node.verdict
        self.node.lease_ended(lease)
        for session in list(self.node.sessions):
            self.node.sessions.end(session)
        assert self.node.check() == BALANCED, self.node.verdict
        left = [entry for entry in self.node.ledger.entries() if entry.account.lease == lease.number]
        assert not left, left

    def _say(self, frame: bytes) -> None:
        answer = self._server._answer(self._identity.to_bytes(5, "big"), self.peer, [frame])
        if self.failures:
            raise self.failures.pop()
        if answer is not None:
            assert isinstance(codec.decode_reply(answer), msgspec.Struct)

    def _named(self, frame: bytes, lease: Lease, seq: int) -> bytes:
        """``frame`` with a sequence number, lease and session that are right, if it is a map at all."""
        try:
            fields: Any = msgspec.msgpack.decode(frame)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return frame
        if not isinstance(fields, dict):
            return frame
        fields["seq"] = seq
        if "lease" in fields:
            fields["lease"] = {"epoch": self.node.leases.epoch, "number": lease.number}
        if sessions := list(self.node.sessions):
            if "session" in fields:
                fields["session"] = sessions[seq % len(sessions)].number
            if "generation" in fields:
                fields["generation"] = sessions[seq % len(sessions)].header.generation
        try:
            return _PACK(fields)
        except (TypeError, ValueError, OverflowError):
            return frame


def split(data: bytes) -> list[tuple[bool, bytes]]:
    """The frames of an input: a byte of flags, two of length, and the frame, again and again."""
    frames: list[tuple[bool, bytes]] = []
    at = 0
    while at + 3 <= len(data) and len(frames) < MOST_FRAMES:
        end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        frames.append((bool(data[at] & 1), data[at + 3 : end]))
        at = end
    return frames


def join(frames: list[tuple[bool, bytes]]) -> bytes:
    """The input that `split` makes ``frames`` of."""
    return b"".join(bytes([named]) + len(frame[:65535]).to_bytes(2, "big") + frame[:65535] for named, frame in frames)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Another conversation: frames of the protocol put in, taken out, moved, or changed byte by byte."""
    choice = random.Random(seed)
    frames = split(data)
    match choice.randrange(4) if frames else 0:
        case 0:
            frames.insert(choice.randint(0, len(frames)), (choice.random() < 0.9, choice.choice(REQUESTS)))
        case 1:
            del frames[choice.randrange(len(frames))]
        case 2:
            choice.shuffle(frames)
        case _:
            at = choice.randrange(len(frames))
            named, frame = frames[at]
            frames[at] = (named, atheris.Mutate(frame, max(len(frame) + 64, 64)))
    return join(frames[:MOST_FRAMES])[:max_size]


def seeds() -> Iterator[bytes]:
    """Conversations to begin with: every request alone, and after the one that makes a session."""
    [create] = [data for data in REQUESTS if msgspec.msgpack.decode(data)["type"] == "create_session"]
    for request in REQUESTS:
        yield join([(True, request)])
        yield join([(True, create), (True, request)])


def main() -> int:
    """Fuzz in a child, since libFuzzer ends its process without a word; what that leaves is removed here."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-fuzz-"))
    prefix = f"/kvd-fuzz-{folder.name}-"
    child = os.fork()
    if not child:
        fuzz(folder, prefix)
    _, status = os.waitpid(child, 0)
    shutil.rmtree(folder)
    for left in Path("/dev/shm").glob(f"{prefix[1:]}*"):
        left.unlink()
    return os.waitstatus_to_exitcode(status)


def fuzz(folder: Path, prefix: str) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    folders = [] if any(not word.startswith("-") for word in sys.argv[1:]) else [str(corpus)]
    with ExitStack() as stack:
        conversation = Conversation(stack, folder, prefix)
        atheris.Setup([*sys.argv, *folders], lambda data: conversation.hold(split(data)), custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
