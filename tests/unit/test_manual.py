"""Manual pages: every option of every command is there, and groff finds nothing to complain about."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute import cli as worker
from kvd import cli
from kvd.commands import stat
from kvd.config import KEYS
from kvd.manual import command_page, settings_page

PARSERS = {"kvd": cli.parser, "kvd-stat": stat.parser, "kvd-worker": worker.parser}


def rendered(page: str) -> str:
    """The page as a reader sees it, on very long lines; fails on anything that groff warns of."""
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not here")
    command = [groff, "-man", "-ww", "-Kutf8", "-Tutf8", "-P-cbou", "-rLL=2000n"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.replace("\u2010", "-").replace("\u2212", "-")


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from every_parser(sub)


@pytest.mark.parametrize("name", PARSERS)
def test_a_page_has_every_option_and_what_it_means(name: str) -> None:
    parser = PARSERS[name]()
    text = rendered(command_page(parser))
    assert f"{name} - " in text
    for each in every_parser(parser):
        start = text if each is parser else text.split(f"\n{each.prog.removeprefix(f'{name} ').upper()}\n", 1)[1]
        section = (
            re.split(r"\n[A-Z][A-Z0-9 -]+\n(?! {7}examples)", start, maxsplit=1)[0] if each is not parser else text
        )
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
                continue
            for option in action.option_strings:
                assert re.search(rf"^ +(\S+, )?{re.escape(option)}\b", section, re.MULTILINE), (each.prog, option)
            if action.help:
                told = " ".join(argparse.HelpFormatter(each.prog)._expand_help(action).replace("``", "").split())
                assert told in section, (each.prog, action.dest)
        if each.epilog:
            for line in each.epilog.strip().splitlines():
                assert line.strip() in section, (each.prog, line)


def test_the_page_of_the_settings_has_every_key() -> None:
    text = rendered(settings_page())
    for key in KEYS.values():
        assert re.search(
            rf"^ +{re.escape(key.dotted)} = {re.escape(key.kind.render(key.default))}$", text, re.MULTILINE
        )
        assert key.doc.replace("``", "") in text
        assert key.variable in text


def test_text_is_text() -> None:
    parser = argparse.ArgumentParser(
        prog="it", description=".TH is \\fBnothing\\fR here, nor ^ ~ ` →", epilog="'quote\n.dot"
    )
    parser.add_argument("-x", help="'first\\n %(prog)s")
    text = rendered(command_page(parser))
    for words in (".TH is \\fBnothing\\fR here, nor ^ ~ ` →", "'quote", ".dot", "'first\\n it"):
        assert words in text


def test_the_program_writes_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvd.manual", str(tmp_path), "kvd.cli:parser", "kvd.commands.stat:parser"]
    subprocess.run(command, check=True)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert found == ["man1/kvd-stat.1", "man1/kvd.1", "man5/kvd.toml.5"]
    assert (tmp_path / "man1/kvd.1").read_text() == command_page(cli.parser())
    if shutil.which("man"):
        shown = subprocess.run(["man", "-l", tmp_path / "man1/kvd.1"], capture_output=True, text=True, check=True)
        assert "kvd admin tiers resize" in shown.stdout
