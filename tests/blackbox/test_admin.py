"""``kvd admin`` against a real daemon, and who may use it."""

from __future__ import annotations

import grp
import os
from types import SimpleNamespace

import pytest

from compute.client import Client
from kvd.config import Config, load
from kvd.operators import Operators
from kvd.peers import Peer
from protocol.errors import ConfigError, KvdError, PermissionRefused
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.test_stat import command
from tests.blackbox.test_worker_death import wait_until
from tests.blackbox.worker_process import PAGE_BYTES, WorkerProcess


def admin(daemon: DaemonProcess, *arguments: str) -> tuple[int, str, str]:
    ended = command("kvd.cli", "admin", "--run-dir", str(daemon.run_dir), *arguments)
    return ended.returncode, ended.stdout, ended.stderr


def test_a_revoked_lease_is_in_quarantine_until_its_process_is_dead(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as worker:
        before = daemon.stat()
        status, said, _ = admin(daemon, "leases", "revoke", str(worker.lease))
        [lease] = daemon.stat().leases
        assert (status, lease.state) == (0, "quarantined")
        assert said == (
            f"lease {worker.lease} is quarantined: end process {worker.pid} to have its {lease.committed} bytes back\n"
        )
        assert [tier.committed for tier in daemon.stat().tiers] == [tier.committed for tier in before.tiers]
        assert sum(tier.quarantined for tier in daemon.stat().tiers) == lease.committed > 0
        assert admin(daemon, "leases", "revoke", str(worker.lease))[0] == 0, "once more changes nothing"
        status, _, complaint = admin(daemon, "sessions", "close", "victim")
        assert (status, f"is held by lease {worker.lease}" in complaint) == (64, True)
        worker.kill()
        wait_until(daemon, lambda stats: not stats.leases)
        assert [(session.name, session.state) for session in daemon.stat().sessions] == [("victim", "stored")]
        assert admin(daemon, "sessions", "close", "victim") == (0, "", "")
        assert not daemon.stat().sessions


def test_a_revoked_lease_that_holds_nothing_ends(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "lease") as worker:
        assert admin(daemon, "leases", "revoke", str(worker.lease)) == (
            0,
            f"lease {worker.lease} held nothing and has ended\n",
            "",
        )


def test_a_revoked_client_is_refused(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client, WorkerProcess(daemon.run_dir, "lease"):
        memory = client.allocate_device("cpu", 1, "tables")
        assert admin(daemon, "leases", "revoke", str(client.lease.number))[0] == 0
        with pytest.raises(KvdError, match=r"connection to .* ended|no live lease"):
            client.free_device(memory.handle)
        with pytest.raises(KvdError):
            client.create_session(
                "more", fingerprint=FINGERPRINT, encoding="q8g64", page_bytes=PAGE_BYTES, token_capacity=64
            )


def test_what_is_not_there(daemon: DaemonProcess) -> None:
    assert admin(daemon, "leases", "revoke", "99")[::2] == (70, "kvd: there is no lease 99\n")
    assert admin(daemon, "sessions", "close", "none", "--uid", "7")[::2] == (
        64,
        "kvd: uid 7 has no session 'none'\n",
    )
    assert admin(daemon, "leases", "revoke", "x")[0] == 64
    assert admin(daemon, "leases")[0] == 64


def test_lists_name_everybodys(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as worker:
        assert str(worker.pid) in admin(daemon, "leases", "list")[1]
        assert "victim" in admin(daemon, "sessions", "list")[1]


def config(group: str) -> Config:
    return load({"socket.admin_group": group}, {})


def test_members_of_the_admin_group_are_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 990)
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_name=name, gr_gid=4321, gr_mem=["daemon"]))
    operators = Operators(config("wheel"))
    for uid, gid in ((0, 0), (990, 990), (5555, 4321), (1, 1)):  # uid 1 is `daemon`, whom the group lists
        operators.require(Peer(uid, gid, 1))
    for uid, gid in ((5555, 4322), (2, 2), (4321, 1)):
        with pytest.raises(PermissionRefused, match="nor of group wheel"):
            operators.require(Peer(uid, gid, 1))
    with pytest.raises(PermissionRefused, match=r"neither root nor of the daemon's uid, 990$"):
        Operators(config("")).require(Peer(5555, 4321, 1))


def test_an_admin_group_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--socket-admin-group: socket.admin_group is 'no-such-group', which is not"):
        Operators(config("no-such-group"))
