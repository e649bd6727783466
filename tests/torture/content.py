"""All that a session is, read from shared memory by its names."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from kvd.run_dir import shm_prefix
from protocol.daemon_block import read_daemon_block
from protocol.session_state import (
    RECORDS_OFFSET,
    WorkerBlockLayout,
    read_worker_state,
    sampler_state_after,
    unpack_frame,
)

SHM = Path("/dev/shm")


def content_digest(run_dir: Path, session: int) -> str:
    """Of rows, tokens, commit payload, sampler state, and every byte of the pages with committed rows.

    Nobody may be writing to the session.
    """
    prefix = shm_prefix(run_dir)[1:]
    header, frames = read_daemon_block((SHM / f"{prefix}-session-{session}-daemon").read_bytes())
    layout = WorkerBlockLayout(header.token_capacity, header.commit_bytes)
    digest = xxhash.xxh3_128()
    with (SHM / f"{prefix}-session-{session}-worker").open("rb", buffering=0) as block:
        state = read_worker_state(block.fileno(), layout, session)
        digest.update(os.pread(block.fileno(), 4 * state.tokens, layout.log_offset))
        digest.update(sampler_state_after(state.tokens, os.pread(block.fileno(), RECORDS_OFFSET, 0)))
    digest.update(state.commit.payload + state.commit.rows.to_bytes(8, "little"))
    for extent, index in map(unpack_frame, frames[: -(-state.commit.rows // 64)]):
        with (SHM / f"{prefix}-e{extent}").open("rb", buffering=0) as segment:
            digest.update(os.pread(segment.fileno(), header.page_stride, index * header.page_stride))
    return digest.hexdigest()
