"""The examples in the documents: fenced blocks, and the comment above each that says whether it is run.

<!-- run -->                                in the world of `tests.documents.world`: each ``$ command`` (in a block
                                            of ``sh``, each line), whose output has the lines below it, in order;
                                            numbers and units may differ, … stands for anything
<!-- run exactly -->                        the same, but the lines are what they are
<!-- run on its own -->                     before there is a daemon
<!-- run after a reload: KEY = VALUE; … --> the daemon is told to reload before
<!-- not run: REASON -->                    its commands are checked to be ones that there are
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SHELLS = ("sh", "console")
OWN = ("kvd", "kvd-stat", "kvd-worker")

_FENCE = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line, and the lines that its output is said to have."""

    line: str
    expected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One fenced block; ``mark`` is the comment above it, empty for none."""

    name: str
    language: str
    text: str
    mark: str

    @property
    def is_run(self) -> bool:
        return self.mark.startswith("run")

    def commands(self) -> list[Command]:
        """Of a shell's block; lines that end with a backslash go on."""
        text = self.text.replace("\\\n", " ")
        if self.language == "sh":
            return [Command(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
        first, *rest = re.split(r"^\$ ", text, flags=re.MULTILINE)
        assert not first, f"{self.name}: output before a command"
        return [Command(part.splitlines()[0], tuple(filter(None, part.splitlines()[1:]))) for part in rest]


def blocks() -> list[Block]:
    """All of them, in the order of the documents."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            name = f"{path.relative_to(ROOT)}:{line}"
            found.append(Block(name, match["language"], match["text"], match["mark"] or ""))
    return found


def own_commands(block: Block) -> list[list[str]]:
    """The words of each call of one of our commands in a shell's block, also in an image ``engine``."""
    calls = []
    for command in block.commands():
        lexer = shlex.shlex(command.line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words, before = list(lexer), ";"
        for at, word in enumerate(words):
            if word in OWN and (before in ("sudo", "engine") or not before.strip("|&;")):
                end = next((later for later in range(at, len(words)) if not words[later].strip("|&;")), len(words))
                calls.append(words[at:end])
            before = word
    return calls


def missing(expected: tuple[str, ...], output: str, *, exactly: bool) -> list[str]:
    """Those of the expected lines that do not come in the output, in this order."""
    lines = iter(output.splitlines())
    return [line for line in expected if not any(_matches(line, found, exactly) for found in lines)]


def _matches(expected: str, found: str, exactly: bool) -> bool:
    if exactly:
        return expected.rstrip() == found.rstrip()
    pattern = ""
    for part in re.split(r"(…|\d[\d,.:-]*(?: ?[KMGT]i?B| B)?|\s+)", expected.strip()):
        if part == "…":
            pattern += ".*"
        elif part[:1].isdigit():
            pattern += r"[\d,.:-]+(?: ?[KMGT]i?B| B)?"
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    return re.fullmatch(pattern, found.strip()) is not None
