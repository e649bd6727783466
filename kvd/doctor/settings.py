"""The settings of the host that ``kvd doctor --apply`` may change, by name: how each is read and written."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvd.doctor.host import Roots, chosen, shm_mount
from protocol.errors import OsFailure, PermissionRefused

NUMA_BALANCING = "kernel.numa_balancing"
COMPACTION = "vm.compaction_proactiveness"
SHMEM_ENABLED = "transparent_hugepage/shmem_enabled"
SHM_HUGE = "/dev/shm huge"


class Setting(Protocol):
    """One setting of the host."""

    def read(self) -> str:
        """Its value. Raises `OsFailure` if it cannot be read."""

    def write(self, value: str) -> None:
        """Change it. Raises `PermissionRefused` or `OsFailure`."""


@dataclass(frozen=True)
class FileSetting:
    """A file of the kernel's; one that lists all values has the one in force in brackets."""

    path: Path

    def read(self) -> str:
        try:
            text = self.path.read_text().strip()
        except OSError as error:
            raise OsFailure(f"reading {self.path}: {error.strerror}", path=str(self.path)) from error
        return chosen(text) or text

    def write(self, value: str) -> None:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_TRUNC)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)
        except PermissionError as error:
            raise PermissionRefused(f"writing {self.path}: {error.strerror}", path=str(self.path)) from error
        except OSError as error:
            raise OsFailure(f"writing {value} to {self.path}: {error.strerror}", path=str(self.path)) from error


@dataclass(frozen=True)
class HugeOfShm:
    """The option ``huge=`` of what is mounted at ``/dev/shm``, changed by ``mount -o remount``."""

    process: Path

    def read(self) -> str:
        mount = shm_mount(self.process)
        if mount is None:
            raise OsFailure("nothing is mounted at /dev/shm")
        return mount.huge

    def write(self, value: str) -> None:
        command = ["mount", "-o", f"remount,huge={value}", "/dev/shm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OsFailure(f"{' '.join(command)}: {done.stderr.strip()}")


def changeable(roots: Roots) -> dict[str, Setting]:
    """All settings that may be changed. Nothing else ever is, whatever a record says."""
    return {
        NUMA_BALANCING: FileSetting(roots.proc / "sys/kernel/numa_balancing"),
        COMPACTION: FileSetting(roots.proc / "sys/vm/compaction_proactiveness"),
        SHMEM_ENABLED: FileSetting(roots.sys / "kernel/mm/transparent_hugepage/shmem_enabled"),
        SHM_HUGE: HugeOfShm(roots.proc / "self"),
    }
