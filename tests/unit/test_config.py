"""Settings: where they come from, what is refused, and that the documentation has all of them."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import cli
from kvd.config import KEYS, Config, load
from kvd.settings import exact_size
from kvd.units import parse_bytes
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def test_later_sources_win_and_origins_are_kept(tmp_path: Path) -> None:
    system, directory = tmp_path / "kvd.toml", tmp_path / "kvd.d"
    directory.mkdir()
    system.write_text('device = "cpu"\nlog.level = "error"\n[host]\ncapacity = "2GiB"\n[limits]\nmax_leases = 1\n')
    (directory / "20-b.toml").write_text("limits.max_leases = 3\nlimits.max_handles = 5\n")
    (directory / "10-a.toml").write_text("limits.max_leases = 2\nhost.capacity = 3221225472\n")
    (directory / "notes.txt").write_text("not a setting")
    config = load(
        {"limits.max_sessions": "9"},
        {"KVD_LIMITS_MAX_SESSIONS": "8", "KVD_LIMITS_MAX_HANDLES": "6", "PATH": "/bin"},
        system_file=system,
        directory=directory,
    )
    assert config.limits == dataclasses.replace(config.limits, max_leases=3, max_handles=6, max_sessions=9)
    assert (config.device, config.log.level, config.host.capacity) == ("cpu", "error", 3 * GIB)
    assert {dotted: origin for dotted, origin in config.origins.items() if origin != "default"} == {
        "device": str(system),
        "log.level": str(system),
        "host.capacity": str(directory / "10-a.toml"),
        "limits.max_leases": str(directory / "20-b.toml"),
        "limits.max_handles": "KVD_LIMITS_MAX_HANDLES",
        "limits.max_sessions": "--limits-max-sessions",
    }


def test_a_given_file_takes_the_place_of_the_systems(tmp_path: Path) -> None:
    system, directory, given_file = tmp_path / "kvd.toml", tmp_path / "kvd.d", tmp_path / "mine.toml"
    directory.mkdir()
    system.write_text('log.level = "error"')
    (directory / "a.toml").write_text('log.level = "warning"')
    given_file.write_text('device = "cpu"')
    config = load({}, {}, given_file, system_file=system, directory=directory)
    assert (config.device, config.log.level) == ("cpu", "info")
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load({}, {}, tmp_path / "absent.toml")


def refusal(text: str, tmp_path: Path) -> str:
    path = tmp_path / "kvd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load({}, {}, path)
    assert refused.value.exit_status == 78
    return refused.value.message.replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host.capacty = 1", "FILE: unknown key 'host.capacty'; the nearest known is 'host.capacity'"),
        ("[hots]\ncapacity = 1", "FILE: unknown key 'hots'"),
        ("host = 5", "FILE: unknown key 'host'"),
        ("zzzzzz = 1", "FILE: unknown key 'zzzzzz'; known: run_dir, device"),
        ('host.capacity = "lots"', "FILE: host.capacity is 'lots'; allowed: bytes, at least 2MiB, a multiple of 2MiB"),
        ("host.capacity = 0", "FILE: host.capacity is 0; allowed"),
        ("host.capacity = -2097152", "FILE: host.capacity is -2097152; allowed"),
        ("host.capacity = 2097153", "FILE: host.capacity is 2097153; allowed"),
        ("host.capacity = true", "FILE: host.capacity is True; allowed"),
        ("host.capacity = 1.5", "FILE: host.capacity is 1.5; allowed"),
        ("host.capacity = 9223372036854775807", "FILE: host.capacity is"),
        ('host.capacity = "1536MiB"', "FILE); allowed: multiples of host.extent, 1GiB (default)"),
        (
            'host.extent = "2MiB"\nhost.capacity = "16GiB"',
            "8192 extents of host.extent 2MiB (FILE); the limit is 4096",
        ),
        ('device = "rocm"', "FILE: device is 'rocm'; allowed: one of cpu, cuda"),
        ('run_dir = "run"', "FILE: run_dir is 'run'; allowed: an absolute path"),
        ("limits.max_leases = 0", "FILE: limits.max_leases is 0; allowed: an integer of 1 to 1024"),
        ('limits.max_leases = "many"', "FILE: limits.max_leases is 'many'"),
        ("limits.max_leases = 1.0", "FILE: limits.max_leases is 1.0"),
        ("drain_timeout_s = nan", "FILE: drain_timeout_s is nan"),
        ("drain_timeout_s = -1", "FILE: drain_timeout_s is -1; allowed: a number of 0 to 86400"),
        ('socket.mode = "0777"', "FILE: socket.mode is '0777'"),
        ("socket.mode = 432", "FILE: socket.mode is 432"),
        ('socket.group = "a b"', "FILE: socket.group is 'a b'"),
        ("not toml", "FILE: not TOML"),
        ("\x00", "FILE: not TOML"),
    ],
)
def test_refused_settings(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(text, tmp_path)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load({}, {}, path)
    with pytest.raises(ConfigError, match="Is a directory"):
        load({}, {}, tmp_path)


def test_unknown_variables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown variable 'KVD_DEVCE'; the nearest known is 'KVD_DEVICE'"):
        load({}, {"KVD_DEVCE": "cpu"}, system_file=tmp_path / "absent", directory=tmp_path)


def test_case_20_run_directory_too_long_for_a_socket() -> None:
    fits = "/" + "d" * (107 - len("//handles.sock"))
    assert load({"run_dir": fits}, {}, Path("/dev/null")).run_dir == fits
    with pytest.raises(ConfigError, match=r"socket path of 108 bytes, .*; the limit is 107"):
        load({"run_dir": fits + "d"}, {}, Path("/dev/null"))
    with pytest.raises(ConfigError, match="socket path of 108 bytes"):
        load({"run_dir": fits[:-1] + "é"}, {}, Path("/dev/null"))


def test_a_config_never_changes() -> None:
    config = load({}, {}, Path("/dev/null"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "cpu"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.origins["device"] = "elsewhere"  # type: ignore[index]
    assert config == Config()


@given(st.integers(0, 2**62))
def test_printed_sizes_are_exact(nbytes: int) -> None:
    assert parse_bytes(exact_size(nbytes)) == nbytes


def test_printed_config_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--host-capacity", "48MiB", "--host-extent", "16MiB", "--socket-mode", "600", "--run-dir", "/x"]
    assert cli.main(["print-config", "--config", "/dev/null", *flags]) == 0
    printed = capsys.readouterr().out
    assert 'capacity = "48MiB"  # --host-capacity' in printed
    assert 'mode = "0600"  # --socket-mode' in printed
    assert "max_leases = 256  # default" in printed
    (tmp_path / "again.toml").write_text(printed)
    assert load({}, {}, tmp_path / "again.toml") == load(
        {"host.capacity": "48MiB", "host.extent": "16MiB", "socket.mode": "600", "run_dir": "/x"}, {}, Path("/dev/null")
    )
    assert cli.main(["print-config", "--json", "--config", "/dev/null", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["host.capacity"] == {"value": 48 << 20, "origin": "--host-capacity"}
    assert document.keys() == KEYS.keys()


def test_check_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["check-config", "--config", "/dev/null"]) == 0
    monkeypatch.setenv("KVD_DEVICE", "tpu")
    assert cli.main(["check-config", "--config", "/dev/null"]) == 78
    assert "KVD_DEVICE: device is 'tpu'; allowed: one of cpu, cuda" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--no-such-flag"], ["run", "--host-cap", "1GiB"]])
def test_wrong_arguments_exit_with_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 64
    assert "usage: kvd" in capsys.readouterr().err


def test_documentation_has_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| `(.+?)` \|", (ROOT / "docs/configure.md").read_text(), re.MULTILINE)
    assert dict(rows) == {dotted: key.kind.render(key.default) for dotted, key in KEYS.items()}
    assert [dotted for dotted, _ in rows] == list(KEYS)


def test_the_example_in_the_documentation_is_right(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/configure.md").read_text(), re.DOTALL)
    (tmp_path / "kvd.toml").write_text(example)
    config = load({}, {}, tmp_path / "kvd.toml")
    assert config.host.capacity == 768 * GIB
    assert len(tomllib.loads(example)) == 4
