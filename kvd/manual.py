"""Manual pages, made from what the commands themselves take: ``python -m kvd.manual DIRECTORY MODULE:FUNCTION…``.

Each function returns a command's `argparse.ArgumentParser`. Beside those pages (section 1) there is one of the settings
(section 5). ``make install`` and ``make deb`` run this in the environment that they install.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvd import __version__
from kvd.config import KEYS, RESIZABLE
from protocol.command_line import Parser, run_command

SEE_ALSO = ("kvd(1)", "kvd-stat(1)", "kvd-worker(1)", "kvd.toml(5)")
WIDTH = 78
LONGEST_USAGE = 6
_SETTINGS = "kvd.toml"


def command_page(parser: argparse.ArgumentParser) -> str:
    """The page of a command, all of its subcommands included, as roff."""
    name = parser.prog
    lines = [*_head(name, 1, _flat(parser.description or name)), ".SH SYNOPSIS", ".nf", *_usages(parser), ".fi"]
    lines += [".SH DESCRIPTION", _text(_flat(parser.description or ""))]
    lines += _options(parser, ".SH OPTIONS")
    for words, sub in _subcommands(parser):
        lines += [f".SH {_text(' '.join(words).upper())}", _text(_flat(sub.description or ""))]
        lines += [".PP", ".nf", *_usage(sub), ".fi", *_options(sub, ".SS Options"), *_epilog(sub, ".SS Notes")]
    lines += _epilog(parser, ".SH NOTES")
    return _page([*lines, *_tail(f"{name}(1)")])


def settings_page() -> str:
    """The page of the settings' file, as roff."""
    lines = _head(_SETTINGS, 5, "settings of the kvd daemon")
    lines += [".SH DESCRIPTION"]
    lines += [
        _text(
            "TOML. Read from /etc/kvd/kvd.toml, then from /etc/kvd/kvd.d/*.toml in the order of their names, then from "
            "variables KVD_*, then from flags; later ones win. An unknown key or a value outside its limits keeps the "
            "daemon from starting (exit status 78)."
        ),
        ".SH SETTINGS",
    ]
    for key in KEYS.values():
        taken = "A reload takes it up." if key.reloadable else "It needs a restart."
        if key.dotted in RESIZABLE:
            taken = "A reload takes it up if what is in use allows it."
        lines += [
            ".TP",
            f"\\fB{_text(key.dotted)}\\fR = {_text(key.kind.render(key.default))}",
            _text(f"{_flat(key.doc)} Allowed: {key.kind.allowed}. {taken} Variable {key.variable}, flag {key.flag}."),
        ]
    return _page([*lines, *_tail(f"{_SETTINGS}(5)")])


def _head(name: str, section: int, summary: str) -> list[str]:
    short = _text(summary.rstrip(".")[:1].lower() + summary.rstrip(".")[1:])
    return [f'.TH {_text(name.upper())} {section} "" "kvd {__version__}"', ".SH NAME", f"{_text(name)} \\- {short}"]


def _tail(own: str) -> list[str]:
    """References to the other pages."""
    others = [f"\\fB{_text(page[:-3])}\\fR{page[-3:]}" for page in SEE_ALSO if page != own]
    return [".SH SEE ALSO", ", ".join(others), ".PP", "/usr/share/doc/kvd"]


def _usages(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from _usage(parser)
    for _, sub in _subcommands(parser):
        if not _children(sub):
            yield from _usage(sub)


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Lines as they are; of a command with very many options, only that it has some."""
    formatter = argparse.HelpFormatter(parser.prog, width=WIDTH)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    lines = formatter.format_help().rstrip().splitlines()
    if len(lines) > LONGEST_USAGE:
        lines = [f"{parser.prog} [OPTION ...]"]
    yield from map(_text, lines)


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found


def _subcommands(
    parser: argparse.ArgumentParser, before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """All of them at any depth, each with its words."""
    for name, sub in _children(parser).items():
        yield (*before, name), sub
        yield from _subcommands(sub, (*before, name))


def _options(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    formatter = argparse.HelpFormatter(parser.prog)
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    if not actions:
        return
    yield heading
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield from (".TP", f"\\fB{_text(choice.dest)}\\fR", _text(choice.help or ""))
            continue
        told = formatter._expand_help(action) if action.help else ""
        yield from (".TP", _words(action, formatter), _text(_flat(told)))


def _words(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """``-x, --long VALUE``, or the name of a positional argument."""
    if not action.option_strings:
        return f"\\fI{_text(formatter._metavar_formatter(action, action.dest)(1)[0])}\\fR"
    value = "" if action.nargs == 0 else " " + formatter._format_args(action, action.dest.upper())
    return ", ".join(f"\\fB{_text(option)}\\fR{_text(value)}" for option in action.option_strings)


def _epilog(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    if parser.epilog:
        yield from (heading, ".nf", *(_text(line) or ".sp" for line in parser.epilog.rstrip().splitlines()), ".fi")


def _flat(text: str) -> str:
    """One paragraph, without the marks of code."""
    return re.sub(r"\s+", " ", text.replace("``", "")).strip()


def _text(text: str) -> str:
    """``text`` as roff: nothing in it is taken for a request or an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    for character, name in (("→", "->"), ("^", "ha"), ("~", "ti"), ("`", "ga")):
        escaped = escaped.replace(character, f"\\({name}")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _page(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines if line)


def main() -> int:
    """The program; returns its exit status."""
    options = Parser(prog="python -m kvd.manual", description="Write manual pages.")
    options.add_argument("directory", type=Path, help="where man1 and man5 are made")
    options.add_argument("parsers", nargs="+", metavar="MODULE:FUNCTION", help="what returns a command's parser")

    def act() -> int:
        parsed = options.parse_args()
        for section in ("man1", "man5"):
            (parsed.directory / section).mkdir(parents=True, exist_ok=True)
        for entry in parsed.parsers:
            module, _, function = entry.partition(":")
            parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
            (parsed.directory / "man1" / f"{parser.prog}.1").write_text(command_page(parser))
        (parsed.directory / "man5" / f"{_SETTINGS}.5").write_text(settings_page())
        return 0

    return run_command("python -m kvd.manual", act)


if __name__ == "__main__":
    sys.exit(main())
