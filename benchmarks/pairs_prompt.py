"""The prompt of ``kvd-bench pairs``: a real text in tokens of words, or, for long histories, rows that are random."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash

from benchmarks.random_pages import randomise
from compute.history import History
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS

_ROOT = Path(__file__).resolve().parent.parent
_WORDS = re.compile(r"\w+|[^\w\s]|\s+")
_PAGES_AT_ONCE = 8


def text_tokens(count: int, vocabulary: int, path: Path | None = None, *, repeat: bool = False) -> list[int]:
    """The first ``count`` words, marks and spaces of a text, by default the project's own, as ids below ``vocabulary``.

    A word's id is a hash of it: the same word, the same id. Raises `InvalidValue` for a text that is too short, unless
    it may be repeated.
    """
    tokens: list[int] = []
    for text in _texts(path):
        tokens += [xxhash.xxh3_64_intdigest(word.encode()) % vocabulary for word in _WORDS.findall(text)]
        if len(tokens) >= count:
            return tokens[:count]
    if repeat and tokens:
        return (tokens * (count // len(tokens) + 1))[:count]
    raise InvalidValue("tokens of the prompt", count, f"at most the {len(tokens)} that the text has")


def _texts(path: Path | None) -> Iterator[str]:
    if path is not None:
        try:
            yield path.read_text(errors="replace")
        except OSError as error:
            raise InvalidValue("--text", str(path), f"a readable file ({error.strerror})") from None
        return
    for pattern in ("*.md", "docs/**/*.md", "protocol/*.md", "protocol/*.py", "kvd/**/*.py", "compute/**/*.py"):
        for source in sorted(_ROOT.glob(pattern)):
            yield source.read_text(errors="replace")


def fill_synthetic(history: History, tokens: int, seed: int) -> torch.Tensor:
    """Append ``tokens`` rows, whole pages, that are random, with finite scales; returns the last one's hidden [H].

    Index keys are in the pages alone: they get to VRAM when the session is opened again.
    """
    size = history.format.hidden_size
    hidden = torch.empty(0)
    for first in range(0, tokens, _PAGES_AT_ONCE * PAGE_TOKENS):
        positions = history.begin(min(_PAGES_AT_ONCE * PAGE_TOKENS, tokens - first), cached=False)
        generator = torch.Generator(positions.device).manual_seed(seed + first)
        for page in range(first // PAGE_TOKENS, (first + len(positions)) // PAGE_TOKENS):
            randomise(history.page(page)[None], history.format, generator)
        hidden = torch.randn((len(positions), size), generator=generator, device=positions.device)
        history.finish(positions, hidden)
    return hidden[-1]
