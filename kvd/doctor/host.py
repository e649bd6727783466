"""The host as the checks see it, and what a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvd.config import Config
from kvd.hostcheck import HostRoots
from protocol.stats import NodeStats

Level = Literal["ok", "advice", "problem", "unknown"]


@dataclass(frozen=True)
class Finding:
    """What one check found. ``advice``: decoding is slower or at risk. ``problem``: the daemon cannot do its work.

    ``why`` says what it does to decoding, ``remedy`` what to do. ``change`` is the setting and the value that
    ``--apply`` would give it.
    """

    check: str
    level: Level
    found: str
    why: str = ""
    remedy: str = ""
    change: tuple[str, str] | None = None


@dataclass(frozen=True)
class Roots(HostRoots):
    """Where to look; other places in tests."""

    sys: Path = Path("/sys")
    etc: Path = Path("/etc")
    run: Path = Path("/run")
    usr: Path = Path("/usr")
    dev: Path = Path("/dev")


@dataclass(frozen=True)
class Host:
    """What checks look at. ``daemon`` is what a running daemon says, None if none answers."""

    config: Config
    daemon: NodeStats | None = None
    roots: Roots = Roots()

    @property
    def process(self) -> Path:
        """The daemon's process under ``/proc``; this one's while none runs."""
        return self.roots.proc / (str(self.daemon.pid) if self.daemon else "self")

    @property
    def whose(self) -> str:
        """Whose limits are looked at, in words."""
        return f"the daemon (process {self.daemon.pid})" if self.daemon else "this shell (no daemon runs)"


def read_word(path: Path) -> str | None:
    """The text of a file of the kernel's without its newline; None if there is no such file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def chosen(words: str) -> str:
    """The one that is in force of a list such as ``always [madvise] never``."""
    return words.partition("[")[2].partition("]")[0]


@dataclass(frozen=True)
class Mount:
    """A mounted file system: ``device`` names it, whatever it is mounted at. ``huge`` is its option of that name."""

    device: str
    huge: str


def shm_mount(process: Path) -> Mount | None:
    """The topmost mount at ``/dev/shm`` as a process (a folder under ``/proc``) sees it."""
    found = None
    for line in (process / "mountinfo").read_text().splitlines():
        place, _, system = line.partition(" - ")
        if place.split()[4] == "/dev/shm":
            options = [option.removeprefix("huge=") for option in system.split()[2].split(",") if "huge=" in option]
            found = Mount(place.split()[2], options[0] if options else "never")
    return found
