"""Cold blocks on disk: written in time, read back whole or not at all, and a disk that refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvd.blocks import spill_file
from kvd.blocks.spill_file import SpillFile
from kvd.blocks.spilling import Steps
from kvd.saved.jobs import Step
from protocol.messages import PinBlocks
from tests.block_world import BLOCK, MIB, World, chain, content

KEYS = chain("a", 2048)
"""As many blocks as the tier has."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path, disk__state_dir=str(tmp_path / "state")) as made:
        yield made
        made.settle()
        made.check()


def the_file(tmp_path: Path) -> Path:
    [path] = (tmp_path / "state").glob("*.blocks")
    return path


def fill(world: World) -> None:
    """Store `KEYS`, and have a quarter of them on disk."""
    user = world.user()
    for end in range(128, len(KEYS) + 1, 128):
        user.put(KEYS[:end])
        world.spill()


def test_the_coldest_blocks_are_on_disk_before_they_go(world: World) -> None:
    fill(world)
    user = world.user()
    space = world.node.spaces.numbered(user.space)
    assert space.counts.spilled >= 512
    user.put(chain("b", 400))
    world.spill()
    assert user.found(KEYS).on_disk >= 400
    assert user.found(KEYS).count == 2048
    assert user.get(KEYS) < 1700
    assert user.get(KEYS, from_disk=1000 * BLOCK) == 2048
    assert space.counts.returned >= 400
    world.settle()
    world.check()


def test_no_more_is_read_back_than_was_asked_for(world: World) -> None:
    fill(world)
    user = world.user()
    user.put(chain("b", 400))
    world.spill()
    in_memory = user.get(KEYS)
    assert user.get(KEYS, from_disk=10 * BLOCK + 5) == in_memory + 10
    assert user.get(KEYS, from_disk=BLOCK - 1) == in_memory + 10


def test_what_comes_back_stays_pinned_and_a_second_asker_waits(world: World) -> None:
    fill(world)
    one, two = world.user(), world.user()
    one.put(chain("b", 400))
    world.settle()
    missing = one.found(KEYS).on_disk
    assert missing
    blocks, counts = world.node.blocks, world.node.spaces.numbered(one.space).counts
    before = counts.returned
    outcomes: list[Any] = []
    for user in (one, two):
        request = PinBlocks(1, user.ref, user.space, b"".join(KEYS), 8 * MIB)
        job = blocks.pin(user.lease, request, partial(getattr, user, "lease"))
        assert isinstance(job, Generator)
        world.node.jobs.start(job, outcomes.append)
    world.settle()
    assert [len(reply.frames) // 8 for reply in outcomes] == [2048, 2048]
    assert counts.returned - before == missing, "each was read once"
    one.release(outcomes[0].hold)
    two.release(outcomes[1].hold)


def test_a_block_that_does_not_hold_is_not_served(world: World, tmp_path: Path) -> None:
    fill(world)
    user = world.user()
    user.put(chain("b", 400))
    world.spill()
    in_memory = user.get(KEYS)
    space = world.node.spaces.numbered(user.space)
    assert space.file is not None
    slot = space.file.where[KEYS[in_memory + 7]]
    with the_file(tmp_path).open("r+b") as file:
        file.seek(spill_file._BLOCKS + slot * BLOCK + 1000)
        file.write(b"\xff\x00")
    assert user.get(KEYS, from_disk=8 * MIB) == in_memory + 7
    assert user.find(KEYS) == in_memory + 7
    assert any(call.method_name == "warning" for call in world.log.calls)


@pytest.mark.parametrize("restart", ["stopped", "killed"])
def test_blocks_on_disk_outlive_the_daemon(world: World, tmp_path: Path, restart: str) -> None:
    fill(world)
    user = world.user()
    user.put(chain("b", 400))
    world.spill()
    count = user.found(KEYS)
    spilled = world.node.spaces.numbered(user.space).file
    assert spilled is not None
    where = dict(spilled.where)
    if restart == "killed":
        world.kill()
    else:
        world.node.close()
    world.start()
    again = world.user()
    file = world.node.spaces.numbered(again.space).file
    assert file is not None
    assert file.where == where
    world.check()
    if restart == "killed":
        assert again.found(KEYS) == count
        assert again.get(KEYS, from_disk=8 * MIB) == count.count
    else:
        prefix = next(index for index, key in enumerate(KEYS) if key not in where)
        assert again.get(KEYS, from_disk=8 * MIB) == prefix


def test_hibernation_has_all_blocks_on_disk(world: World) -> None:
    user = world.user()
    user.put(KEYS[:500])
    world.run(_then_done(world.node.block_spilling.hibernate()))
    world.node.close()
    world.start()
    assert world.user().get(KEYS[:500], from_disk=8 * MIB) == 500


def _then_done(steps: Steps) -> Generator[Step, Any, bool]:
    yield from steps
    return True


def test_a_damaged_file_is_dropped(world: World, tmp_path: Path) -> None:
    fill(world)
    world.node.close()
    the_file(tmp_path).write_bytes(os.urandom(100_000))
    world.start()
    world.check()
    assert world.user().find(KEYS) == 0
    assert list((tmp_path / "state").glob("*.blocks")) == []


def test_damaged_entries_are_no_blocks(world: World, tmp_path: Path) -> None:
    fill(world)
    [space] = world.node.spaces
    assert space.file is not None
    damaged = {key for key, slot in space.file.where.items() if slot < 512 and not slot % 2}
    before = space.file.where.keys()
    world.node.close()
    with the_file(tmp_path).open("r+b") as file:
        for slot in range(0, 512, 2):
            at = spill_file._INDEX + 64 * slot + slot % 60
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0xA5]))
    world.start()
    user = world.user()
    file_of_space = world.node.spaces.numbered(user.space).file
    assert file_of_space is not None
    assert damaged
    assert file_of_space.where.keys() == before - damaged
    for key in KEYS[1000:1200]:
        assert user.get([key], from_disk=8 * MIB) == (key in file_of_space.where)


