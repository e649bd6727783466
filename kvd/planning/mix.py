"""Sessions of several kinds: how many, how long, and how many of them decode at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvd.units import parse_count
from protocol.errors import InvalidValue

MOST = 10**6
_ALLOWED = "SESSIONSxTOKENS or SESSIONSxTOKENS/DECODING, such as 15x1M or 200x50K/20; K and M are 1,024 and 1,048,576"
_KIND = re.compile(r"(?P<stored>[\d_]+)x(?P<tokens>[\d_]+)(?P<unit>[KM]?)(?:/(?P<decoding>[\d_]+))?", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class SessionKind:
    """``stored`` sessions of ``tokens`` tokens in host RAM, ``decoding`` of which are open on GPUs at any time."""

    tokens: int
    stored: int
    decoding: int


def parse_mix(text: str) -> tuple[SessionKind, ...]:
    """Kinds of sessions, the longest first. Raises `InvalidValue`, naming the part that is wrong."""
    kinds = []
    for part in text.split(","):
        match = _KIND.fullmatch(part.strip())
        if match is None:
            raise InvalidValue("--mix", part, _ALLOWED)
        stored = parse_count(match["stored"], f"sessions of --mix {part}", low=1, high=MOST)
        tokens = parse_count(match["tokens"], f"tokens of --mix {part}", low=1) * _UNITS[match["unit"]]
        decoding = match["decoding"]
        open_ = stored if decoding is None else parse_count(decoding, f"decoding of --mix {part}", high=stored)
        kinds.append(SessionKind(tokens, stored, open_))
    return tuple(sorted(kinds, key=lambda kind: -kind.tokens))


def in_proportion(kinds: tuple[SessionKind, ...], sessions: int) -> tuple[SessionKind, ...]:
    """``sessions`` stored sessions of these kinds, as evenly as whole numbers go."""
    ends = list(accumulate(kind.stored for kind in kinds))
    bounds = [0, *(round(sessions * end / ends[-1]) for end in ends)]
    counts = [end - start for start, end in pairwise(bounds)]
    return tuple(_share(kind, count) for kind, count in zip(kinds, counts, strict=True))


def fullest_share(kinds: tuple[SessionKind, ...], parts: int) -> tuple[SessionKind, ...]:
    """What one of ``parts`` gets at most, where each gets as many of every kind as the others, or one more."""
    return tuple(_share(kind, -(-kind.stored // parts)) for kind in kinds)


def _share(kind: SessionKind, stored: int) -> SessionKind:
    return SessionKind(kind.tokens, stored, -(-stored * kind.decoding // kind.stored))
