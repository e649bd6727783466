"""The books of all tiers: who holds how much, and whether that agrees with what the system really gave.

Three numbers, never one word "used": *requested* is what was asked for, *committed* what the operating system or the
driver gave up for it, *capacity* the limit of the tier. Bytes that are *reserved* are neither yet: they count against
the capacity from before an allocation is tried until it is committed or rolled back.

The ledger records; it allocates nothing. What it cannot tell: memory that others take from the same device, and memory
that a process keeps by holding a mapping after its owner released it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from types import TracebackType
from typing import Self

from kvd.alloc.sizes import require_size
from protocol.errors import InvalidValue, LedgerMismatch, OutOfCapacity

NAMED_HOLDERS = 5
"""How many of the largest holders an out-of-capacity error names."""


@dataclass(frozen=True, slots=True)
class Account:
    """Who holds bytes of a tier, and what for. Lease 0 is the daemon itself, session 0 is none."""

    tier: str
    lease: int
    session: int
    purpose: str

    def __str__(self) -> str:
        lease = f"lease {self.lease}" if self.lease else "kvd"
        session = f" session {self.session}" if self.session else ""
        return f"{lease}{session} {self.purpose}"


@dataclass(frozen=True, slots=True)
class Balance:
    """Bytes at one moment, and the highest that *requested* and *committed* have been."""

    requested: int
    committed: int
    reserved: int
    peak_requested: int
    peak_committed: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What one account holds. ``quarantined``: its lease is lost and its process not yet known dead."""

    account: Account
    balance: Balance
    quarantined: bool


class _Count:
    """The running form of a `Balance`."""

    __slots__ = ("committed", "peak_committed", "peak_requested", "requested", "reserved")

    def __init__(self) -> None:
        self.requested = self.committed = self.reserved = self.peak_requested = self.peak_committed = 0

    def add(self, requested: int, committed: int, reserved: int) -> None:
        self.requested += requested
        self.committed += committed
        self.reserved += reserved
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_committed = max(self.peak_committed, self.committed)

    def is_empty(self) -> bool:
        return not (self.requested or self.committed or self.reserved)

    def balance(self) -> Balance:
        return Balance(self.requested, self.committed, self.reserved, self.peak_requested, self.peak_committed)

    def is_sound(self) -> bool:
        """Whether it has no `problems`."""
        return (
            0 <= self.requested <= self.committed
            and self.reserved >= 0
            and self.requested <= self.peak_requested
            and self.committed <= self.peak_committed
        )

    def problems(self) -> Iterator[str]:
        """Whatever no sequence of operations may lead to."""
        if min(self.requested, self.committed, self.reserved) < 0:
            yield f"negative: requested {self.requested}, committed {self.committed}, reserved {self.reserved}"
        if self.requested > self.committed:
            yield f"requested {self.requested} > committed {self.committed}"
        if self.peak_requested < self.requested or self.peak_committed < self.committed:
            yield (
                f"peaks {self.peak_requested}, {self.peak_committed} are below "
                f"requested {self.requested}, committed {self.committed}"
            )


