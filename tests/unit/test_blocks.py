"""The block store's books: leases that die, quarantine, pressure from sessions, and a daemon that is killed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.alloc.ledger import Account
from kvd.blocks.table import _AT, _HOLDERS, _SPACES, TABLE_BYTES, table_name
from protocol.errors import InvalidValue, OutOfCapacity, UnknownBlocks
from protocol.handles import LeaseRef
from tests.block_world import BLOCK, FINGERPRINT, MIB, World, chain, content, key

PAGES = Account("host", 0, 7, "pages")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made
        made.check()


class TestHolds:
    def test_a_dead_writers_blocks_vanish(self, world: World) -> None:
        one, two = world.user(), world.user()
        keys = chain("a", 20)
        hold, _ = one.reserve(keys)
        one.publish(hold, keys[:5])
        assert two.reserve(keys)[1] == {}
        one.die()
        world.check()
        assert two.find(keys) == 5
        assert two.put(keys) == keys[5:]

    def test_a_lost_lease_keeps_what_it_holds_until_its_process_is_dead(self, world: World) -> None:
        one, two = world.user(), world.user()
        two.put(old := chain("old", 1024))
        one.pin(old[:100])
        one.reserve(new := chain("new", 100))
        assert not one.disconnect()
        world.check()
        with pytest.raises(OutOfCapacity):
            two.reserve(chain("b", 2048 - 150))
        assert two.reserve(new)[1] == {}
        assert world.node.ledger.quarantined_bytes("host") == 100 * BLOCK
        two.put(chain("b", 2048 - 200))
        assert two.find(old) == 100
        one.die()
        world.check()
        assert two.put(new) == new

    def test_a_process_that_names_its_earlier_lease_has_let_go(self, world: World) -> None:
        one = world.user()
        one.put(keys := chain("a", 10))
        one.pin(keys)
        one.reserve(chain("b", 10))
        assert not one.disconnect()
        again = world.user(previous=one.ref)
        world.check()
        assert [lease.number for lease in world.node.leases] == [again.lease.number]
        assert again.get(keys) == 10
        assert again.put(chain("b", 10)) == chain("b", 10)

    def test_what_it_has_mapped_is_its_own_also_where_nothing_is_left(self, world: World) -> None:
        one = world.user()
        one.reserve(chain("a", 1024))
        assert not one.disconnect()
        again = world.user(previous=one.ref)
        other = world.user(uid=1001, block_bytes=2 * MIB)
        assert other.put(chain("b", 2)) == chain("b", 2)
        with pytest.raises(OutOfCapacity, match="may still map"):
            other.reserve(chain("c", 3))
        assert not again.disconnect()
        with pytest.raises(OutOfCapacity, match="may still map"):
            other.reserve(chain("c", 3))
        again.die()
        assert other.put(chain("c", 4)) == chain("c", 4)

    def test_of_another_process_or_uid_nothing_is_let_go(self, world: World) -> None:
        one = world.user()
        one.put(keys := chain("a", 10))
        hold, _ = one.pin(keys)
        world.user(uid=1001, previous=one.ref)
        world.user(pid=world.child(), previous=one.ref)
        world.user(previous=LeaseRef(one.ref.epoch ^ 1, one.ref.number))
        assert world.node.spaces.numbered(one.space).pinned == 10
        one.release(hold)
        assert world.node.spaces.numbered(one.space).pinned == 0

    def test_holds_of_others_are_unknown(self, world: World) -> None:
        one, two = world.user(), world.user()
        one.put(keys := chain("a", 3))
        pinned, _ = one.pin(keys)
        reserved, _ = one.reserve(chain("b", 3))
        for hold in (pinned, reserved, 0, 99):
            with pytest.raises(UnknownBlocks):
                two.release(hold)
            with pytest.raises(UnknownBlocks):
                two.publish(hold)
        with pytest.raises(UnknownBlocks):
            one.publish(pinned, keys)
        one.release(pinned)
        with pytest.raises(UnknownBlocks):
            one.release(pinned)

    def test_blocks_that_are_pinned_by_several_stay_for_the_last(self, world: World) -> None:
        one, two = world.user(), world.user()
        one.put(keys := chain("a", 1024))
        first, second = one.pin(keys)[0], two.pin(keys[:300])[0]
        one.release(first)
        two.put(chain("b", 2048 - 300))
        assert one.find(keys) == 300
        two.release(second)
        one.put(chain("c", 2048))
        assert one.find(keys) == 0


class TestSpaces:
    def test_uids_share_nothing(self, world: World) -> None:
        one, two = world.user(1000), world.user(1001)
        keys = chain("a", 10)
        one.put(keys)
        assert two.find(keys) == 0
        assert two.put(keys) == keys
        assert one.space != two.space
        two.space = one.space
        with pytest.raises(UnknownBlocks):
            two.find(keys)

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 2 * MIB + 1, -5])
    def test_sizes_of_blocks_have_limits(self, world: World, nbytes: int) -> None:
        with pytest.raises(InvalidValue, match="block_bytes"):
            world.user(block_bytes=nbytes)

    def test_blocks_are_as_large_as_an_extent(self, world: World) -> None:
        user = world.user(block_bytes=2 * MIB)
        assert user.put(chain("a", 4)) == chain("a", 4)
        assert user.get(chain("a", 4)) == 4

    def test_spaces_without_blocks_and_leases_make_room_for_others(self, world: World) -> None:
        world.user().put(chain("a", 3))
        for index in range(300):
            user = world.user(fingerprint=key(index))
            if index % 100 == 0:
                user.put(chain(index, 2))
            user.die()
        world.check()
        assert world.user().find(chain("a", 3)) == 3
        assert world.user(fingerprint=key(200)).find(chain(200, 2)) == 2

    def test_a_space_too_many_is_refused(self, world: World) -> None:
        for index in range(255):
            world.user(fingerprint=key(index))
        with pytest.raises(InvalidValue, match="number of spaces"):
            world.user(fingerprint=key("x"))


class TestRoom:
    def test_sessions_come_first(self, world: World) -> None:
        user = world.user()
        user.put(keys := chain("a", 2048))
        user.put(chain("b", 100))
        frames = world.node.sessions.frames
        header = _header(1000, 1 * MIB)
        taken = frames.allocate(PAGES, header, 3)
        world.check()
        assert 0 < user.find(keys) < 1948
        taken += frames.allocate(PAGES, header, 5)
        assert (user.find(keys), world.node.spaces.blocks) == (0, 0)
        with pytest.raises(OutOfCapacity):
            user.reserve(keys[:1])
        with pytest.raises(OutOfCapacity):
            frames.allocate(PAGES, header, 1)
        world.node.host.free_frames(taken)

    def test_what_is_pinned_or_written_is_not_for_sessions(self, world: World) -> None:
        user = world.user()
        user.put(keys := chain("a", 1024))
        user.pin(keys)
        user.reserve(chain("b", 512))
        with pytest.raises(OutOfCapacity):
            world.node.sessions.frames.allocate(PAGES, _header(1000, 1 * MIB), 3)
        taken = world.node.sessions.frames.allocate(PAGES, _header(1000, 1 * MIB), 2)
        assert user.find(keys) == 1024
        world.node.host.free_frames(taken)

    def test_limits_of_all_and_of_a_uid(self, tmp_path: Path) -> None:
        with World(tmp_path, blocks__capacity=str(100 * BLOCK), blocks__per_uid=str(60 * BLOCK)) as world:
            one, two = world.user(1000), world.user(1001)
            one.put(chain("a", 40))
            one.put(chain("b", 40))
            assert (one.find(chain("a", 40)), one.find(chain("b", 40))) == (20, 40)
            two.put(chain("a", 60))
            assert (one.find(chain("a", 40)), one.find(chain("b", 40))) == (0, 40)
            with pytest.raises(OutOfCapacity, match="blocks of uid 1001"):
                two.reserve(chain("c", 61))
            world.check()
            world.limit(blocks__per_uid=str(30 * BLOCK))
            assert (one.find(chain("b", 40)), two.find(chain("a", 60))) == (30, 30)
            world.limit(blocks__capacity="0B")
            assert world.node.spaces.blocks == 0
            with pytest.raises(OutOfCapacity):
                one.reserve(chain("a", 1))
            world.check()

    def test_a_chain_that_names_blocks_twice_is_evicted_once(self, world: World) -> None:
        user = world.user()
        user.put(keys := chain("a", 2))
        assert user.find(keys * 50) == 100
        for name in range(8):
            user.put(chain(name, 256))
            world.check()
        assert user.find(keys) == 0
        world.check()

    def test_extents_for_a_smaller_tier_are_cleared_of_blocks(self, world: World) -> None:
        user = world.user()
        user.put(keys := chain("a", 2048))
        world.node.spaces.vacate(2 - len(world.node.host.vacant))
        assert user.find(keys) == 2048, "a living process has them mapped"
        user.die()
        world.node.spaces.vacate(2 - len(world.node.host.vacant))
        assert len(world.node.host.vacant) == 2
        assert 0 < world.user().find(keys) <= 1024
        world.check()

    def test_blocks_in_an_extent_that_was_cut_are_stored_no_more(self, world: World) -> None:
        user = world.user()
        user.put(keys := chain("a", 100))
        hold, frames = user.pin(keys[:1])
        os.ftruncate(world.node.host.fileno(frames[0] >> 32), MIB)
        world.node.check()
        assert user.find(keys) == 1, "what is pinned goes when it is released"
        user.release(hold)
        world.node.check()
        assert user.find(keys) == 0
        assert user.put(keys) == keys
        assert user.get(keys) == 100

    def test_blocks_do_not_count_as_their_uids_sessions(self, world: World) -> None:
        world.limit(limits__host_per_uid="2MiB")
        world.user().put(chain("a", 2048))
        taken = world.node.sessions.frames.allocate(PAGES, _header(1000, 1 * MIB), 2)
        with pytest.raises(OutOfCapacity, match="uid 1000"):
            world.node.sessions.frames.allocate(PAGES, _header(1000, 1 * MIB), 1)
        world.node.host.free_frames(taken)

    def test_the_table_keeps_to_half_of_the_state_capacity(self, tmp_path: Path) -> None:
        with World(tmp_path, host__state_capacity="1MiB") as world:
            user = world.user()
            user.put(chain("a", 2048))
            with World(tmp_path, host__state_capacity="1MiB", host__capacity="32MiB") as wider:
                user = wider.user()
                user.put(chain("a", 4096))
                hold, _ = user.pin(chain("a", 4096))
                with pytest.raises(OutOfCapacity, match="table of blocks"):
                    user.reserve(chain("b", 100))
                wider.check()
                user.release(hold)
                assert len(user.put(chain("b", 100))) == 100
                assert user.find(chain("a", 4096)) == 4096 - 100, "those that were used longest ago have gone"
                wider.check()
            world.check()


def _header(uid: int, page_bytes: int) -> Any:
    """What an allocation of a session's pages looks at."""
    return SimpleNamespace(uid=uid, page_stride=page_bytes, page_bytes=page_bytes)


