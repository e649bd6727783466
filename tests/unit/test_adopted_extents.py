"""Extents that a reply brings are mapped some at a time; one that cannot be takes no other with it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from compute.attach import Attachment
from compute.client import Client
from compute.device import Device
from protocol.errors import DaemonUnavailable, OsFailure
from protocol.handles import Extent, SharedMemory

COUNT, NBYTES = 9, 4096


class _Device:
    """Maps nothing; refuses the segments whose numbers are ``refused``."""

    uuid = "none"
    torch_device = torch.device("cpu")

    def __init__(self, refused: set[int]) -> None:
        self._refused = refused

    def registering(self, nbytes: int) -> AbstractContextManager[None]:
        assert nbytes == COUNT * NBYTES
        return nullcontext()

    def map_shared(self, fd: int, nbytes: int, *, read_only: bool = False) -> Any:
        number = int(os.read(fd, 8))
        os.close(fd)
        if number in self._refused:
            raise OsFailure(f"no room for segment {number}")
        assert not read_only
        return SimpleNamespace(
            tensor=torch.zeros(nbytes, dtype=torch.uint8), address=(number + 1) << 32, close=lambda: None
        )

    def synchronize(self) -> None:
        pass


class _Client:
    """Hands descriptors out until it is lost."""

    def __init__(self, lost_at: int = COUNT) -> None:
        self.welcome = SimpleNamespace(devices=[SimpleNamespace(device="none")])
        self.report = None
        self._claims, self._lost_at = 0, lost_at

    def claim(self, memory: SharedMemory) -> int:
        if self._claims == self._lost_at:
            raise DaemonUnavailable("it went away")
        self._claims += 1
        fd = os.memfd_create("kvd-test-extent")
        os.pwrite(fd, str(memory.handle).encode(), 0)
        return fd


def _attachment(client: _Client, refused: set[int]) -> Attachment:
    return Attachment(cast("Client", client), cast("Device", _Device(refused)))


def _extents() -> list[Extent]:
    return [Extent(number, SharedMemory(number, NBYTES, read_only=False, grant=0)) for number in range(COUNT)]


def _mapped(attachment: Attachment) -> list[int]:
    return [number for number in range(COUNT) if attachment.has_extent(number, read_only=False)]


def test_all_are_mapped_once() -> None:
    with _attachment(_Client(), set()) as attachment:
        attachment.adopt(_extents())
        assert _mapped(attachment) == list(range(COUNT))
        assert attachment.attached_bytes == COUNT * NBYTES
        assert [attachment.extent(number).address for number in range(COUNT)] == [(n + 1) << 32 for n in range(COUNT)]


def test_one_that_is_refused_is_an_error_and_the_others_are_there() -> None:
    with _attachment(_Client(), {3, 5}) as attachment:
        with pytest.raises(OsFailure, match="segment 3"):
            attachment.adopt(_extents())
        assert _mapped(attachment) == [0, 1, 2, 4, 6, 7, 8]
        assert attachment.attached_bytes == 7 * NBYTES


def test_what_was_claimed_before_the_daemon_went_is_mapped() -> None:
    with _attachment(_Client(lost_at=4), set()) as attachment:
        with pytest.raises(DaemonUnavailable):
            attachment.adopt(_extents())
        assert _mapped(attachment) == [0, 1, 2, 3]
