"""How the host tier is made: what is committed, what is refused, and that a failure leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import posix_ipc
import pytest

from kvd.alloc.ledger import Balance, Ledger
from kvd.tiers import mapping, segment
from kvd.tiers.host_ram import HostRam
from kvd.tiers.segment import existing_names, remove_segment
from protocol.errors import InvalidValue, OsFailure

KIB, MIB = 1024, 1024**2
PREFIX = f"/kvd-test-{os.getpid():x}"
EXTENT = 2 * MIB
PROJECT = Path(__file__).resolve().parents[2]


def names() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"{PREFIX[1:]}*"))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.check()
    assert ledger.tiers() == []
    assert names() == []


@pytest.fixture
def make(ledger: Ledger) -> Iterator[Callable[..., HostRam]]:
    made = []

    def make(extents: int = 4, **settings: object) -> HostRam:
        settings = {"capacity_bytes": extents * EXTENT, "extent_bytes": EXTENT, "prefix": PREFIX} | settings
        made.append(HostRam(ledger, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    if made:
        ledger.check()
        made[0].close()


def test_everything_is_committed_at_the_start_and_belongs_to_nobody(
    make: Callable[..., HostRam], ledger: Ledger
) -> None:
    progress: list[tuple[int, int]] = []
    host = make(progress=lambda done, total: progress.append((done, total)))
    assert ledger.total("host") == Balance(0, 4 * EXTENT, 0, 0, 4 * EXTENT)
    assert ledger.capacity("host") == host.held_bytes() == 4 * EXTENT
    assert names() == [f"{PREFIX[1:]}-e{number}" for number in range(4)]
    for name in names():
        status = Path("/dev/shm", name).stat()
        assert (status.st_mode & 0o777, status.st_size, status.st_blocks * 512) == (0o600, EXTENT, EXTENT)
    assert progress == [(done * EXTENT, 4 * EXTENT) for done in range(1, 5)]
    assert Path(f"/proc/{os.getpid()}/maps").read_text().count(PREFIX) == 0


def test_an_extent_is_populated_in_chunks(
    make: Callable[..., HostRam], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "POPULATE_CHUNK", 768 * KIB)
    progress: list[int] = []
    make(3, progress=lambda done, total: progress.append(done))
    assert len(progress) == 9
    assert progress == sorted(progress)
    assert progress[-1] == ledger.total("host").committed == 3 * EXTENT


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"capacity_bytes": 0}, "capacity of host RAM is 0"),
        ({"capacity_bytes": EXTENT + 4096}, f"capacity of host RAM is {EXTENT + 4096}; allowed: a multiple"),
        ({"capacity_bytes": 2**61}, "capacity of host RAM"),
        ({"capacity_bytes": 2**59}, "number of extents is 274877906944"),
        ({"extent_bytes": 0}, "extent bytes is 0"),
        ({"extent_bytes": 4096}, "extent bytes is 4096"),
        ({"extent_bytes": -EXTENT}, "extent bytes"),
        ({"prefix": "kvd"}, "name of shared memory is 'kvd'"),
        ({"prefix": "/kvd/../x"}, "name of shared memory"),
        ({"prefix": "/" + "k" * 201}, "name of shared memory"),
        ({"numa_node": 1024}, "NUMA node is 1024"),
        ({"numa_node": -1}, "NUMA node is -1"),
    ],
)
def test_case_22_sizes_and_names_that_are_none_are_refused(
    make: Callable[..., HostRam], settings: dict[str, object], what: str
) -> None:
    with pytest.raises(InvalidValue, match=re.escape(what)):
        make(**settings)


def test_a_name_that_is_taken_is_left_alone_and_nothing_else_is_left(
    make: Callable[..., HostRam], ledger: Ledger
) -> None:
    taken = posix_ipc.SharedMemory(f"{PREFIX}-e2", posix_ipc.O_CREX, mode=0o600, size=4096)
    taken.close_fd()
    try:
        with pytest.raises(OsFailure, match=f"creating shared memory {PREFIX}-e2: .*already exists"):
            make()
        assert names() == [f"{PREFIX[1:]}-e2"]
        assert ledger.tiers() == []
    finally:
        posix_ipc.unlink_shared_memory(f"{PREFIX}-e2")


def test_an_interrupted_start_leaves_nothing(make: Callable[..., HostRam], ledger: Ledger) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(progress=interrupt)
    assert ledger.tiers() == []
    assert names() == []


def test_memory_of_a_node_that_the_machine_does_not_have_is_refused(make: Callable[..., HostRam]) -> None:
    with pytest.raises(OsFailure, match="binding memory to NUMA node 1000: "):
        make(numa_node=1000)


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="the kernel knows no NUMA nodes")
def test_memory_comes_from_the_node_that_is_asked_for(make: Callable[..., HostRam], ledger: Ledger) -> None:
    make(numa_node=0)
    assert ledger.total("host").committed == 4 * EXTENT


def test_a_machine_whose_system_calls_are_not_known_is_refused(
    make: Callable[..., HostRam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_SYS_MBIND", {})
    with pytest.raises(OsFailure, match="binding memory to a NUMA node is not known"):
        make(numa_node=0)


def test_what_a_dead_daemon_left_is_found_and_nothing_else() -> None:
    ours = [f"{PREFIX}-e{number}" for number in range(3)]
    other = f"{PREFIX}f-e0"
    for name in [*ours, other]:
        posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).close_fd()
    directory = Path("/dev/shm", f"{PREFIX[1:]}-directory")
    directory.mkdir()
    try:
        assert existing_names(PREFIX) == ours
        for name in ours:
            remove_segment(name)
        assert existing_names(PREFIX) == []
        assert names() == [directory.name, other[1:]]
    finally:
        directory.rmdir()
        posix_ipc.unlink_shared_memory(other)
    for prefix in ("", "/", "/*", "kvd"):
        with pytest.raises(InvalidValue):
            existing_names(prefix)


def in_own_shared_memory(mount: str, script: str) -> None:
    """Run a script that has a tmpfs of its own on /dev/shm; skip where that is not permitted."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace of its own is not permitted here")
    command = f'mount -t tmpfs -o {mount} tmpfs /dev/shm && exec {sys.executable} -c "$SCRIPT"'
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", command],
        cwd=PROJECT,
        env={**os.environ, "SCRIPT": textwrap.dedent(script)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 32:
        pytest.skip(f"a tmpfs cannot be mounted here with {mount}: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("checked", [True, False])
def test_case_26_a_mount_that_is_too_small_is_out_of_capacity_at_creation(checked: bool) -> None:
    """Once by the check beforehand; once without it, as when others fill the mount meanwhile: no SIGBUS, no rest."""
    in_own_shared_memory(
        "size=8m",
        f"""
        import os
        from kvd.alloc.ledger import Ledger
        from kvd.tiers import segment
        from kvd.tiers.host_ram import HostRam
        from protocol.errors import OutOfCapacity

        if not {checked}:
            segment.require_memory = lambda nbytes: None
        ledger = Ledger()
        for capacity, extent in ((64 << 20, 64 << 20), (64 << 20, 16 << 20), (10 << 20, 2 << 20)):
            try:
                HostRam(ledger, capacity_bytes=capacity, extent_bytes=extent, prefix="/kvd-case-26")
            except OutOfCapacity as error:
                assert "shared memory mount /dev/shm" in str(error), error
                assert error.facts["capacity"] == 8 << 20, error
            else:
                raise AssertionError("no error")
            assert os.listdir("/dev/shm") == []
            assert ledger.tiers() == []
            assert os.statvfs("/dev/shm").f_bfree == os.statvfs("/dev/shm").f_blocks
        host = HostRam(ledger, capacity_bytes=8 << 20, extent_bytes=2 << 20, prefix="/kvd-case-26")
        ledger.check()
        host.close()
        """,
    )


def test_huge_pages_commit_no_more_than_was_asked() -> None:
    in_own_shared_memory(
        "size=64m,huge=advise",
        """
        import os, re
        from kvd.alloc.ledger import Account, Ledger
        from kvd.tiers.host_ram import HostRam

        ledger = Ledger()
        host = HostRam(ledger, capacity_bytes=32 << 20, extent_bytes=8 << 20, prefix="/kvd-huge")
        kilobytes = int(re.search(r"ShmemHugePages: +(\\d+)", open("/proc/meminfo").read())[1])
        assert kilobytes > 0
        assert host.damaged_extents() == []
        ledger.check()
        host.close()
        """,
    )
