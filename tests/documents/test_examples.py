"""Every example in the documents: commands are run and say what the documents say, settings are ones that there are."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from compute import cli as worker
from kvd import cli, config
from kvd.commands import stat
from tests.documents.examples import ROOT, SHELLS, Block, blocks, missing, own_commands
from tests.leaks import orphans_expected

BLOCKS = {block.name: block for block in blocks()}
SHELL_BLOCKS = {name: block for name, block in BLOCKS.items() if block.language in SHELLS}
PARSERS = {"kvd": cli.parser, "kvd-stat": stat.parser, "kvd-worker": worker.parser}


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS.values() if block.language in languages]


def test_every_block_of_commands_says_whether_it_is_run() -> None:
    unmarked = [
        block.name
        for block in BLOCKS.values()
        if not block.mark.startswith(("run", "not run: ")) and (block.language in SHELLS or block.text.startswith("$ "))
    ]
    assert unmarked == []
    assert sum(block.is_run for block in BLOCKS.values()) >= 8


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """What was wrong, by block."""
    unshare = shutil.which("unshare")
    private = [unshare or "", "--mount", "--propagation", "private"]
    probe = [*private, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if unshare is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("a mount namespace of its own is not permitted here")
    with orphans_expected():
        command = [*private, sys.executable, "-m", "tests.documents.world"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, block in SHELL_BLOCKS.items() if block.is_run])
def test_commands_say_what_the_document_says(name: str, results: dict[str, list[str]]) -> None:
    assert not results[name], "\n".join(results[name])


@pytest.mark.parametrize("name", SHELL_BLOCKS)
def test_commands_that_are_not_run_are_ones_that_there_are(name: str) -> None:
    for program, *words in own_commands(SHELL_BLOCKS[name]):
        PARSERS[program]().parse_args(words)


@pytest.mark.parametrize("block", of("toml"), ids=lambda block: block.name)
def test_settings_are_ones_that_there_are(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text(block.text)
    config.load({}, {}, file)


@pytest.mark.parametrize("block", of("yaml", "python"), ids=lambda block: block.name)
def test_other_languages_can_be_parsed(block: Block) -> None:
    if block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))
    else:
        ast.parse(block.text)


def test_what_is_compared() -> None:
    told = ("saved a: 5 rows, 2.57 GiB in 1.5 s", "done … now")
    said = "x\nsaved a: 70 rows, 13 B  in 0.01 s\nmore\ndone what it does now\n"
    assert missing(told, said, exactly=False) == []
    assert missing(told, said.replace("saved a", "saved b"), exactly=False) == list(told), "in this order"
    assert missing(told[::-1], said, exactly=False) == [told[0]]
    assert missing(("a 5",), "a 6", exactly=True) == ["a 5"]
