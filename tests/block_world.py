"""A node without sockets whose block verbs are called directly, and whose frames are read and written as a worker does.

A world can lose its daemon by `kill`: what lies in shared memory stays, and `start` makes the next one of it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import select
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from kvd.config import load
from kvd.leases import Lease
from kvd.node import BALANCED, Node
from kvd.peers import Peer, Process
from kvd.tiers.segment import existing_names, remove_segment
from protocol import messages
from protocol.block_messages import NO_FRAME, NO_LEASE
from protocol.handles import LeaseRef

MIB = 1 << 20
BLOCK = 4096
FINGERPRINT = bytes(range(32))
_numbers = itertools.count()


def key(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def chain(name: object, count: int) -> list[bytes]:
    return [key((name, index)) for index in range(count)]


def content(of: bytes, nbytes: int = BLOCK) -> bytes:
    return (of * (nbytes // 32 + 1))[:nbytes]


class User:
    """A lease of ``uid`` and of the process ``pid``, in whose name blocks are asked for."""

    def __init__(
        self, world: World, uid: int, block_bytes: int, fingerprint: bytes, previous: LeaseRef, pid: int
    ) -> None:
        self.world = world
        self.block_bytes = block_bytes
        process = Process._living(pid, _start_of(pid))
        assert process is not None
        self.lease: Lease = world.node.open_lease(Peer(uid, uid, pid), process, "test")
        self.ref = world.node.leases.reference(self.lease)
        request = messages.OpenBlocks(1, self.ref, fingerprint, block_bytes, previous)
        self.opened = world.node.blocks.open(self.lease, request)
        self.space = self.opened.space

    def find(self, keys: Sequence[bytes]) -> int:
        return self.found(keys).count

    def found(self, keys: Sequence[bytes]) -> messages.BlocksFound:
        return self.world.node.blocks.find(self.lease, messages.FindBlocks(1, self.ref, self.space, b"".join(keys)))

    def pin(self, keys: Sequence[bytes], from_disk: int = 0) -> tuple[int, list[int]]:
        """The hold, and the frames."""
        request = messages.PinBlocks(1, self.ref, self.space, b"".join(keys), from_disk)
        answer = self.world.node.blocks.pin(self.lease, request, lambda: self.lease)
        reply = self.world.run(answer) if isinstance(answer, Generator) else answer
        return reply.hold, _frames(reply.frames)

    def reserve(self, keys: Sequence[bytes]) -> tuple[int, dict[bytes, int]]:
        """The hold, and the frame of each key that was given one."""
        request = messages.ReserveBlocks(1, self.ref, self.space, b"".join(keys))
        reply = self.world.node.blocks.reserve(self.lease, request)
        frames = _frames(reply.frames)
        return reply.hold, {key: frame for key, frame in zip(keys, frames, strict=True) if frame != NO_FRAME}

    def publish(self, hold: int, keys: Sequence[bytes] = ()) -> None:
        self.world.node.blocks.publish(self.lease, messages.PublishBlocks(1, self.ref, hold, b"".join(keys)))

    def release(self, hold: int) -> None:
        self.world.node.blocks.release(self.lease, messages.ReleaseBlocks(1, self.ref, hold))

    def put(self, keys: Sequence[bytes]) -> list[bytes]:
        hold, given = self.reserve(keys)
        for each, frame in given.items():
            self.write(frame, content(each, self.block_bytes))
        if given:
            self.publish(hold)
        return list(given)

    def get(self, keys: Sequence[bytes], from_disk: int = 0) -> int:
        """How many of the first keys can be had, all of them with the right bytes."""
        hold, frames = self.pin(keys, from_disk)
        for each, frame in zip(keys, frames, strict=False):
            assert self.read(frame) == content(each, self.block_bytes)
        if hold:
            self.release(hold)
        return len(frames)

    def read(self, frame: int) -> bytes:
        return os.pread(self._fd(frame), self.block_bytes, self._offset(frame))

    def write(self, frame: int, data: bytes) -> None:
        assert os.pwrite(self._fd(frame), data, self._offset(frame)) == len(data)

    def die(self) -> None:
        """The process of the lease is dead."""
        self.world.node.lease_ended(self.lease)

    def disconnect(self) -> bool:
        """The connection ends; returns whether the lease does."""
        return self.world.node.lease_disconnected(self.lease)

    def _fd(self, frame: int) -> int:
        return self.world.node.host.fileno(frame >> 32)

    def _offset(self, frame: int) -> int:
        return (frame & 0xFFFFFFFF) * self.opened.stride


class World:
    """A node of small sizes; ``settings`` change them."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.prefix = f"/kvd-blocks-test-{os.getpid()}-{next(_numbers)}"
        self.settings = {"run_dir": str(folder), "device": "cpu", "vram.capacity": "2MiB", "host.extent": "2MiB"}
        self.settings |= {"host.capacity": "8MiB"} | {
            name.replace("__", "."): value for name, value in settings.items()
        }
        self.log = structlog.testing.CapturingLogger()
        self.children: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        log = structlog.wrap_logger(self.log, processors=[])
        self.node = Node(load(self.settings, {}, Path("/dev/null")), self.prefix, log, lambda _done, _total: None)
        self.node.retire = self.node.lease_ended

    def limit(self, **settings: str) -> None:
        """Change settings of the running node."""
        self.settings |= {name.replace("__", "."): value for name, value in settings.items()}
        self.node.limit(load(self.settings, {}, Path("/dev/null")))

    def user(
        self,
        uid: int = 1000,
        block_bytes: int = BLOCK,
        fingerprint: bytes = FINGERPRINT,
        previous: LeaseRef = NO_LEASE,
        pid: int = 0,
    ) -> User:
        return User(self, uid, block_bytes, fingerprint, previous, pid or os.getpid())

    def child(self) -> int:
        """The pid of a process that lives until it is killed."""
        self.children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return self.children[-1].pid

    def kill(self) -> None:
        """The daemon is gone, as by SIGKILL; everything in shared memory is as it was."""
        node = self.node
        node.jobs.close()
        node.block_spilling.close()
        if node.copies is not None:
            node.copies.close()
        for lease in node.leases:
            lease.process.close()
            if lease.report is not None:
                lease.report.close()
        for extent in node.host._extents:
            if extent.segment is not None:
                extent.segment.close()
        if node.spaces._table is not None:
            node.spaces._table.close()

    def run(self, job: Generator[Any, Any, Any]) -> Any:
        """What a job comes to."""
        outcome: list[Any] = []
        self.node.jobs.start(job, outcome.append)
        self.settle(lambda: bool(outcome))
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def spill(self) -> None:
        """Have the cold blocks spilled that are to be."""
        self.settle()
        self.node.block_spilling._not_before = 0.0
        self.node.block_spilling.look()
        self.settle()

    def settle(self, done: Any = None) -> None:
        """Run the jobs until there are none, or ``done``."""
        while len(self.node.jobs) and not (done and done()):
            if select.select([self.node.jobs.wake], [], [], 10)[0]:
                self.node.jobs.resume()

    def check(self) -> None:
        """The books balance, and the table, its index and the tier say the same."""
        node = self.node
        assert node.check() == BALANCED
        if node.spaces._table is None:
            return
        table, frames = node.spaces.table, set[int]()
        for kind in node.spaces.room.kinds.values():
            spaces = [space for space in node.spaces if space.kind is kind]
            assert kind.stored == sum(len(space.stored) for space in spaces)
            assert kind.pinned == sum(space.pinned for space in spaces)
            assert kind.reserved == sum(len(space.writing) for space in spaces)
        used = 0
        for space in node.spaces:
            for each, slot in [*space.stored.items(), *space.writing.items()]:
                assert table.key(slot) == each
                assert table.spaces[slot] == space.number
                assert table.live[slot] == (space.number if each in space.stored else 0)
                assert (table.verified(slot) == -1) == (each in space.stored)
                assert node.host.is_in_use(table.frames[slot])
                frames.add(table.frames[slot])
                used += 1
            assert space.pinned == sum(1 for slot in space.stored.values() if table.pins[slot])
        assert len(frames) == used
        assert used + len(table._free) == table.slots
        by_extent: defaultdict[int, set[int]] = defaultdict(set)
        for space in node.spaces:
            for slot in [*space.stored.values(), *space.writing.values()]:
                by_extent[table.frames[slot] >> 32].add(slot)
        assert node.spaces.room._extents == by_extent
        purposes = node.ledger.purposes("host")
        committed = purposes["blocks"].committed if "blocks" in purposes else 0
        assert committed == node.spaces.room.nbytes()

    def close(self) -> None:
        self.node.close()
        for process in self.children:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as stack:
            stack.callback(_remove, self.prefix)
            stack.callback(self.close)


def _remove(prefix: str) -> None:
    """What a world that failed has left."""
    for name in existing_names(prefix):
        remove_segment(name)


def _frames(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def _start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
