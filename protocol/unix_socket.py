"""What stands where a UNIX socket is to be made, before it is."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path


def remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens at any more. One that somebody listens at stays, and binding it fails.

    Raises `FileExistsError` for anything that is not a socket, and leaves it.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "a file that is not a socket is there; it is left as it is", str(path))
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
