"""Every commit of a worker, looked at when it is published."""

from __future__ import annotations

import pytest
import torch

from compute.device import Copy
from compute.session import HostSession
from compute.worker import Worker


def rows_follow_tokens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on copies are done where they start, and a commit may be of no row whose token is not logged.

    The rows of each commit are added to the list.
    """
    start_copy, publish, committed = worker.device.start_copy, HostSession.publish_commit, list[int]()

    def at_once(destination: torch.Tensor, source: torch.Tensor) -> Copy:
        copy = start_copy(destination, source)
        copy.wait()
        return copy

    def checked(session: HostSession, rows: int, payload: bytes = b"") -> None:
        committed.append(rows)
        assert rows <= session.state.token_count
        publish(session, rows, payload)

    monkeypatch.setattr(worker.device, "start_copy", at_once)
    monkeypatch.setattr(HostSession, "publish_commit", checked)
    return committed