class TestRestart:
    def test_published_blocks_are_there_again(self, world: World) -> None:
        user = world.user()
        user.put(keys := chain("a", 100))
        user.put(chain("b", 50))
        user.find(keys)
        pid = world.child()
        for _ in range(5):
            world.kill()
            world.start()
            world.check()
            again = world.user(pid=pid)
            assert (again.get(keys), again.get(chain("b", 50))) == (100, 50)
            assert again.put(chain("a", 101)) == [chain("a", 101)[100]] or again.find(chain("a", 101)) == 101

    def test_the_order_of_use_is_as_it_was(self, world: World) -> None:
        user = world.user()
        for name in "abcd":
            user.put(chain(name, 512))
        user.find(chain("a", 512))
        world.kill()
        world.start()
        again = world.user(previous=user.ref)
        again.put(chain("e", 600))
        assert [again.find(chain(name, 512)) for name in "abcd"] == [512, 0, 424, 512]

    def test_a_writer_that_lives_keeps_its_frames_until_it_says_otherwise(self, world: World) -> None:
        pid = world.child()
        writer = world.user(pid=pid)
        hold, given = writer.reserve(keys := chain("a", 100))
        for each in keys[:40]:
            writer.write(given[each], content(each))
        writer.publish(hold, keys[:40])
        world.kill()
        world.start()
        world.check()
        [lease] = world.node.leases
        assert (lease.is_inherited, lease.peer.pid) == (True, pid)
        other = world.user()
        assert other.get(keys) == 40
        assert other.reserve(keys)[1] == {}
        fresh = other.reserve(chain("b", 2048 - 100))[1]
        assert not set(fresh.values()) & set(given.values())
        again = world.user(pid=pid, previous=writer.ref)
        world.check()
        assert again.put(keys) == keys[40:]
        assert lease not in list(world.node.leases) or not world.node.spaces.holders_of(lease)

    def test_a_dead_writers_frames_are_free(self, world: World) -> None:
        pid = world.child()
        writer = world.user(pid=pid)
        writer.reserve(chain("a", 100))
        world.children[0].kill()
        world.children[0].wait()
        world.kill()
        world.start()
        world.check()
        assert list(world.node.leases) == []
        assert world.user().put(chain("b", 2048)) == chain("b", 2048)

    def test_what_was_pinned_stays_while_a_process_lives(self, world: World) -> None:
        pid = world.child()
        reader = world.user(pid=pid)
        reader.put(keys := chain("a", 100))
        reader.pin(keys[:60])
        world.kill()
        world.start()
        world.check()
        other = world.user()
        other.put(chain("b", 2048 - 60))
        assert other.find(keys) == 60
        world.user(pid=pid, previous=reader.ref)
        world.check()
        other.put(chain("c", 2048))
        assert other.find(keys) == 0

    def test_damaged_bytes_of_the_table_lose_their_block_and_no_other(self, world: World) -> None:
        pid = world.child()
        user = world.user(pid=pid)
        user.put(keys := chain("a", 300))
        user.reserve(chain("w", 50))
        chance = random.Random(5)
        for trial in range(30):
            world.kill()
            path = Path("/dev/shm", table_name(world.prefix)[1:])
            with path.open("r+b") as file:
                for _ in range(20):
                    # Anywhere that has memory, and a few times the header and the records.
                    at = chance.choice(_areas()) + chance.randrange(4096)
                    file.seek(at)
                    file.write(chance.randbytes(chance.choice((1, 8))))
            world.start()
            world.check()
            user = world.user(pid=pid, fingerprint=FINGERPRINT if trial % 2 else key(trial))
            assert user.find(chain("w", 50)) == 0
            whole = user.get(keys)
            assert whole <= 300
            user.put(keys)
            assert user.get(keys) == 300

    @pytest.mark.parametrize("nbytes", [0, 4096, TABLE_BYTES // 2, TABLE_BYTES + 4096])
    def test_a_table_that_was_cut_is_none(self, world: World, nbytes: int) -> None:
        world.user().put(chain("a", 10))
        world.kill()
        os.truncate(Path("/dev/shm", table_name(world.prefix)[1:]), nbytes)
        world.start()
        world.check()
        user = world.user()
        assert user.find(chain("a", 10)) == 0
        assert user.put(chain("a", 10)) == chain("a", 10)

    def test_a_frame_of_an_extent_that_is_gone_is_no_block(self, world: World) -> None:
        world.user().put(chain("a", 1024))
        world.kill()
        Path("/dev/shm", f"{world.prefix[1:]}-e0").unlink()
        world.start()
        world.check()
        assert world.node.spaces.blocks == 512


def _areas() -> list[int]:
    return [0, _SPACES, _HOLDERS, *(_AT[name] for name in _AT for _ in range(3))]
