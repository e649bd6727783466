"""The daemon, which restores page by page and takes its time: ``python -m tests.blackbox.lazy_daemon PAUSE NTH run …``.

Each page takes ``PAUSE`` seconds. When pages have come for the ``NTH`` time it kills itself; 0 for never.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from typing import Any

import kvd.saved.lazy
from kvd import cli
from kvd.saved.file import SavedFile
from kvd.sessions.session import Session

if __name__ == "__main__":
    kvd.saved.lazy.STEP_BYTES = 1
    pause, left = float(sys.argv[1]), int(sys.argv[2])
    read_some: Any = SavedFile.read_some
    pages_came = Session.pages_came

    def slowly(*arguments: Any) -> Any:
        time.sleep(pause)
        return read_some(*arguments)

    def killing(session: Session, pages: Collection[int]) -> None:
        global left
        pages_came(session, pages)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    SavedFile.read_some = slowly  # type: ignore[assignment, method-assign]
    Session.pages_came = killing  # type: ignore[assignment, method-assign]
    sys.exit(cli.main(sys.argv[3:]))
