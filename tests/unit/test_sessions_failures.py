"""The n-th step of every verb fails, once or from then on: nothing is half-done, and the books are as before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import posix_ipc
import pytest

from protocol.errors import KvdError
from protocol.messages import CloseSession, DetachSession, TruncateSession
from tests.trials import report_all
from tests.unit.test_sessions import NOBODY, World, extend
from tests.unit.test_sessions import world as world  # the fixture

STEPS: list[tuple[Any, str, Exception]] = [
    (os, "pwrite", OSError(errno.ENOSPC, "No space left on device")),
    (os, "ftruncate", OSError(errno.ENOMEM, "Cannot allocate memory")),
    (os, "open", OSError(errno.EMFILE, "Too many open files")),
    (posix_ipc, "SharedMemory", OSError(errno.EMFILE, "Too many open files")),
    (os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device")),
]
VERBS: dict[str, Callable[[World], object]] = {
    "create": lambda world: world.create(),
    "extend": lambda world: world.sessions.extend(world.first, extend(3, session=number(world))),
    "truncate": lambda world: world.sessions.truncate(world.first, TruncateSession(1, NOBODY, number(world), 1, 1)),
    "detach": lambda world: world.sessions.detach(world.first, DetachSession(1, NOBODY, number(world), 2)),
    "open": lambda world: world.open(world.second),
    "close": lambda world: world.sessions.close(world.second, CloseSession(1, NOBODY, number(world), 3)),
}
MOST_CALLS = 40


class Failing:
    """Fails at the n-th call, and at all later ones if it is ``persistent``."""

    def __init__(self, call: Callable[..., Any], error: Exception, nth: int, *, persistent: bool) -> None:
        self._call = call
        self._error = error
        self._nth = nth
        self._persistent = persistent
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self._nth or (self._persistent and self.calls > self._nth):
            raise self._error
        return self._call(*arguments, **options)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return lambda *arguments, **options: self(instance, *arguments, **options)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
def test_a_failing_step_leaves_everything(
    world: World, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str, Exception], persistent: bool
) -> None:
    """Each verb is tried with its first step failing, its second, …, until none is left that fails."""
    owner, name, error = step
    failures = 0
    for verb, act in VERBS.items():
        for nth in range(1, MOST_CALLS):
            before = world.snapshot()
            failing = Failing(getattr(owner, name), error, nth, persistent=persistent)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                try:
                    act(world)
                except KvdError:
                    failures += 1
                else:
                    break
            assert world.snapshot() == before, (verb, nth)
        else:
            pytest.fail(f"{verb} never gets through")
        world.ledger.check()
    assert not list(world.sessions)
    report_all(f"failures of {name}", failures, persistent=persistent)
    assert failures, "no step failed: nothing was shown"


def number(world: World) -> int:
    """The session's: failed creations use numbers up."""
    return world.session().number
