"""What a storage thread makes of a daemon that fails, answers again or refuses, on a store that does as it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from compute.block_store import BlockStore
from compute.integrations.sglang.connection import Availability, Connection
from compute.integrations.sglang.settings import Settings
from protocol.errors import BadMessage, DaemonUnavailable, OutOfCapacity

GONE = DaemonUnavailable("it is gone", socket="kvd.sock")
FULL = OutOfCapacity("host", 1, 0, 8)


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Store:
    """A store that is lost with `GONE` and has an answer for `reconnect`."""

    def __init__(self) -> None:
        self.is_lost = False
        self.reconnected = 0
        self.closed = False
        self.unreachable = False

    def reconnect(self) -> None:
        if self.unreachable:
            raise GONE
        self.reconnected += 1
        self.is_lost = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def availability(clock: _Clock) -> Availability:
    return Availability(Settings(retry_s=10.0, longest_retry_s=100.0), clock)


def connected(store: _Store, availability: Availability) -> Connection:
    return Connection(lambda: cast("BlockStore", store), availability, 2.0)


def uses(store: _Store, *outcomes: object) -> Callable[[Any], Any]:
    """What a call makes of the store, one after the other."""
    left = list(outcomes)

    def use(_: Any) -> Any:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            store.is_lost = outcome is GONE
            raise outcome
        return outcome

    return use


def test_failures_of_several_threads_are_one_outage(availability: Availability, clock: _Clock) -> None:
    for _ in range(3):
        availability.failed(GONE)
    clock.now += 9.9
    assert not availability.may_be_tried()
    clock.now += 0.2
    assert availability.may_be_tried()
    availability.failed(GONE)
    clock.now += 19.9
    assert not availability.may_be_tried()
    clock.now += 0.2
    availability.answered()
    availability.failed(GONE)
    clock.now += 10.1
    assert availability.may_be_tried()  # it began anew


def test_an_answer_from_before_the_failure_does_not_end_an_outage(availability: Availability) -> None:
    availability.failed(GONE)
    availability.answered()
    assert not availability.may_be_tried()


def test_what_is_refused_is_said_once_in_a_while(
    availability: Availability, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = _Store()
    link = connected(store, availability)
    with caplog.at_level(logging.INFO, "sglang.kvd"):
        assert [link.call(uses(store, FULL)) for _ in range(3)] == [None] * 3
        assert availability.may_be_tried()
        clock.now += 10.1
        link.call(uses(store, FULL))
    assert [record.getMessage() for record in caplog.records] == [
        f"kvd: pages are not loaded or not stored: {FULL}"
    ] * 2


def test_a_daemon_that_went_is_asked_again_at_once(availability: Availability) -> None:
    store = _Store()
    assert connected(store, availability).call(uses(store, GONE, 7)) == 7
    assert store.reconnected == 1
    assert availability.may_be_tried()


def test_a_daemon_that_goes_twice_or_is_not_there_is_left_alone(availability: Availability, clock: _Clock) -> None:
    store = _Store()
    link = connected(store, availability)
    assert link.call(uses(store, GONE, GONE, 7)) is None
    assert link.call(uses(store, 7)) is None
    clock.now += 10.1
    store.unreachable = True
    assert link.call(uses(store, 7)) is None
    store.unreachable = False
    assert link.call(uses(store, 7)) is None
    clock.now += 20.1
    assert link.call(uses(store, 7)) == 7


def test_a_daemon_that_was_waited_for_is_not_asked_again(availability: Availability, clock: _Clock) -> None:
    store = _Store()

    def use(_: Any) -> Any:
        clock.now += 2.0
        return uses(store, GONE)(_)

    assert connected(store, availability).call(use) is None
    assert store.reconnected == 0
    assert not availability.may_be_tried()


@pytest.mark.parametrize("error", [BadMessage("nonsense"), AttributeError("no such memory")])
def test_whatever_fails_is_no_error_of_the_engines(availability: Availability, error: Exception) -> None:
    store = _Store()
    link = connected(store, availability)
    assert link.call(uses(store, error)) is None
    assert link.call(uses(store, 7)) == 7

    def not_opened() -> BlockStore:
        raise error

    assert Connection(not_opened, availability, 2.0).call(uses(store, 7)) is None
    assert not availability.may_be_tried()


def test_after_its_end_nothing_is_asked(availability: Availability) -> None:
    store = _Store()
    link = connected(store, availability)
    assert link.call(uses(store, 7)) == 7
    link.close()
    assert store.closed
    assert link.call(uses(store, 7)) is None
