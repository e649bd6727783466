"""What is where a socket is to be: one that nobody listens at goes, everything else stays."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from protocol.unix_socket import remove_stale


def test_only_a_socket_that_nobody_listens_at_goes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    remove_stale(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        remove_stale(path)
        assert path.is_socket()
    remove_stale(path)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "socket", tmp_path / "target"
    target.write_text("kept")
    if kind == "file":
        path.write_text("kept")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    with pytest.raises(FileExistsError, match="not a socket"):
        remove_stale(path)
    assert path.is_dir() if kind == "folder" else path.read_text() == "kept"
    assert target.read_text() == "kept"
