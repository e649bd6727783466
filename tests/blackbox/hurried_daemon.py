"""``kvd`` whose device driver has a second signal to stop arrive in the middle of every block that it releases.

Run as ``python -m tests.blackbox.hurried_daemon run ...``.
"""

from __future__ import annotations

import os
import signal
import sys

from kvd.cli import main
from kvd.tiers.driver import DeviceBlock
from kvd.tiers.driver_cpu import CpuDriver

_release = CpuDriver.release


def _interrupted(driver: CpuDriver, block: DeviceBlock) -> None:
    _release(driver, block)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    CpuDriver.release = _interrupted  # type: ignore[assignment, method-assign]
    sys.exit(main())
