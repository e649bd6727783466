"""Whether what the daemon is set to take fits into the limits above it."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator

from kvd.doctor.host import Finding, Host, read_word
from kvd.hostcheck import memory_limits
from kvd.units import format_bytes

NO_LIMIT = 1 << 62
"""Control groups of version 1 write "no limit" as a number above this one."""

LAST_SYSTEM_UID = 999
"""logind spares the objects of uids up to this one."""


def memory(host: Host) -> Iterator[Finding]:
    """``/dev/shm``, available memory, and the control groups' limits against what is set."""
    config = host.config.host
    needed = config.capacity + config.state_capacity
    for limit in memory_limits(host.roots):
        # What a running daemon has taken is no longer free, and is what it needs.
        room = limit.capacity if host.daemon else limit.free
        fits = needed <= room
        found = f"{format_bytes(limit.free)} free of {format_bytes(limit.capacity)}"
        if limit.capacity >= NO_LIMIT:
            found = "none"
        if fits:
            yield Finding(limit.name, "ok", found)
        else:
            yield Finding(
                limit.name,
                "problem",
                f"{found}; host.capacity and host.state_capacity are {format_bytes(needed)}",
                "All of it is taken at start: the daemon refuses to start.",
                "raise the limit, or lower host.capacity to a multiple of host.extent that fits",
            )


def locked_memory(host: Host) -> Iterator[Finding]:
    """``RLIMIT_MEMLOCK``."""
    limit = _limit(host, "Max locked memory")
    if limit is None or limit >= host.config.host.capacity:
        yield Finding("memlock", "ok", f"{'unlimited' if limit is None else format_bytes(limit)}, {host.whose}")
    else:
        yield Finding(
            "memlock",
            "advice",
            f"{format_bytes(limit)}, {host.whose}",
            "CUDA's registration is not counted against it, but that of other drivers is.",
            "LimitMEMLOCK=infinity (kvd.service has it), or memlock in /etc/security/limits.conf",
        )


def open_files(host: Host) -> Iterator[Finding]:
    """``RLIMIT_NOFILE`` against what the settings need."""
    limit, needed = _limit(host, "Max open files"), host.config.files_needed
    if limit is None or limit >= needed:
        yield Finding("open files", "ok", f"{limit or 'unlimited'} allowed, {needed} needed, {host.whose}")
    else:
        yield Finding(
            "open files",
            "problem",
            f"{limit} allowed, {needed} needed, {host.whose}",
            "One for each extent, session, lease and piece of VRAM: the daemon refuses to start.",
            "LimitNOFILE= in its unit (kvd.service has 524288), or lower limits.*, or a larger host.extent",
        )


def logind(host: Host) -> Iterator[Finding]:
    """``RemoveIPC``, by which logind unlinks shared memory of a user whose last session has ended."""
    uid = _daemon_uid(host)
    if not (host.roots.run / "systemd/system").is_dir():
        yield Finding("RemoveIPC", "ok", "systemd does not run here")
    elif uid <= LAST_SYSTEM_UID:
        yield Finding("RemoveIPC", "ok", f"uid {uid} is a system user, whom logind spares")
    elif not _removes_ipc(host):
        yield Finding("RemoveIPC", "ok", "off")
    else:
        yield Finding(
            "RemoveIPC",
            "problem",
            f"on, and the daemon runs as uid {uid}, which is no system user",
            "When that user's last session ends, logind unlinks all shared memory: the next start finds nothing.",
            "run the daemon as the system user kvd (kvd.service does), or RemoveIPC=no in /etc/systemd/logind.conf",
        )


def _limit(host: Host, name: str) -> int | None:
    """The hard limit of the daemon, or of this process; None for unlimited."""
    text = (host.process / "limits").read_text()
    [(_, hard)] = re.findall(rf"^{name} +(\S+) +(\S+)", text, re.MULTILINE)
    return None if hard == "unlimited" else int(hard)


def _daemon_uid(host: Host) -> int:
    if host.daemon:
        return host.process.stat().st_uid
    try:
        return pwd.getpwnam("kvd").pw_uid
    except KeyError:
        return os.geteuid()


def _removes_ipc(host: Host) -> bool:
    """The setting in force: later files win, and those in ``/etc`` win over others of the same name."""
    drop_ins = {
        path.name: path
        for root in (host.roots.usr / "lib", host.roots.run, host.roots.etc)
        for path in (root / "systemd/logind.conf.d").glob("*.conf")
    }
    files = [host.roots.etc / "systemd/logind.conf", *(drop_ins[name] for name in sorted(drop_ins))]
    values = [value for path in files for value in re.findall(r"^RemoveIPC=(\w+)", read_word(path) or "", re.MULTILINE)]
    return not values or values[-1].lower() in ("yes", "true", "on", "1")