@pytest.mark.parametrize(("failing", "nth"), [("posix_fallocate", 1), *(("pwrite", nth) for nth in (1, 2, 5, 40, 200))])
def test_a_full_disk_is_no_spill(world: World, monkeypatch: pytest.MonkeyPatch, failing: str, nth: int) -> None:
    """From the ``nth`` call on. Blocks are stored, evicted and found as without a disk."""
    calls = 0
    real = getattr(os, failing)
    own = {}

    def fail(fd: int, *arguments: object) -> object:
        nonlocal calls
        if fd not in own:
            own[fd] = os.readlink(f"/proc/self/fd/{fd}").endswith(".blocks")
        if own[fd]:
            calls += 1
            if calls >= nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *arguments)

    monkeypatch.setattr(os, failing, fail)
    fill(world)
    user = world.user()
    user.put(chain("b", 400))
    world.spill()
    world.check()
    assert calls >= nth
    assert user.get(chain("b", 400)) == 400
    assert user.get(KEYS, from_disk=8 * MIB) >= 1600
    world.check()


def test_the_disk_keeps_to_its_limit(tmp_path: Path) -> None:
    with World(tmp_path, disk__state_dir=str(tmp_path / "state"), blocks__disk="1MiB") as world:
        fill(world)
        assert world.node.block_spilling.nbytes <= MIB
        user = world.user()
        user.put(chain("b", 1000))
        world.settle()
        assert user.found(KEYS).on_disk <= 256
        user.get(KEYS, from_disk=8 * MIB)
        world.check()
        world.limit(blocks__disk="0B")
        assert world.node.block_spilling.nbytes == 0
        assert list((tmp_path / "state").glob("*.blocks")) == []
        world.check()


def test_a_block_that_went_while_it_was_written_is_not_believed(tmp_path: Path) -> None:
    """What the thread read may be another block's by then."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file = SpillFile(fd, 1000, BLOCK, bytes(32))
    file.grow(10)
    [slot] = file.take(1, ())
    source = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
    os.write(source, content(KEYS[0]))
    assert file.write_blocks([slot], [(source, 0)]) != [None]
    file.busy.discard(slot)
    file.give([slot])
    again = SpillFile(os.dup(fd), 1000, BLOCK, bytes(32))
    assert again.where == {}
    assert file.write_blocks([slot], [(source, 1)]) == [None]
    for each in (file, again):
        each.close()
    os.close(source)
