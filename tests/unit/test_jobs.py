"""Jobs: steps in threads, everything else in the loop's thread, and an end that undoes what was begun."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvd.saved import jobs as jobs_module
from kvd.saved.jobs import Job, Jobs
from protocol.errors import OsFailure
from protocol.messages import Done, Reply


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


def wait(jobs: Jobs, outcomes: list[Reply | Exception], count: int = 1) -> None:
    """Do as the loop does until so many outcomes are there."""
    deadline = time.monotonic() + 10
    while len(outcomes) < count and time.monotonic() < deadline:
        if select.select([jobs.wake], [], [], 1)[0]:
            jobs.resume()
    assert len(outcomes) == count


def test_steps_run_in_threads_and_what_is_between_them_in_the_caller(jobs: Jobs) -> None:
    threads: list[int] = []

    def job() -> Job:
        for _ in range(3):
            threads.append(threading.get_ident())
            threads.append((yield threading.get_ident))
        return Done(7)

    outcomes: list[Reply | Exception] = []
    jobs.start(job(), outcomes.append)
    assert len(jobs) == 1
    wait(jobs, outcomes)
    assert outcomes == [Done(7)]
    assert set(threads[::2]) == {threading.get_ident()}
    assert threading.get_ident() not in threads[1::2]
    assert len(jobs) == 0


def test_errors_come_back_where_the_step_was_yielded(jobs: Jobs) -> None:
    def fail() -> None:
        raise OsFailure("no")

    def job(catch: bool) -> Job:
        try:
            yield fail
        except OsFailure:
            if not catch:
                raise
        return Done(1)

    outcomes: list[Reply | Exception] = []
    jobs.start(job(True), outcomes.append)
    wait(jobs, outcomes)
    jobs.start(job(False), outcomes.append)
    wait(jobs, outcomes, 2)
    assert outcomes[0] == Done(1)
    assert isinstance(outcomes[1], OsFailure)


def at_once() -> Job:
    yield from ()
    return Done(2)


def test_a_job_without_a_step_ends_at_once(jobs: Jobs) -> None:
    outcomes: list[Reply | Exception] = []
    jobs.start(at_once(), outcomes.append)
    assert outcomes == [Done(2)]


def test_no_more_jobs_than_the_limit(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MOST_JOBS", 2)
    go_on = threading.Event()

    def job() -> Job:
        yield go_on.wait
        return Done(3)

    outcomes: list[Reply | Exception] = []
    jobs.start(job(), outcomes.append)
    jobs.start(job(), outcomes.append)
    jobs.start(job(), outcomes.append)
    assert [str(outcome) for outcome in outcomes] == ["requests under way is 3; allowed: at most 2"]
    jobs.start(at_once(), outcomes.append)
    assert outcomes[1] == Done(2), "what takes no time is not counted"
    go_on.set()
    wait(jobs, outcomes, 4)


def test_closing_waits_for_steps_and_has_jobs_undo_what_they_began() -> None:
    jobs = Jobs()
    undone: list[str] = []

    def job(name: str) -> Job:
        try:
            yield lambda: jobs.cancelled.wait(10)
            yield lambda: undone.append("never")
        finally:
            undone.append(name)
        return Done(4)

    outcomes: list[Reply | Exception] = []
    for name in ("a", "b", "c", "d"):
        jobs.start(job(name), outcomes.append)
    jobs.close()
    assert sorted(undone) == ["a", "b", "c", "d"]
    assert outcomes == []
