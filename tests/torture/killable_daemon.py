"""The daemon, which kills itself at one point: ``python -m tests.torture.killable_daemon POINT NTH run …``."""

from __future__ import annotations

import os
import sys
from typing import Any

from kvd import cli
from kvd.saved import file as saved_file
from kvd.sessions import blocks as session_blocks
from kvd.sessions.blocks import SessionBlocks
from kvd.sessions.inheritance import Inheritance
from kvd.sessions.registry import Sessions
from kvd.shared_memory import SharedMemoryGranter
from kvd.tiers.disk import StateDirectory
from kvd.tiers.host_ram import HostRam
from kvd.tiers.segment import Segment
from protocol.daemon_block import FIRST_COPY, SEQUENCE_OFFSET
from tests.torture.decoding_process import Killer

VERBS = ("create", "open", "extend", "truncate", "close")
POINTS = (
    *(f"{when} {verb}" for verb in VERBS for when in ("before", "after")),
    "amid a copy",
    "before the switch",
    "after the switch",
    "block written",
    "segment made",
    "segment destroyed",
    "frames given",
    "frames back",
    "granted",
    "taken up",
    "reattached",
    "room made",
    "file begun",
    "chunk written",
    "file written",
    "before the rename",
    "after the rename",
    "synced",
)
"""Where the daemon can kill itself: in its verbs, amid the writing of a block and of a file, and as it starts."""


def install(killer: Killer) -> None:
    for verb in VERBS:
        killer.around(Sessions, verb, before=f"before {verb}", after=f"after {verb}")
    killer.around(SessionBlocks, "write", after="block written")
    killer.around(Segment, "__init__", after="segment made")
    killer.around(Segment, "destroy", after="segment destroyed")
    killer.around(HostRam, "allocate_frames", after="frames given")
    killer.around(HostRam, "free_frames", after="frames back")
    killer.around(SharedMemoryGranter, "extents", after="granted")
    killer.around(Inheritance, "_adopt", after="taken up")
    killer.around(Inheritance, "reattach", after="reattached")
    killer.around(StateDirectory, "_make_room", after="room made")
    killer.around(saved_file, "write", before="file begun", after="file written")
    killer.around(saved_file, "_write", after="chunk written")
    killer.around(os, "rename", before="before the rename", after="after the rename")
    killer.around(os, "fsync", after="synced")
    write: Any = session_blocks._write

    def torn(fd: int, offset: int, data: bytes | memoryview) -> None:
        if offset >= FIRST_COPY and killer.is_next("amid a copy"):
            os.pwrite(fd, data[: len(data) // 2], offset)
        if offset >= FIRST_COPY:
            killer.at("amid a copy")
        if offset == SEQUENCE_OFFSET:
            killer.at("before the switch")
        write(fd, offset, data)
        if offset == SEQUENCE_OFFSET:
            killer.at("after the switch")

    session_blocks._write = torn


if __name__ == "__main__":
    install(Killer(sys.argv[1], int(sys.argv[2])))
    sys.exit(cli.main(sys.argv[3:]))
