"""A lease's report block (`protocol.lease_report`) from the daemon's side.

Sealed in its size, so that reading it never fails, and in no file system, so that nobody but the lease's process and
this one has it. It is the daemon's own memory: 4 KiB, on nobody's account.
"""

from __future__ import annotations

import fcntl
import os

from protocol.errors import InvalidValue, OsFailure
from protocol.lease_report import REPORT_BYTES, REPORT_VERSION, LeaseReport, pack_report_header, unpack_report


class ReportBlock:
    """A block that nothing has been written to. Raises `OsFailure` where the system gives none."""

    def __init__(self) -> None:
        try:
            self._fd = os.memfd_create("kvd-report", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise OsFailure(f"memfd of {REPORT_BYTES} bytes: {error.strerror}", errno=error.errno) from error
        try:
            os.ftruncate(self._fd, REPORT_BYTES)
            os.pwrite(self._fd, pack_report_header(), 0)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(self._fd)
            raise OsFailure(f"memfd of {REPORT_BYTES} bytes: {error.strerror}", errno=error.errno) from error

    def open(self) -> int:
        """A descriptor for the worker; the caller closes it."""
        return os.dup(self._fd)

    def read(self) -> LeaseReport:
        """What it says now."""
        return unpack_report(os.pread(self._fd, REPORT_BYTES, 0))

    def close(self) -> None:
        os.close(self._fd)


def require_report_version(version: int) -> None:
    """Raise `InvalidValue` unless blocks of this version are read here."""
    if version != REPORT_VERSION:
        raise InvalidValue("version of the report block", version, str(REPORT_VERSION))
