"""docs/messages.md has every line that the daemon logs: the message, its level, what it carries; and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVELS = ("debug", "info", "warning", "error", "exception")
PROGRESS = ("saving", "restoring")
"""What `kvd.saved.copies` logs the progress of."""


def logged() -> dict[str, tuple[str, set[str]]]:
    """By message: its level and the names of what it can carry."""
    levels: dict[str, str] = {}
    fields: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "kvd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
                continue
            if not ast.unparse(node.func.value).endswith("log"):
                continue
            message = node.args[0]
            for text in [message.value] if isinstance(message, ast.Constant) else PROGRESS:
                assert isinstance(text, str)
                assert levels.setdefault(text, node.func.attr) == node.func.attr, text
                fields[text].update(keyword.arg for keyword in node.keywords if keyword.arg)
    return {text: (level, fields[text]) for text, level in levels.items()}


def test_the_document_has_every_message() -> None:
    rows = re.findall(
        r"^\| `(.+?)` \| (\w+) \|\s*(.*?)\s*\| .+ \|$", (ROOT / "docs/messages.md").read_text(), re.MULTILINE
    )
    documented = {text: (level, set(re.findall(r"`(\w+)`", fields))) for text, level, fields in rows}
    assert documented == logged()
    assert len(rows) == len(documented)


def test_progress_is_of_what_it_is_said_to_be() -> None:
    assert tuple(sorted(re.findall(r'_Progress\(self\._log, "(\w+)"', (ROOT / "kvd/saved/copies.py").read_text()))) == (
        tuple(sorted(PROGRESS))
    )
