"""Tiers that grow and shrink while the daemon serves: by ``kvd admin tiers resize``, by a reload, across a kill."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.client import Client
from protocol.stats import TierStats
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.page_holder import PageHolder
from tests.blackbox.test_admin import admin
from tests.blackbox.test_worker_death import wait_until
from tests.leaks import orphans_expected

MIB = 1 << 20
SETTINGS = {"host_capacity": "16MiB", "host_state_capacity": "8MiB", "vram_capacity": "8MiB", "disk_capacity": "2MiB"}


@pytest.fixture
def small(run_dir: Path) -> Iterator[DaemonProcess]:
    """A daemon of four extents."""
    with DaemonProcess(run_dir, drain_timeout_s="0", disk_state_dir=str(run_dir / "state"), **SETTINGS) as process:
        yield process.wait_ready()
        if process.process.poll() is None:
            assert process.stat().ledger == "balanced"
            assert process.stop() == 0
            assert not (run_dir / "limits.json").exists()
        assert '"exception"' not in process.log


def tier(daemon: DaemonProcess, name: str = "host") -> TierStats:
    [found] = [tier for tier in daemon.stat().tiers if tier.tier == name]
    return found


def resize(daemon: DaemonProcess, key: str, size: str) -> tuple[int, str]:
    status, said, complaint = admin(daemon, "tiers", "resize", key, size)
    return status, said or complaint


def extents(daemon: DaemonProcess) -> int:
    """Segments that are extents, by the last part of their names; the part before it is of any hexadecimal digits."""
    return len([name for name in daemon.segments if name.rsplit("-", 1)[1].startswith("e")])


def test_the_host_tier_grows_and_its_memory_can_be_used(small: DaemonProcess) -> None:
    with PageHolder(small.run_dir) as worker:
        assert worker.open("one", 4) == "ok"
        assert worker.extend("one") == "out_of_capacity"
        assert resize(small, "host.capacity", "28MiB") == (0, "host.capacity: 16 MiB → 28 MiB\n")
        assert tier(small).capacity == 36 * MIB
        assert 28 * MIB < tier(small).committed < 29 * MIB
        assert worker.extend("one", 3) == "ok"
        assert worker.extend("one") == "out_of_capacity"
        assert extents(small) == 7


def test_what_is_in_use_is_not_given_up(small: DaemonProcess) -> None:
    with PageHolder(small.run_dir) as worker:
        for name in ("one", "two", "three"):
            worker.open(name)
        [one, *_] = small.stat().sessions
        status, complaint = resize(small, "host.capacity", "4MiB")
        assert status == 71
        assert complaint.startswith("kvd: host: 4194304 bytes asked; it can be as small as 12582912 now; held by ")
        assert f"lease {worker.lease} session {one.session} pages: 4194304 bytes" in complaint
        assert tier(small).capacity == 24 * MIB
        worker.close("one")
        status, complaint = resize(small, "host.capacity", "8MiB")
        assert (status, f"1 unassigned extents that leases [{worker.lease}] may still map" in complaint) == (71, True)
        assert resize(small, "host.capacity", "12MiB")[0] == 0
        worker.close("two")
        worker.close("three")
    wait_until(small, lambda stats: not stats.leases)
    assert resize(small, "host.capacity", "4MiB") == (0, "host.capacity: 12 MiB → 4 MiB\n")
    assert extents(small) == 1
    assert resize(small, "host.capacity", "20MiB")[0] == 0
    with PageHolder(small.run_dir) as worker:
        assert worker.open("all", 5) == "ok"
        worker.close("all")


def kill(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGKILL)
    daemon.wait()


def test_extents_between_which_others_were_given_up_outlive_a_kill(run_dir: Path) -> None:
    with orphans_expected():
        with DaemonProcess(run_dir, drain_timeout_s="0", **SETTINGS) as first:
            first.wait_ready()
            with PageHolder(run_dir) as worker:
                for name in ("a", "b", "c", "d"):
                    worker.open(name)
                worker.close("a")
                worker.close("c")
            wait_until(first, lambda stats: not stats.leases)
            assert resize(first, "host.capacity", "8MiB")[0] == 0  # what is left are the second and the fourth extent
            kill(first)
        with DaemonProcess(run_dir, drain_timeout_s="0", **SETTINGS) as second:
            second.wait_ready()
            assert tier(second).capacity == 16 * MIB
            assert sorted(found.name for found in second.stat().sessions) == ["b", "d"]
            with PageHolder(run_dir) as worker:
                assert worker.open("more") == "out_of_capacity"
                assert resize(second, "host.capacity", "16MiB")[0] == 0
                assert worker.open("others", 2) == "ok"
            kill(second)
        with DaemonProcess(run_dir, drain_timeout_s="0", **{**SETTINGS, "host_capacity": "20MiB"}) as third:
            third.wait_ready()  # what the settings say now is newer than what was kept
            assert tier(third).capacity == 28 * MIB
            assert {"b", "d", "others"} <= {found.name for found in third.stat().sessions}
            assert third.stop() == 0
        assert not (run_dir / "limits.json").exists()


def test_extents_that_a_reload_left_outlive_a_kill(run_dir: Path) -> None:
    file = run_dir / "kvd.toml"
    file.write_text('host.capacity = "16MiB"\nhost.extent = "4MiB"\n')
    settings = {"config": str(file), "host_capacity": None, "host_extent": None, "drain_timeout_s": "0"}
    with orphans_expected():
        with DaemonProcess(run_dir, **settings) as first:
            first.wait_ready()
            with PageHolder(run_dir) as worker:
                for name in ("a", "b", "c", "d"):
                    worker.open(name)
                for name in ("a", "b", "c"):
                    worker.close(name)
            wait_until(first, lambda stats: not stats.leases)
            file.write_text('host.capacity = "4MiB"\nhost.extent = "4MiB"\n')
            first.process.send_signal(signal.SIGHUP)
            while tier(first).capacity != 4 * MIB + 256 * MIB:
                time.sleep(0.01)
            kill(first)
        with DaemonProcess(run_dir, **settings) as second:
            second.wait_ready()
            assert [found.name for found in second.stat().sessions] == ["d"]
            assert tier(second).capacity == 4 * MIB + 256 * MIB
            assert second.stop() == 0


@pytest.mark.parametrize("text", ["", "{}", '{"limits": {"host.capacity": [16777216, 7]}, "slots": 9}', "\0"])
def test_kept_limits_that_make_no_sense_are_not_in_force(run_dir: Path, text: str) -> None:
    (run_dir / "limits.json").write_text(text)
    with DaemonProcess(run_dir, drain_timeout_s="0", **SETTINGS) as daemon:
        assert tier(daemon.wait_ready()).capacity == 24 * MIB
        assert "kept limits" in daemon.log
        assert daemon.stop() == 0


def test_limits_that_do_not_fit_are_refused(small: DaemonProcess) -> None:
    before = tier(small)
    for size, status, words in (
        ("6MiB", 78, "a multiple of 2MiB|multiples of host.extent"),
        ("9000TiB", 78, "the limit is 4096"),
        ("0", 78, "at least 2MiB"),
    ):
        ended, complaint = resize(small, "host.capacity", size)
        assert (ended, re.search(words, complaint) is not None) == (status, True), complaint
    assert resize(small, "limits.max_leases", "4")[0] == 64
    assert resize(small, "host.capacity", "many")[0] == 64
    after = tier(small)
    assert (after.capacity, after.committed, after.reserved) == (before.capacity, before.committed, 0)


def test_what_the_system_does_not_have_is_refused_in_full(run_dir: Path) -> None:
    with DaemonProcess(run_dir, host_capacity="64MiB", host_extent="64MiB", drain_timeout_s="0") as daemon:
        daemon.wait_ready()
        status, complaint = resize(daemon, "host.capacity", "250GiB")
        assert (status, re.search(r"bytes asked, \d+ free", complaint) is not None) == (71, True), complaint
        assert (tier(daemon).capacity, tier(daemon).reserved) == ((64 + 256) * MIB, 0)
        assert daemon.stat().ledger == "balanced"
        assert daemon.stop() == 0


def test_vram_and_the_state_of_sessions_and_the_disk(small: DaemonProcess) -> None:
    with Client(small.run_dir) as client:
        memory = client.allocate_device("cpu", 6 * MIB, "ring")
        temporary = client.allocate_device("cpu", 2 * MIB, "temporary")
        client.free_device(temporary.handle)
        assert tier(small, "vram:cpu").committed == 8 * MIB
        status, complaint = resize(small, "vram.capacity", "4MiB")
        assert (status, f"lease {client.lease.number} ring: 6291456 bytes" in complaint) == (71, True)
        assert resize(small, "vram.capacity", "6MiB")[0] == 0, "temporaries that nobody has are given back"
        assert tier(small, "vram:cpu").capacity == tier(small, "vram:cpu").committed == 6 * MIB
        assert resize(small, "vram.capacity", "32MiB")[0] == 0
        more = client.allocate_device("cpu", 20 * MIB, "ring")
        assert client.welcome.devices[0].capacity == 8 * MIB
        with Client(small.run_dir) as later:
            assert later.welcome.devices[0].capacity == 32 * MIB
        assert resize(small, "vram.capacity", "8000TiB")[0] == 64
        for handle in (memory.handle, more.handle):
            client.free_device(handle)
    with PageHolder(small.run_dir) as worker:
        worker.open("one")
        for name in ("two", "three", "four", "five", "six"):
            worker.open(name, 0)
        held = next(part.committed for part in tier(small).purposes if part.purpose == "session_state")
        assert held > MIB
        status, complaint = resize(small, "host.state_capacity", "1MiB")
        assert (status, f"can be as small as {held} now" in complaint) == (71, True)
        assert resize(small, "host.state_capacity", "64MiB")[0] == 0
        assert tier(small).capacity == (16 + 64) * MIB
        assert worker.save("one") == "out_of_capacity"
        assert resize(small, "disk.capacity", "64MiB")[0] == 0
        assert worker.save("one") == "ok"
        status, complaint = resize(small, "disk.capacity", "1MiB")
        assert (status, re.search(r"held by \d+-one\.kvd: \d+ bytes", complaint) is not None) == (71, True)


def test_a_reload_does_the_same_and_says_what_it_refused(run_dir: Path) -> None:
    file = run_dir / "kvd.toml"
    settings = 'host.capacity = "{}"\nhost.extent = "4MiB"\nvram.capacity = "{}"\nlog.level = "{}"\n'
    file.write_text(settings.format("16MiB", "8MiB", "info"))
    flags = {"host_capacity": None, "host_extent": None, "vram_capacity": None}
    with DaemonProcess(run_dir, drain_timeout_s="0", config=str(file), **flags) as daemon:
        daemon.wait_ready()
        assert admin(daemon, "reload-report") == (0, "the settings were read at the start only\n", "")

        def reload(*values: str) -> str:
            file.write_text(settings.format(*values))
            count = daemon.log.count('"settings reloaded"') + daemon.log.count('"reload failed')
            daemon.process.send_signal(signal.SIGHUP)
            while daemon.log.count('"settings reloaded"') + daemon.log.count('"reload failed') == count:
                time.sleep(0.01)
            return admin(daemon, "reload-report")[1]

        with PageHolder(run_dir) as worker:
            worker.open("one", 3)
            report = reload("8MiB", "16MiB", "debug")
            assert '  vram.capacity: "8MiB" → "16MiB", changed\n' in report
            assert '  log.level: "info" → "debug", changed\n' in report
            assert re.search(r'  host.capacity: "16MiB" → "8MiB", refused: host: 8388608 bytes asked; it can', report)
            assert (tier(daemon).capacity - 256 * MIB, tier(daemon, "vram:cpu").capacity) == (16 * MIB, 16 * MIB)
            worker.close("one")
        wait_until(daemon, lambda stats: not stats.leases)
        report = reload("8MiB", "16MiB", "debug")  # the same files: what was refused is tried again
        assert re.search(r'^\S+ \S+:\n  host.capacity: "16MiB" → "8MiB", changed\n$', report), report
        assert resize(daemon, "host.capacity", "20MiB")[0] == 0
        report = reload("8MiB", "16MiB", "info")  # what an operator has set stays while the setting is what it was
        assert re.search(r'^\S+ \S+:\n  log.level: "debug" → "info", changed\n$', report), report
        assert tier(daemon).capacity == (20 + 256) * MIB
        assert reload("8MiB", "16MiB", "info").endswith("nothing was different\n")
        assert "nothing changed: " in reload("x", "16MiB", "info")
        assert daemon.stop() == 0
