"""The daemon block: whole at every point of a kill, and a typed error for everything that is not."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from protocol.daemon_block import daemon_block_bytes, first_writes, read_daemon_block, switch_writes
from protocol.errors import SessionDamaged, StateVersion
from protocol.session_state import SessionHeader, pack_frame

HEADER = SessionHeader(
    epoch=1,
    session=9,
    generation=3,
    uid=1000,
    holder_pid=77,
    holder_start=88,
    page_bytes=5000,
    page_stride=8192,
    extent_bytes=1 << 20,
    token_capacity=64 * 600,
    page_count=0,
    commit_bytes=50,
    encoding="q8g64",
    fingerprint=b"f" * 32,
    name="notes",
)
Version = tuple[SessionHeader, tuple[int, ...]]


def version(pages: int, generation: int) -> Version:
    frames = tuple(pack_frame(generation, index) for index in range(pages))
    return replace(HEADER, page_count=pages, generation=generation), frames


def block_of(*versions: Version) -> bytearray:
    block = bytearray(daemon_block_bytes(HEADER))
    for offset, data in first_writes(HEADER):
        block[offset : offset + len(data)] = data
    for sequence, (header, frames) in enumerate(versions, start=1):
        for offset, data in switch_writes(header, frames, sequence):
            block[offset : offset + len(data)] = data
    return block


@pytest.mark.parametrize("sequence", [2, 3])
@pytest.mark.parametrize("pages", [(0, 600), (600, 3), (5, 5)], ids=["extended", "truncated", "all frames others"])
def test_a_kill_at_any_byte_leaves_one_version_whole(sequence: int, pages: tuple[int, int]) -> None:
    old, new = version(pages[0], 3), version(pages[1], 4)
    earlier = [version(7, 1)] * (sequence - 2)
    block = block_of(*earlier, old)
    seen = []
    (copy, data), switch = switch_writes(*new, sequence)
    step = max(1, len(data) // 97)
    for cut in [*range(0, len(data), step), len(data)]:
        torn = bytearray(block)
        torn[copy : copy + cut] = data[:cut]
        seen.append(read_daemon_block(bytes(torn)))
    assert seen == [old] * len(seen)
    assert len(seen) > 97
    torn[switch[0] : switch[0] + 8] = switch[1]
    assert read_daemon_block(memoryview(torn)) == new


def test_switching_is_one_aligned_word() -> None:
    _, (offset, data) = switch_writes(*version(1, 3), 2)
    assert (offset % 8, len(data)) == (0, 8)


def test_offsets_and_bytes() -> None:
    block = block_of(version(0, 1), version(2, 2))
    assert len(block) == 4096 + 2 * (4096 + 8192)
    assert struct.unpack_from("<8sI4xQ", block) == (b"KVDSESSN", 2, 12288)
    assert struct.unpack_from("<Q", block, 64) == (2,)
    assert not any(block[24:64] + block[72:4096])
    assert block[4096:4104] == b"KVDSESSN"
    assert struct.unpack_from("<2Q", block, 4096 + 4096) == (2 << 32, (2 << 32) + 1)


def test_a_block_without_a_copy_in_force_is_damage() -> None:
    with pytest.raises(SessionDamaged, match="no copy in force"):
        read_daemon_block(bytes(block_of()))


def test_a_block_of_another_version_names_the_way_out() -> None:
    block = block_of(version(0, 1))
    block[8] = 1
    with pytest.raises(StateVersion, match="kvd drain --save"):
        read_daemon_block(bytes(block))


@pytest.mark.parametrize("at", [0, 16, 64, 4096 + 12288, 4096 + 12288 + 40, 4096 + 12288 + 4096])
def test_a_flipped_byte_is_damage(at: int) -> None:
    block = block_of(version(3, 1))
    block[at] ^= 0x41
    with pytest.raises(SessionDamaged):
        read_daemon_block(bytes(block))


@pytest.mark.parametrize("size", [0, 8, 72, 4095, 4096, 8192, 4096 + 2 * 12288 - 1])
def test_a_cut_block_is_damage(size: int) -> None:
    with pytest.raises(SessionDamaged):
        read_daemon_block(bytes(block_of(version(3, 1))[:size]))
