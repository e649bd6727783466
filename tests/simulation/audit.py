"""What the daemon has, held against the model: books, sessions, pages, segments, files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from kvd.sessions.registry import Sessions
from kvd.tiers.disk import SAVED, session_of_file
from protocol.errors import KvdError
from protocol.messages import ErrorReply, Reply, Request
from tests.simulation.daemon import SimulatedDaemon
from tests.simulation.model import Image, Key, Model, Page, Session, agree
from tests.simulation.observer import Observer
from tests.simulation.system import System
from tests.simulation.worker import SimulatedWorker, Speaker

MIB = 1 << 20
EXTENTS, EXTENT_BYTES = 5, 2 * MIB
STATE_BYTES = 500 << 10
VRAM_BYTES = 8 * MIB
DISK_BYTES = 3 * MIB
UIDS = (1001, 1002, 1003)
BEING_SAVED = "being saved"
FAULT_CODES = {"os_failure", "out_of_capacity"}
LEDGER_EVERY, DEEP_EVERY = 3, 40
FAULTS = (
    *("pwrite", "pwrite", "pwrite", "ftruncate", "shm_open", "posix_fallocate", "preadv", "fsync", "rename", "create"),
    *("memfd_create", "mmap", "populate", "copy_file_range"),
)
"""Kinds of calls that fail, those more often that more depends on."""

Ask = tuple[Speaker, Callable[[int], Request]]
Steps = Generator[Ask, Reply, None]


class SimulationFailure(AssertionError):
    """The daemon did what the model says it must not."""


@dataclass(eq=False)
class Operation:
    """One request on its way: what it may leave behind if the daemon dies amid it, by session; None for nothing."""

    name: str
    steps: Steps | None = None
    touched: dict[Key, list[Image | None]] = field(default_factory=dict)
    was_delayed: bool = False
    fired: bool = False
    code: str = ""
    failed_spills: int = 0
    """When it began."""
    speaker_of: int = 0
    """The pid of the worker that waits for it."""
    number: int = 0
    """Of the session that it would close; 0 where it goes by name."""
    ended: Session | None = None
    """The session that it has ended, though it is not answered yet."""


class Audit:
    """The checks. `tests.simulation.world.World` is what is checked."""

    daemon: SimulatedDaemon
    system: System
    model: Model
    observer: Observer
    prefix: str
    workers: list[SimulatedWorker]
    pending: dict[tuple[bytes, int], Operation]
    current: Operation | None
    zombies: dict[Key, Image]
    """Spilled files that could not be removed when their session came back."""
    returning: set[Key]
    """Sessions that have come back from disk, and whose files may still be there: until they are whole, or end."""
    incomplete: set[Key]
    """Those whose files were kept, for absent pages, when files were looked at last."""
    kept_files: set[Key]
    """The same, with those of the time before that."""
    has_come_back: bool
    """Whether a session has come back from disk in this step."""
    done: Counter[str]
    steps_done: int

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            logged = "".join(f"\n{line}" for line in self.daemon.log.failures)
            raise SimulationFailure(f"step {self.steps_done}: {what}{logged}")

    def settle(self, operation: Operation, reply: Reply, must: set[str], may: set[str] | None = None) -> bool:
        """Whether the request was done. ``must``: every reason against it that there is; ``may``: there might be."""
        name = operation.name
        if not isinstance(reply, ErrorReply):
            if self.has_come_back:  # after this was done, perhaps: then there was room
                must = must - {"out_of_capacity"}
            self.require(not must, f"{name} was done in spite of {sorted(must)}")
            return True
        allowed = must | (may or set())
        if operation.fired:
            allowed |= FAULT_CODES
        failed_spills = self.daemon.log.warnings["session not spilled"]
        if any(session.lost for session in self.registry):
            allowed |= {"saved_refused", "os_failure"}
        if any(session.busy and not self.is_busy(session) for session in self.model.memory.values()):
            allowed |= {"session_busy"}
        if operation.was_delayed and "unknown_lease" in must:  # its session may have ended before its lease
            allowed |= {"unknown_session"}
        if self.pending or self.is_reading or failed_spills > operation.failed_spills:
            allowed |= {"out_of_capacity"}
        self.require(reply.code in allowed, f"{name}: {reply.code} ({reply.message}); allowed: {sorted(allowed)}")
        return False

    def is_busy(self, session: Session) -> bool:
        """Whether it was busy whenever in this step something was done."""
        return bool(session.busy) and session.busy_since != self.steps_done

    @property
    def is_reading(self) -> bool:
        """Whether pages are being read: their frames are nobody else's, even if their session ends."""
        return bool(self.registry.frames._kept)

    def actual(self) -> dict[Key, Any]:
        """The daemon's sessions."""
        return {(session.header.uid, session.name): session for session in self.registry}

    @property
    def registry(self) -> Sessions:
        return self.daemon.node.sessions

    def new_pages(self, session: Session, frames: tuple[int, ...]) -> list[Page]:
        """Pages for ``frames``, which must be nobody's, and where only this uid may be."""
        used = {page.frame for page in self.model.pages()}
        others = {
            page.frame >> 32: (other.uid, other.kind.stride)
            for other in self.model.memory.values()
            for page in other.pages
        }
        for frame in frames:
            self.require(frame not in used, f"frame {frame:#x} is somebody's already")
            kind = others.get(frame >> 32, (session.uid, session.kind.stride))
            mapped = [
                lease.number
                for lease in self.model.leases.values()
                if lease.uid != session.uid and frame >> 32 in lease.extents
            ]
            self.require(not mapped, f"extent {frame >> 32} may be mapped by leases {mapped} of others")
            self.require(kind == (session.uid, session.kind.stride), f"extent {frame >> 32} is another uid's or kind's")
        self.require(len(set(frames)) == len(frames), "a frame was given twice")
        return [Page(frame) for frame in frames]

    def reconcile_spilled(self) -> None:
        """Take in what the daemon has moved between memory and disk by itself."""
        model, actual = self.model, self.actual()
        for each in [*self.pending.values(), *([self.current] if self.current else [])]:
            if each.name in ("close", "end_session") and each.ended is None:
                for key in each.touched.keys() & model.memory.keys() - actual.keys() - self.registry.spilled:
                    if each.number in (0, model.memory[key].number):
                        each.ended = model.memory.pop(key)
        for key in [key for key in model.memory if key not in actual and key in self.registry.spilled]:
            session = model.memory.pop(key)
            self.require(session.busy != "", f"{key} was spilled out of the blue")
            self.require(not session.holder, f"{key} was spilled while lease {session.holder} holds it")
            model.spilled[key] = session.image()
            self.zombies.pop(key, None)
            self.returning.discard(key)
            self.done["spilled"] += 1
        for key, session in actual.items():
            known = model.memory.get(key)
            if known is None and key in model.spilled:
                self.came_back(key, session.number)
        fresh = [
            known
            for key, known in model.memory.items()
            if key in actual and actual[key].busy == BEING_SAVED and not known.busy
        ]
        for key, known in model.memory.items():
            busy = actual[key].busy if key in actual else known.busy
            if known.busy == BEING_SAVED and not busy and key in self.observer.files("spilled"):
                found = self.observer.file(key, "spilled")  # it has its name, and then the daemon failed
                if found != self.zombies.get(key):
                    self.same_image(key, found, known.image())
                    self.returning.discard(key)
                self.zombies[key] = found
            known.busy = busy
        for known in fresh:
            known.busy_since = self.steps_done
            self.became_busy(known)
        for key, known in model.memory.items():
            if key in actual:
                known.absent = set(actual[key].absent)

    def became_busy(self, session: Session) -> None:
        """What nobody asked to save is being spilled: it must be the least recently used idle one."""
        if any(operation.name == "save" and session.key in operation.touched for operation in self.pending.values()):
            return
        current = self.current
        if current is not None and current.name == "save" and session.key in current.touched:
            return
        self.require(
            not session.holder and not session.is_damaged, f"{session.key} became {session.busy} but is not idle"
        )
        now = self.actual()
        under_way = [*self.pending.values(), *([current] if current is not None else [])]
        spared = {key for each in under_way if each.name == "open_stored" for key in each.touched}
        older = [
            other.key
            for other in self.model.memory.values()
            if other.key in now.keys() - spared
            and not (other.holder or other.is_damaged or other.busy or other.absent or now[other.key].absent)
            and other.stored_at < session.stored_at
        ]
        if not self.model.limits.host_per_uid:
            self.require(not older, f"{session.key} is spilled before {older}, which were idle longer")

    def came_back(self, key: Key, number: int) -> None:
        """A spilled session is in memory again: with all that it had."""
        image = self.model.spilled.pop(key)
        self.appear(key, number, image)
        self.has_come_back = True
        self.done["came back"] += 1
        if self.actual()[key].absent:
            self.done["came back later"] += 1
        if key in self.observer.files("spilled"):
            self.zombies[key] = image
            self.returning.add(key)

    def has_ended(self, key: Key) -> None:
        """A session was ended: it must not be on disk, where it was before it came back."""
        self.forget_removed_zombies()
        self.require(key not in self.returning, f"{key} has ended and is still on disk")

    def appear(self, key: Key, number: int, image: Image) -> Session:
        """A stored session that was made of ``image``."""
        header, frames, found = self.observer.session(number)
        self.same_image(key, found, image)
        is_opened = self.actual()[key].lease is not None  # by whoever had it come back
        wanted = image.generation + 1 + is_opened
        self.require(header.generation == wanted, f"{key} came back at generation {header.generation}")
        session = Session(key[0], key[1], number, image.kind, image.capacity, image.generation + 1)
        session.pages = self.new_pages(session, frames)
        self.fill(session, image)
        session.stored_at = self.model.next_time()
        self.model.add(session)
        return session

    def fill(self, session: Session, image: Image) -> None:
        """Have the session be as ``image`` says."""
        session.rows = session.logical = image.rows
        session.tokens, session.payload, session.sampler = list(image.tokens), image.payload, image.sampler
        for page, (head, tail) in zip(session.pages, image.pages, strict=False):
            page.head, page.tail = head, tail

    def same_image(self, key: Key, found: Image, wanted: Image) -> None:
        for part in ("kind", "capacity", "rows", "tokens", "payload", "sampler", "pages"):
            have, want = getattr(found, part), getattr(wanted, part)
            self.require(
                agree(have, want) if part == "pages" else have == want,
                f"{key}: {part} {have!r:.200} instead of {want!r:.200}",
            )

    def check(self) -> None:
        """After every step: the books, and who is there; now and then everything."""
        self.system_is_sound()
        self.reconcile_spilled()
        model, actual = self.model, self.actual()
        self.require(
            {key: session.number for key, session in actual.items()}
            == {key: session.number for key, session in model.memory.items()},
            f"sessions {sorted(actual)} instead of {sorted(model.memory)}",
        )
        spilled = self.registry.spilled
        self.require(spilled == set(model.spilled), f"spilled: {spilled} instead of {set(model.spilled)}")
        for key, session in actual.items():
            known = model.memory[key]
            holder = session.lease.number if session.lease else 0
            self.require(
                (holder, session.header.generation, len(session.frames))
                == (known.holder, known.generation, len(known.pages)),
                f"{key} is held by {holder} at {session.header.generation} with {len(session.frames)} pages",
            )
        self.check_books()
        if self.steps_done % DEEP_EVERY == 0:
            self.check_deep()

    def system_is_sound(self) -> None:
        self.require(not self.daemon.log.failures, f"logged: {self.daemon.log.failures}")

    def check_books(self) -> None:
        if self.steps_done % LEDGER_EVERY == 0:
            try:
                self.daemon.node.ledger.check()
            except KvdError as error:
                raise SimulationFailure(f"step {self.steps_done}: {error}") from error
        purposes = self.daemon.node.ledger.purposes("host")
        have = {
            purpose: purposes[purpose].committed if purpose in purposes else 0
            for purpose in ("pages", "shared_pages", "session_state")
        }
        pages, blocks = have["pages"] + have["shared_pages"], have["session_state"]
        want = self.model.page_bytes(), self.model.block_bytes()
        # What is being read from disk is on the books, and nobody sees it.
        is_preparing = self.is_reading or any(each.name in ("restore", "open_stored") for each in self.pending.values())
        self.require(
            (pages, blocks) == want or (is_preparing and pages >= want[0] and blocks >= want[1]),
            f"pages and blocks take {pages}, {blocks} bytes instead of {want}",
        )
        leases = {lease.number: lease.quarantined for lease in self.daemon.node.leases}
        self.require(
            leases == {lease.number: lease.quarantined for lease in self.model.leases.values()}, f"leases {leases}"
        )
        vram = self.daemon.node.ledger.total("vram:cpu").committed
        self.require(vram >= self.model.vram_in_use(), f"VRAM takes {vram} bytes")

    def check_deep(self) -> None:
        """Everything that is in memory and on disk, read from outside."""
        for session in self.model.memory.values():
            if session.is_damaged:
                continue
            header, frames, found = self.observer.session(session.number)
            self.same_image(session.key, found, session.image())
            self.require(frames == tuple(page.frame for page in session.pages), f"{session.key}: frames {frames}")
            holder = self.model.leases[session.holder].pid if session.holder else 0
            self.require(
                (header.generation, header.uid) == (session.generation, session.uid), f"{session.key}: {header}"
            )
            self.require(self.system.fired > 0 or header.holder_pid in (holder, 0) or not holder, f"holder of {header}")
        if not self.pending:
            numbers = [session.number for session in self.model.memory.values()]
            want = self.observer.expected_segments(EXTENTS, numbers)
            missing_extents = {f"{self.prefix[1:]}-e{number}" for number in range(EXTENTS)}
            found_names = self.observer.segments()
            self.require(found_names | missing_extents == want, f"segments {found_names ^ want}")
            self.forget_removed_files()
            sizes = {key: image.file_bytes for key, image in self.model.saved.items()}
            files = self.observer.files("kvd")
            self.require(files == sizes, f"saved files {files} instead of {sizes}")
            self.forget_removed_zombies()
            sizes = {key: image.file_bytes for key, image in {**self.zombies, **self.model.spilled}.items()}
            files = self.observer.files("spilled")
            self.require(files == sizes, f"spilled files {files} instead of {sizes}")
            if not self.daemon.steps.waiting:
                kept = {key for key in self.returning if not self.actual()[key].absent}
                self.require(not kept, f"{kept} are whole and still on disk")

    def hibernation_failed(self) -> None:
        """Some sessions had no room on disk: all are in memory still, and those that were written are there twice."""
        for key in self.observer.files("spilled").keys() - self.model.spilled.keys():
            known = key in self.model.memory or key in self.zombies
            self.require(known, f"{key} is on disk, and was never there")
            self.zombies[key] = self.observer.file(key, "spilled")
            self.returning.discard(key)
        self.forget_removed_files()

    def pinned(self) -> set[Key]:
        """Sessions whose saved files are kept, whatever room is needed, because pages are read from them."""
        copies = self.daemon.node.copies
        assert copies is not None
        files = [session_of_file(pin.name) for pin in copies.directory._pins]
        return {(uid, name) for uid, name, kind in files if kind == SAVED}

    def forget_removed_files(self) -> None:
        """Saved files that went for others: the least recently used."""
        files = self.observer.files("kvd")
        under_way = {key for each in self.pending.values() if each.name in ("save", "remove") for key in each.touched}
        before, self.incomplete = self.incomplete, self.pinned()
        self.kept_files = before | self.incomplete
        let_go = self.kept_files - self.incomplete - under_way
        under_way |= self.kept_files
        order = [key for key in self.model.saved_order if key not in under_way]
        gone = [key for key in order if key not in files]
        self.require(gone == order[: len(gone)], f"{gone} went, of {order}")
        for key in [*gone, *(let_go & self.model.saved.keys() - files.keys())]:
            del self.model.saved[key]
            self.model.saved_order.remove(key)

    def forget_removed_zombies(self) -> None:
        files = self.observer.files("spilled")
        self.zombies = {key: image for key, image in self.zombies.items() if key in files}
        self.returning &= self.zombies.keys()
