"""Promises of the project as a whole: its packaging, its documents, and what its code never does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvd", "compute", "protocol", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "protocol" / "SPEC.md"])
LONGEST_FILE = 400


PERMISSIVE = re.compile(r"Apache|BSD|MIT|Python Software Foundation|matplotlib")
SHIPPED = [
    requirement
    for extra, requirements in PROJECT["project"]["optional-dependencies"].items()
    if extra not in ("test", "fuzz")
    for requirement in requirements
]
"""Of all extras but those that only tests need."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path) -> set[str]:
    """Dotted names of everything that the file calls or imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            names.add(ast.unparse(node.func))
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class TestPackaging:
    def test_the_wheel_has_every_package(self) -> None:
        assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)

    @pytest.mark.parametrize(("script", "entry"), PROJECT["project"]["scripts"].items())
    def test_a_console_script_has_its_function(self, script, entry) -> None:
        module, function = entry.split(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    def test_the_version_is_the_daemons_own(self) -> None:
        assert f'__version__ = "{PROJECT["project"]["version"]}"' in (ROOT / "kvd" / "__init__.py").read_text()

    def test_the_base_install_brings_no_torch(self) -> None:
        assert not [name for name in PROJECT["project"]["dependencies"] if re.match("torch|triton|numpy", name)]

    def test_the_licence_is_there(self) -> None:
        assert PROJECT["project"]["license"] == "Apache-2.0"
        assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()

    @pytest.mark.parametrize("requirement", PROJECT["project"]["dependencies"] + SHIPPED, ids=str)
    def test_what_it_stands_on_may_be_used_by_anybody(self, requirement) -> None:
        """The licences that packages name: permissive ones, for what a user installs."""
        try:
            about = metadata.metadata(re.split("[<>=]", requirement)[0])
        except metadata.PackageNotFoundError:
            pytest.skip(f"{requirement} is of an extra that is not installed here")
        fields = ("License-Expression", "License", "Classifier")
        lines = [line.split("\n")[0] for field in fields for line in about.get_all(field, [])]
        named = "; ".join(line for line in lines if "::" not in line or line.startswith("License"))
        assert PERMISSIVE.search(named), named
        assert not re.search(r"GPL|Commercial|Proprietary", named), named

    @pytest.mark.parametrize("package", ["kvd", "protocol"])
    def test_daemon_and_protocol_run_without_torch(self, package) -> None:
        """Every module of the package is imported; import-linter holds the same for imports inside functions."""
        paths = [relative(path) for path in SOURCES if relative(path).startswith(f"{package}/")]
        modules = [path[:-3].replace("/", ".") for path in paths if not path.endswith("__main__.py")]
        program = (
            "import importlib, sys\n"
            f"for name in {modules!r}: importlib.import_module(name)\n"
            "print(sorted({'torch', 'triton', 'compute', 'numpy'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestCommands:
    def test_ci_runs_the_test_command_of_the_readme(self) -> None:
        script = (ROOT / ".ci" / "run").read_text()
        assert script.splitlines()[-1] == "make test"
        assert "make test" in (ROOT / "README.md").read_text()
        assert (ROOT / ".ci" / "run").stat().st_mode & 0o111

    @pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
    def test_every_make_target_in_a_document_exists(self, document) -> None:
        commands = re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z]+)", document.read_text(), re.MULTILINE)
        assert set(commands) <= targets()


class TestDocuments:
    @pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
    def test_every_link_to_a_file_resolves(self, document) -> None:
        links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text())
        assert [link for link in links if not (document.parent / link).exists()] == []

    def test_the_changelog_has_the_version_or_unreleased_changes(self) -> None:
        text = (ROOT / "CHANGELOG.md").read_text()
        assert "## [Unreleased]" in text or f"## [{PROJECT['project']['version']}]" in text


class TestSources:
    @pytest.mark.parametrize("path", SOURCES + TESTS, ids=relative)
    def test_a_file_is_of_one_subject(self, path) -> None:
        lines = path.read_text().splitlines()
        assert len(lines) <= LONGEST_FILE

    @pytest.mark.parametrize("path", SOURCES, ids=relative)
    def test_no_input_is_run_as_a_program(self, path) -> None:
        """No pickle in any of its forms, nothing evaluated, no shell."""
        refused = re.compile(
            r"(pickle|cPickle|dill|marshal|shelve|cloudpickle)(\..*)?|eval|exec|torch\.(load|save)|os\.(system|popen)"
            r"|.*\.(send_pyobj|recv_pyobj)"
        )
        assert [name for name in calls(path) if refused.fullmatch(name)] == []
        assert "shell=True" not in path.read_text()

    @pytest.mark.parametrize("path", SOURCES, ids=relative)
    def test_a_module_says_what_it_is(self, path) -> None:
        assert ast.get_docstring(ast.parse(path.read_text()))

    def test_every_case_has_one_name(self) -> None:
        """Tests of the cases from the field are found by their number; a number is one of the list's."""
        names = re.findall(r"def (test_case_\w+)", "\n".join(path.read_text() for path in TESTS))
        assert all(re.match(r"test_case_(0[1-9]|1\d|2[0-6])_[a-z]", name) for name in names)
