"""A session's state blocks: whole at every point of a kill, and typed damage for everything that is not intact."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidValue, SessionDamaged
from protocol.session_state import (
    COUNTER_NAMES,
    NO_COMMIT,
    SAMPLER_BYTES,
    Commit,
    SessionHeader,
    WorkerBlock,
    WorkerBlockLayout,
    WorkerState,
    pack_daemon_copy,
    pack_frame,
    read_worker_state,
    unpack_daemon_copy,
    unpack_frame,
)

LAYOUT = WorkerBlockLayout(token_capacity=300, commit_bytes=50)
SESSION = 9
HEADER = SessionHeader(
    epoch=1,
    session=SESSION,
    generation=3,
    uid=1000,
    holder_pid=77,
    holder_start=88,
    page_bytes=5000,
    page_stride=8192,
    extent_bytes=1 << 20,
    token_capacity=300,
    page_count=4,
    commit_bytes=50,
    encoding="q8g64",
    fingerprint=b"f" * 32,
    name="notes",
)
FRAMES = tuple(pack_frame(2, index) for index in range(4))
DAEMON_BLOCK = pack_daemon_copy(HEADER, FRAMES)


def new_buffer() -> bytearray:
    buffer = bytearray(LAYOUT.block_bytes)
    header = LAYOUT.pack_header(SESSION)
    buffer[: len(header)] = header
    return buffer


def worker_block(buffer: bytearray) -> WorkerBlock:
    return WorkerBlock(memoryview(buffer), LAYOUT, SESSION)


class RecordingView:
    """A memoryview that keeps the buffer's state before and after every store, and amid it at every byte.

    An aligned 8-byte word is one store: the processor does not tear it.
    """

    def __init__(self, view: memoryview, buffer: bytearray, states: list[bytes]) -> None:
        self.view = view
        self.buffer = buffer
        self.states = states

    def __getitem__(self, key):
        return self.view[key]

    def __setitem__(self, key, value):
        before = bytes(self.buffer)
        self.view[key] = value
        after = bytes(self.buffer)
        changed = [at for at in range(len(before)) if before[at] != after[at]]
        self.states.append(before)
        if not isinstance(key, int):
            self.states.extend(after[:at] + before[at:] for at in changed)
        self.states.append(after)


def states_of_a_kill(buffer: bytearray, act: Callable[[WorkerBlock], None]) -> list[bytes]:
    """Every state that a kill during ``act`` can leave behind."""
    states: list[bytes] = []
    block = worker_block(buffer)
    for name in ("_bytes", "_words", "_log"):
        setattr(block, name, RecordingView(getattr(block, name), buffer, states))
    act(block)
    return states


def test_a_new_block_has_nothing():
    block = worker_block(new_buffer())
    assert (block.commit, block.token_count, block.tokens(), block.sampler_state) == (NO_COMMIT, 0, [], b"")


@pytest.mark.parametrize("earlier", [0, 1, 2, 5])
@pytest.mark.parametrize("payload", [b"", b"new", bytes(range(50))])
def test_a_commit_is_switched_whole(earlier, payload):
    buffer = new_buffer()
    block = worker_block(buffer)
    for rows in range(1, earlier + 1):
        block.publish_commit(1, rows, b"old payload that is longer than new"[: 10 + rows])
    old = block.commit
    new = Commit(earlier + 1, 2, 64, payload)
    states = states_of_a_kill(buffer, lambda live: live.publish_commit(2, 64, payload))
    seen = [worker_block(bytearray(state)).commit for state in states]
    switch = seen.index(new)
    assert seen == [old] * switch + [new] * (len(seen) - switch)
    assert len(states) > 8


@pytest.mark.parametrize("sampler", [b"", b"after the second", bytes(SAMPLER_BYTES)])
def test_tokens_and_sampler_state_are_switched_together(sampler):
    buffer = new_buffer()
    block = worker_block(buffer)
    block.append_tokens([1], b"after none")
    block.append_tokens([2, 3], b"after the first")
    states = states_of_a_kill(buffer, lambda live: live.append_tokens([4, 5, 6], sampler))
    seen = [(left.tokens(), left.sampler_state) for left in (worker_block(bytearray(state)) for state in states)]
    old, new = ([1, 2, 3], b"after the first"), ([1, 2, 3, 4, 5, 6], sampler)
    switch = seen.index(new)
    assert seen == [old] * switch + [new] * (len(seen) - switch)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 3), st.binary(max_size=20)),
            st.tuples(st.just("truncate"), st.integers(0, 8), st.just(b"")),
        ),
        max_size=12,
    )
)
def test_log_and_sampler_state_against_a_model(actions):
    buffer = new_buffer()
    tokens: list[int] = []
    state: bytes | None = b""
    written = 0
    for verb, count, data in actions:
        block = worker_block(buffer)
        if verb == "append":
            new = list(range(written, written + count))
            written += count
            states = states_of_a_kill(buffer, partial(WorkerBlock.append_tokens, ids=new, sampler_state=data))
            after = (tokens + new, data)
            for left in states[:: max(1, len(states) // 16)]:
                found = worker_block(bytearray(left))
                assert (found.tokens(), found.sampler_state) in [(tokens, found.sampler_state), after]
                if state is not None and count:
                    assert (found.tokens(), found.sampler_state) in [(tokens, state), after]
            tokens, state = after
        elif count <= len(tokens):
            block.truncate_tokens(count)
            # The state after an earlier token may still be there; then it is the right one, which is not tracked here.
            state = state if count == len(tokens) else None
            tokens = tokens[:count]
        block = worker_block(buffer)
        assert block.tokens() == tokens
        if state is not None:
            assert block.sampler_state == state


def test_a_truncated_log_never_shows_another_branchs_sampler_state():
    block = worker_block(new_buffer())
    block.append_tokens([1, 2], b"two")
    block.append_tokens([3], b"three")
    block.truncate_tokens(1)
    assert block.sampler_state == b""
    block.append_tokens([7])
    assert block.sampler_state == b""
    block.append_tokens([8], b"other three")
    assert (block.tokens(), block.sampler_state) == ([1, 7, 8], b"other three")


def test_limits_of_a_worker_block():
    block = worker_block(new_buffer())
    block.append_tokens(range(300), bytes(SAMPLER_BYTES))
    block.publish_commit(1, 300, bytes(50))
    buffer_before = (block.tokens(), block.commit, block.sampler_state)
    refused: list[Callable[[], None]] = [
        lambda: block.append_tokens([1]),
        lambda: block.append_tokens([], bytes(SAMPLER_BYTES + 1)),
        lambda: block.publish_commit(1, 300, bytes(51)),
        lambda: block.publish_commit(1, 301),
        lambda: block.publish_commit(1, -1),
        lambda: block.truncate_tokens(301),
        lambda: block.truncate_tokens(-1),
    ]
    for act in refused:
        with pytest.raises(InvalidValue):
            act()
    assert (block.tokens(), block.commit, block.sampler_state) == buffer_before
    assert block.tokens(298) == [298, 299]
    assert block.tokens(10, 12) == [10, 11]


@pytest.mark.parametrize(
    "layout", [WorkerBlockLayout(0, 0), WorkerBlockLayout(1, 1), WorkerBlockLayout(1 << 20, 24_576)], ids=str
)
def test_parts_of_a_worker_block_do_not_overlap(layout):
    assert layout.record_stride >= 40 + layout.commit_bytes
    assert layout.log_offset >= 4096 + 2 * layout.record_stride
    assert layout.block_bytes >= layout.log_offset + 4 * layout.token_capacity
    assert layout.record_stride % 64 == layout.log_offset % 4096 == layout.block_bytes % 4096 == 0


@given(st.integers(0, 55), st.integers(1, 255))
def test_a_worker_refuses_another_header(at, flip):
    buffer = new_buffer()
    buffer[at] ^= flip
    with pytest.raises(SessionDamaged):
        worker_block(buffer)


def test_a_worker_refuses_a_short_block():
    with pytest.raises(SessionDamaged):
        WorkerBlock(memoryview(new_buffer())[:-1], LAYOUT, SESSION)
    with pytest.raises(SessionDamaged):
        WorkerBlock(memoryview(new_buffer()), LAYOUT, SESSION + 1)


# The daemon's reading


@pytest.fixture
def segment() -> Iterator[int]:
    buffer = new_buffer()
    block = worker_block(buffer)
    block.append_tokens(range(200))
    block.logical_rows = 199
    block.publish_commit(3, 128, b"hidden")
    block.publish_counters([1, 2, 3, 4, 5, 6])
    fd = os.memfd_create("worker block")
    os.pwrite(fd, buffer, 0)
    yield fd
    os.close(fd)


def test_the_daemon_reads_what_the_worker_published(segment):
    counters = dict(zip(COUNTER_NAMES, range(1, 7), strict=True))
    assert read_worker_state(segment, LAYOUT, SESSION) == WorkerState(200, 199, Commit(1, 3, 128, b"hidden"), counters)


@given(st.integers(0, LAYOUT.block_bytes - 1))
def test_case_25_a_cut_segment_is_damage(size):
    fd = os.memfd_create("cut")
    try:
        os.pwrite(fd, new_buffer(), 0)
        os.ftruncate(fd, size)
        with pytest.raises(SessionDamaged):
            read_worker_state(fd, LAYOUT, SESSION)
    finally:
        os.close(fd)


def test_case_25_a_segment_cut_while_it_is_read_is_damage(segment, monkeypatch):
    real = os.pread

    def cutting(fd: int, size: int, offset: int) -> bytes:
        data = real(fd, size, offset)
        if offset == 0:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, LAYOUT.block_bytes)
        return data

    monkeypatch.setattr(os, "pread", cutting)
    with pytest.raises(SessionDamaged):
        read_worker_state(segment, LAYOUT, SESSION)


@given(data=st.data())
def test_whatever_a_worker_writes_is_a_state_within_limits_or_damage(data):
    buffer = new_buffer()
    worker_block(buffer).publish_commit(1, 5, b"x")
    for offset in data.draw(st.lists(st.sampled_from([0, 8, 24, 512, 576, 640, 704, 1024, 4096, 4112, 4120, 4224]))):
        buffer[offset : offset + 8] = data.draw(st.one_of(st.binary(min_size=8, max_size=8), st.just(bytes(8))))
    fd = os.memfd_create("hostile")
    try:
        os.pwrite(fd, buffer, 0)
        state = read_worker_state(fd, LAYOUT, SESSION)
    except SessionDamaged:
        return
    finally:
        os.close(fd)
    assert state.tokens <= LAYOUT.token_capacity
    assert state.logical_rows <= LAYOUT.token_capacity
    assert state.commit in (NO_COMMIT, Commit(1, 1, 5, b"x"))


def test_a_record_replaced_while_it_is_read_is_read_again(segment, monkeypatch):
    buffer = bytearray(os.pread(segment, LAYOUT.block_bytes, 0))
    block = worker_block(buffer)
    real = os.pread
    reads = []

    def racing(fd: int, size: int, offset: int) -> bytes:
        data = real(fd, size, offset)
        reads.append(offset)
        if reads == [0]:
            for rows in (129, 130):  # two commits: the second overwrites the record that was just named
                block.publish_commit(3, rows)
            os.pwrite(fd, buffer, 0)
        return data

    monkeypatch.setattr(os, "pread", racing)
    assert read_worker_state(segment, LAYOUT, SESSION).commit == Commit(3, 3, 130, b"")
    assert len(reads) == 5


def test_a_worker_that_never_stops_committing_is_damage_not_a_hang(segment, monkeypatch):
    real = os.pread

    def racing(fd: int, size: int, offset: int) -> bytes:
        (sequence,) = real(fd, 8, 576)[:1]
        os.pwrite(fd, bytes([sequence + 1]), 576)
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", racing)
    with pytest.raises(SessionDamaged):
        read_worker_state(segment, LAYOUT, SESSION)


# The daemon block


def test_daemon_block_round_trip():
    assert unpack_daemon_copy(DAEMON_BLOCK) == (HEADER, FRAMES)
    assert unpack_daemon_copy(memoryview(DAEMON_BLOCK.ljust(HEADER.copy_bytes, b"\xff"))) == (HEADER, FRAMES)
    assert unpack_frame(FRAMES[3]) == (2, 3)


@given(st.lists(st.integers(0, 8 * len(DAEMON_BLOCK) - 1), min_size=1, max_size=4, unique=True))
def test_a_flipped_bit_of_a_daemon_block_is_damage(bits):
    block = bytearray(DAEMON_BLOCK.ljust(HEADER.copy_bytes, b"\0"))
    for bit in bits:
        block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SessionDamaged):
        unpack_daemon_copy(bytes(block))


@given(st.integers(0, len(DAEMON_BLOCK) - 1))
def test_a_cut_daemon_block_is_damage(size):
    with pytest.raises(SessionDamaged):
        unpack_daemon_copy(DAEMON_BLOCK[:size])


@given(st.binary(max_size=4200), st.booleans())
def test_random_bytes_are_damage(data, with_magic):
    with pytest.raises(SessionDamaged):
        unpack_daemon_copy(DAEMON_BLOCK[:12] + data.ljust(4096, b"\xff") if with_magic else data)


@pytest.mark.parametrize(
    ("header", "frames"),
    [
        (HEADER, FRAMES[:3]),
        (replace(HEADER, page_count=6), FRAMES + FRAMES[:2]),
        (replace(HEADER, name=""), FRAMES),
        (replace(HEADER, name="é" * 65), FRAMES),
        (replace(HEADER, name="a\0"), FRAMES),
        (replace(HEADER, encoding="seventeen letters"), FRAMES),
        (replace(HEADER, fingerprint=b"f" * 31), FRAMES),
    ],
    ids=["frames", "capacity", "no name", "long name", "NUL", "encoding", "fingerprint"],
)
def test_what_has_no_room_is_refused(header, frames):
    with pytest.raises(InvalidValue):
        pack_daemon_copy(header, frames)