@dataclass
class _Tier:
    capacity: int
    total: _Count = field(default_factory=_Count)
    accounts: dict[Account, _Count] = field(default_factory=dict)
    purposes: dict[str, _Count] = field(default_factory=dict)
    auditors: list[Callable[[], int]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.capacity - self.total.committed - self.total.reserved


class Reservation:
    """Bytes set aside for an allocation that is under way. Used as a context manager it rolls back unless committed."""

    def __init__(self, ledger: Ledger, account: Account, requested: int, bound: int) -> None:
        self._ledger = ledger
        self._account = account
        self._requested = requested
        self._bound = bound
        self._open = True

    def commit(self, committed: int) -> None:
        """The allocation succeeded and took ``committed`` bytes, between *requested* and the bound reserved for it."""
        if not self._requested <= committed <= self._bound:
            raise LedgerMismatch(
                f"{self._account}: committed {committed} is not between requested {self._requested} "
                f"and reserved {self._bound}"
            )
        self._settle(self._requested, committed)

    def roll_back(self) -> None:
        """The allocation failed, and everything it had taken was given back."""
        self._settle(0, 0)

    def _settle(self, requested: int, committed: int) -> None:
        if not self._open:
            raise LedgerMismatch(f"{self._account}: the reservation of {self._bound} bytes is settled already")
        self._open = False
        self._ledger._settle(self._account, requested, committed, self._bound)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._open:
            self.roll_back()


class Ledger:
    """The books. One thread uses them: the daemon's.

    An account exists while it holds or reserves anything, so its peaks last as long; those of a tier and of a purpose
    last as long as the tier. Any operation that would leave an account negative, or with more requested than
    committed, raises `LedgerMismatch` and changes nothing.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, _Tier] = {}
        self._lease_accounts: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self.changes = 0
        """Rises with every change: what was found at the same number holds."""

    def add_tier(self, tier: str, capacity: int) -> None:
        """A new tier of ``capacity`` bytes; raises `InvalidValue` if there is one of this name."""
        require_size(f"capacity of {tier}", capacity, least=0)
        self.changes += 1
        if tier in self._tiers:
            raise InvalidValue("new tier", tier, "a name that is not taken")
        self._tiers[tier] = _Tier(capacity)

    def resize_tier(self, tier: str, capacity: int) -> None:
        """Change the limit; raises `InvalidValue` below what is committed and reserved."""
        books = self._tier(tier)
        self.changes += 1
        books.capacity = require_size(
            f"capacity of {tier}", capacity, least=books.total.committed + books.total.reserved
        )

    def remove_tier(self, tier: str) -> None:
        """Forget a tier that nobody holds anything of; raises `LedgerMismatch` naming the holders otherwise."""
        books = self._tier(tier)
        self.changes += 1
        if books.accounts:
            raise LedgerMismatch(f"{tier} is removed but held by {', '.join(map(str, books.accounts))}")
        del self._tiers[tier]

    def add_auditor(self, tier: str, auditor: Callable[[], int]) -> None:
        """Have `check` compare the tier's committed bytes with the sum of what its auditors find really taken."""
        self._tier(tier).auditors.append(auditor)

    def reserve(self, account: Account, requested: int, committed_bound: int) -> Reservation:
        """Set ``committed_bound`` bytes aside, the most that the allocation can take.

        Raises `OutOfCapacity`, which names the largest holders, if that much is not free.
        """
        require_size("requested bytes", requested, least=0)
        require_size("bound of committed bytes", committed_bound, least=requested)
        books = self._tier(account.tier)
        if committed_bound > books.free:
            holders = self.largest_holders(account.tier)
            raise OutOfCapacity(account.tier, committed_bound, books.free, books.capacity, holders)
        self._post(account, 0, 0, committed_bound)
        return Reservation(self, account, requested, committed_bound)

    def release(self, account: Account, requested: int, committed: int) -> None:
        """The account gave these bytes back to the operating system or the driver."""
        require_size("requested bytes", requested, least=0)
        require_size("committed bytes", committed, least=requested)
        self._post(account, -requested, -committed, 0)
        self._forget_if_empty(account)

    def transfer(
        self, source: Account, target: Account, requested: int, committed: int, *, requested_before: int | None = None
    ) -> None:
        """Committed bytes change hands within a tier, at once.

        ``requested_before`` is what the source had asked for, where that differs from what the target asks for: bytes
        that a pool holds for nobody were requested by nobody.
        """
        before = requested if requested_before is None else requested_before
        require_size("requested bytes", requested, least=0)
        require_size("requested bytes of the source", before, least=0)
        require_size("committed bytes", committed, least=max(requested, before))
        if source.tier != target.tier:
            raise InvalidValue("tier of a transfer's target", target.tier, f"that of its source, {source.tier}")
        self._post(source, -before, -committed, 0)
        self._post(target, requested, committed, 0)
        self._forget_if_empty(source)
        self._forget_if_empty(target)

    def quarantine(self, lease: int) -> int:
        """Mark all that a lost lease holds, until it holds nothing; returns its committed bytes.

        Its process is not known dead, so nothing of it may be reused.
        """
        require_size("lease", lease)
        self.changes += 1
        if lease in self._lease_accounts:
            self._quarantined.add(lease)
        return sum(entry.balance.committed for entry in self.entries() if entry.account.lease == lease)

    def quarantined_bytes(self, tier: str) -> int:
        """Committed bytes of the tier that lost leases hold."""
        if not self._quarantined:
            return 0
        return sum(entry.balance.committed for entry in self.entries(tier) if entry.quarantined)

    def tiers(self) -> list[str]:
        """The names of all tiers."""
        return list(self._tiers)

    def capacity(self, tier: str) -> int:
        """The limit of the tier."""
        return self._tier(tier).capacity

    def free(self, tier: str) -> int:
        """What can still be reserved in the tier."""
        return self._tier(tier).free

    def total(self, tier: str) -> Balance:
        """The whole tier."""
        return self._tier(tier).total.balance()

    def purposes(self, tier: str) -> dict[str, Balance]:
        """The tier by purpose, those that hold nothing now included: their peaks say what they once held."""
        return {purpose: count.balance() for purpose, count in self._tier(tier).purposes.items()}

    def entries(self, tier: str | None = None) -> Iterator[Entry]:
        """All accounts, of one tier or of all. Do not change the books while iterating."""
        for books in self._tiers.values() if tier is None else (self._tier(tier),):
            for account, count in books.accounts.items():
                yield Entry(account, count.balance(), account.lease in self._quarantined)

    def committed_by_account(self) -> Iterator[tuple[Account, int, int]]:
        """Requested and committed bytes of every account of every tier: of a thousand sessions, faster than entries."""
        for books in self._tiers.values():
            for account, count in books.accounts.items():
                yield account, count.requested, count.committed

    def largest_holders(self, tier: str, beside: Collection[str] = ()) -> list[str]:
        """Who holds most of the tier, largest first, as an out-of-capacity error names them.

        Bytes that nobody requested are a pool's to give, and held by nobody. Those of the purposes ``beside`` do not
        count.
        """
        held = [
            (count.committed + count.reserved, str(account))
            for account, count in self._tier(tier).accounts.items()
            if (count.requested or count.reserved) and account.purpose not in beside
        ]
        return [f"{holder}: {nbytes} bytes" for nbytes, holder in nlargest(NAMED_HOLDERS, held)]

    def check(self) -> None:
        """Raise `LedgerMismatch` with the arithmetic of everything that does not add up, if anything does not."""
        problems = [problem for name, books in self._tiers.items() for problem in _problems(name, books)]
        leases: dict[int, int] = {}
        for books in self._tiers.values():
            for account in books.accounts:
                leases[account.lease] = leases.get(account.lease, 0) + 1
        if leases != self._lease_accounts:
            problems.append(f"accounts by lease: {self._lease_accounts} recorded, {leases} counted")
        if not self._quarantined <= leases.keys():
            problems.append(f"leases {sorted(self._quarantined - leases.keys())} are quarantined but hold nothing")
        if problems:
            raise LedgerMismatch("; ".join(problems))

    def _tier(self, tier: str) -> _Tier:
        try:
            return self._tiers[tier]
        except KeyError:
            raise InvalidValue("tier", tier, f"one of {', '.join(self._tiers) or 'none'}") from None

    def _post(self, account: Account, requested: int, committed: int, reserved: int) -> None:
        """Add to the account, its purpose and its tier; or raise `LedgerMismatch` and change nothing."""
        self.changes += 1
        books = self._tier(account.tier)
        known = books.accounts.get(account)
        count = known or _Count()
        after = (count.requested + requested, count.committed + committed, count.reserved + reserved)
        if min(after) < 0 or after[0] > after[1]:
            raise LedgerMismatch(
                f"{account.tier} {account}: requested {count.requested} {requested:+}, "
                f"committed {count.committed} {committed:+}, reserved {count.reserved} {reserved:+}"
            )
        if known is None:
            books.accounts[account] = count
            self._lease_accounts[account.lease] = self._lease_accounts.get(account.lease, 0) + 1
        for part in (count, books.purposes.setdefault(account.purpose, _Count()), books.total):
            part.add(requested, committed, reserved)

    def _settle(self, account: Account, requested: int, committed: int, bound: int) -> None:
        self._post(account, requested, committed, -bound)
        self._forget_if_empty(account)

    def _forget_if_empty(self, account: Account) -> None:
        accounts = self._tier(account.tier).accounts
        if account not in accounts or not accounts[account].is_empty():
            return
        del accounts[account]
        self._lease_accounts[account.lease] -= 1
        if not self._lease_accounts[account.lease]:
            del self._lease_accounts[account.lease]
            self._quarantined.discard(account.lease)


def _problems(name: str, books: _Tier) -> Iterator[str]:
    """What does not add up in one tier."""
    total = books.total
    recorded = (total.requested, total.committed, total.reserved)
    for whose, parts in (("accounts", books.accounts.values()), ("purposes", books.purposes.values())):
        requested = committed = reserved = 0
        for part in parts:  # thousands of them, once a second: what is done for each is as little as can be
            requested += part.requested
            committed += part.committed
            reserved += part.reserved
        counted = (requested, committed, reserved)
        for what, parts_have, tier_has in zip(("requested", "committed", "reserved"), counted, recorded, strict=True):
            if parts_have != tier_has:
                yield f"{name}: {what} of all {whose} {parts_have} != {what} of the tier {tier_has}"
    for account, count in books.accounts.items():
        if not count.is_sound():
            yield from (f"{name} {account}: {problem}" for problem in count.problems())
    yield from (f"{name}: {problem}" for problem in total.problems())
    if total.committed + total.reserved > books.capacity:
        yield f"{name}: committed {total.committed} + reserved {total.reserved} > capacity {books.capacity}"
    if books.auditors:
        found = [auditor() for auditor in books.auditors]
        if sum(found) != total.committed:
            yield f"{name}: {' + '.join(map(str, found))} really taken != committed {total.committed}"
