"""The block store against a plain model: which keys were published, who has pinned and who has reserved which."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.block_messages import NO_LEASE
from protocol.errors import OutOfCapacity, UnknownBlocks
from protocol.handles import LeaseRef
from tests.block_world import FINGERPRINT, User, World, chain, content

UIDS = (1000, 1001)
SIZES = (4096, 8192)
NAMES = "abcdef"
MOST = 700
"""Blocks of a chain: three of these are more than the tier has room for."""

Space = tuple[int, int]
"""Uid and size of blocks."""


class BlocksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/tmp")
        self.world = World(Path(self.folder.name))
        self.users: list[User] = []
        self.pids = {UIDS[0]: 0, UIDS[1]: self.world.child()}
        """A process of each uid; 0 is this one."""
        self.published: dict[Space, set[bytes]] = {(uid, size): set() for uid in UIDS for size in SIZES}
        self.pins: dict[int, tuple[User, list[bytes], list[int]]] = {}
        self.reserved: dict[int, tuple[User, dict[bytes, int]]] = {}
        self.mapped: set[int] = set()
        """Uids whose process may have an extent mapped."""
        self.most = 8 << 20
        self.evicted = False
        """Whether an earlier daemon has evicted blocks."""

    # Steps

    @rule(uid=st.sampled_from(UIDS), size=st.sampled_from(SIZES))
    @precondition(lambda self: len(self.users) < 6)
    def connect(self, uid: int, size: int) -> None:
        self.users.append(self._user(uid, size, NO_LEASE))

    @rule(data=st.data(), name=st.sampled_from(NAMES), count=st.integers(1, MOST))
    @precondition(lambda self: self.users)
    def find(self, data: st.DataObject, name: str, count: int) -> None:
        user, keys = data.draw(st.sampled_from(self.users)), chain(name, count)
        found = user.find(keys)
        published = self.published[self._space(user)]
        assert all(key in published for key in keys[:found])
        if not self._has_evicted():
            assert found == next((index for index, key in enumerate(keys) if key not in published), count)

    @rule(data=st.data(), name=st.sampled_from(NAMES), count=st.integers(1, MOST))
    @precondition(lambda self: self.users)
    def pin(self, data: st.DataObject, name: str, count: int) -> None:
        user, keys = data.draw(st.sampled_from(self.users)), chain(name, count)
        found = user.find(keys)
        hold, frames = user.pin(keys)
        assert len(frames) == found
        if hold:
            self.pins[hold] = (user, keys[:found], frames)

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def release(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(sorted(self.pins)))
        user, _, _ = self.pins.pop(hold)
        user.release(hold)
        with pytest.raises(UnknownBlocks):
            user.release(hold)

    @rule(data=st.data(), name=st.sampled_from(NAMES), count=st.integers(1, MOST))
    @precondition(lambda self: self.users)
    def reserve(self, data: st.DataObject, name: str, count: int) -> None:
        user, keys = data.draw(st.sampled_from(self.users)), chain(name, count)
        space = self._space(user)
        taken = {key for other, given in self.reserved.values() if self._space(other) == space for key in given}
        found = user.find(keys)
        try:
            hold, given = user.reserve(keys)
        except OutOfCapacity:
            in_use = self.pins or self.reserved or self.mapped - {space[0]}
            assert in_use or count * user.block_bytes > self.most, "everything else could go"
            return
        assert not taken & given.keys()
        assert not set(keys[:found]) & given.keys()
        if hold:
            self.mapped.add(space[0])
            self.reserved[hold] = (user, given)
            for key, frame in given.items():
                user.write(frame, content(key, user.block_bytes))

    @rule(data=st.data(), share=st.floats(0, 1))
    @precondition(lambda self: self.reserved)
    def publish(self, data: st.DataObject, share: float) -> None:
        hold = data.draw(st.sampled_from(sorted(self.reserved)))
        user, given = self.reserved[hold]
        keys = list(given)[: max(1, int(share * len(given)))]
        user.publish(hold, keys)
        self.published[self._space(user)].update(keys)
        for key in keys:
            del given[key]
        if not given:
            del self.reserved[hold]

    @rule(data=st.data())
    @precondition(lambda self: self.reserved)
    def abandon(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(sorted(self.reserved)))
        user, _ = self.reserved.pop(hold)
        user.release(hold)

    @rule(data=st.data())
    @precondition(lambda self: self.users)
    def die(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.users))
        user.die()
        self._forget(user)

    @rule(data=st.data())
    @precondition(lambda self: self.users)
    def connect_again(self, data: st.DataObject) -> None:
        """The connection is lost, and its process has another under which it names the one before."""
        user = data.draw(st.sampled_from(self.users))
        user.disconnect()
        self._forget(user)
        self.users.append(self._user(*self._space(user), user.ref))

    @rule()
    def kill_the_daemon(self) -> None:
        """What was published is there, within the limit; every process connects again and gives up what it had."""
        before, users = self._stored(), self.users
        nbytes = self.world.node.spaces.room.nbytes() if users else 0
        self.evicted = self._has_evicted()
        self.world.kill()
        self.world.start()
        after = self._stored()
        for user in users:
            self._forget(user)
        for user in users:
            self.users.append(self._user(*self._space(user), user.ref))
        assert all(after[space] <= keys for space, keys in before.items())
        if nbytes <= self.most:
            assert after == before

    @rule(mib=st.integers(1, 8))
    def limit(self, mib: int) -> None:
        self.world.limit(blocks__capacity=f"{mib}MiB")
        self.most = mib << 20

    # What holds after every step

    @invariant()
    def the_books_balance(self) -> None:
        self.world.check()

    @invariant()
    def nothing_is_stored_that_was_not_published(self) -> None:
        for space, keys in self._stored().items():
            assert keys <= self.published[space]

    @invariant()
    def what_is_pinned_stays_as_it_is(self) -> None:
        for user, keys, frames in self.pins.values():
            for key, frame in [*zip(keys, frames, strict=True)][:: max(1, len(keys) // 8)]:
                assert user.read(frame) == content(key, user.block_bytes)

    @invariant()
    def what_is_reserved_is_nobody_elses(self) -> None:
        for user, given in self.reserved.values():
            for key, frame in [*given.items()][:: max(1, len(given) // 8)]:
                assert user.read(frame) == content(key, user.block_bytes)

    def teardown(self) -> None:
        with self.folder, self.world:
            for user in list(self.users):
                user.die()
            spaces = list(self.world.node.spaces)
            assert all(space.pinned == len(space.writing) == 0 for space in spaces)
            self.world.check()

    # Steps of the model

    def _user(self, uid: int, size: int, previous: LeaseRef) -> User:
        return self.world.user(uid, size, FINGERPRINT, previous, self.pids[uid])

    def _space(self, user: User) -> Space:
        return user.lease.peer.uid, user.block_bytes

    def _has_evicted(self) -> bool:
        return self.evicted or any(space.counts.evicted for space in self.world.node.spaces)

    def _stored(self) -> dict[Space, set[bytes]]:
        return {(space.uid, space.block_bytes): set(space.stored) for space in self.world.node.spaces}

    def _forget(self, user: User) -> None:
        self.users = [other for other in self.users if other is not user]
        self.pins = {hold: held for hold, held in self.pins.items() if held[0] is not user}
        self.reserved = {hold: held for hold, held in self.reserved.items() if held[0] is not user}


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40)
