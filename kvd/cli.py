"""``kvd``: run the daemon, look at its settings, plan its sizes, look at its host."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvd import __version__, config, logs
from kvd.commands import admin, plan, saved, support_bundle
from kvd.config import KEYS, Config
from kvd.daemon import Daemon
from kvd.doctor import cli as doctor
from protocol.command_line import Parser, run_command
from protocol.errors import KvdError

_EXAMPLES = """examples:
  kvd run --device cpu --run-dir /tmp/kvd --host-capacity 4GiB    # no GPU needed
  kvd run --config ./kvd.toml                                     # instead of /etc/kvd
  kvd check-config --config ./kvd.toml                            # exit status 78 if it is wrong
  kvd print-config                                                # every setting, and where it came from
  kvd plan --table                                                # bytes per session
  kvd doctor                                                      # what the host should change
  kvd save chat-1                                                 # also restore, ls, rm; verify FILE needs no daemon
  kvd admin leases list                                           # also revoke; sessions close
  kvd-stat                                                        # what a running daemon holds

exit status: 0 done, 64 wrong arguments, 69 no such device, 71 refused by the system, 77 no permission, 78 wrong setting
"""
_SETTINGS_NOTE = """Each setting can also be a key of /etc/kvd/kvd.toml or of a file in /etc/kvd/kvd.d, or a variable
such as KVD_HOST_CAPACITY. Flags override variables, variables override files. docs/configure.md explains all settings.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``kvd``; returns its exit status."""

    def act() -> int:
        parsed = parser().parse_args(arguments)
        return _COMMANDS[parsed.command](parsed)

    return run_command("kvd", act)


def parser() -> argparse.ArgumentParser:
    """What the command takes, for it and for its manual page."""
    top: argparse.ArgumentParser = Parser(
        prog="kvd",
        description="A per-node memory tier for the KV history of long conversations.",
        epilog=_EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"kvd {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, summary in (
        ("run", "run the daemon until SIGTERM or SIGINT"),
        ("check-config", "check all settings and say what is wrong"),
        ("print-config", "print all settings, with where each came from"),
    ):
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=_SETTINGS_NOTE,
        )
        _add_settings(sub)
        if name == "print-config":
            sub.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_parser(commands)
    doctor.add_parser(commands)
    saved.add_parsers(commands)
    admin.add_parser(commands)
    support_bundle.add_parser(commands)
    return top


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read this file instead of /etc/kvd/kvd.toml and /etc/kvd/kvd.d"
    )
    for key in KEYS.values():
        note = f"{key.doc} ({key.kind.allowed}; default {key.kind.render(key.default)})".replace("%", "%%")
        parser.add_argument(key.flag, dest=key.dotted, metavar=key.name.upper(), help=note)


def _load(parsed: argparse.Namespace) -> Config:
    given = vars(parsed)
    flags = {dotted: given[dotted] for dotted in KEYS if given.get(dotted) is not None}
    environment = {name: value for name, value in os.environ.items() if name.startswith(config.ENVIRONMENT_PREFIX)}
    return config.load(flags, environment, parsed.config)


def _run(parsed: argparse.Namespace) -> int:
    settings = _load(parsed)
    faulthandler.enable()  # a watchdog's SIGABRT leaves word of where the loop was
    log = logs.configure(settings.log)
    try:
        Daemon(settings, log, reread=lambda: _load(parsed)).run()
    except KvdError as error:
        log.error("daemon ended", code=error.code, reason=error.message, **error.facts)
        return error.exit_status
    return 0


def _check_config(parsed: argparse.Namespace) -> int:
    _load(parsed)
    print("all settings are right")
    return 0


def _print_config(parsed: argparse.Namespace) -> int:
    settings = _load(parsed)
    if parsed.json:
        print(json.dumps(support_bundle.settings_document(settings), indent=2))
        return 0
    section = ""
    for dotted, key in KEYS.items():
        if key.section != section:
            section = key.section
            print(f"\n[{section}]")
        print(f"{key.name} = {key.kind.render(key.value_in(settings))}  # {settings.origins[dotted]}")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "check-config": _check_config,
    "print-config": _print_config,
    "plan": plan.run,
    "doctor": lambda parsed: doctor.run(parsed, _load(parsed)),
    "admin": admin.run,
    "support-bundle": lambda parsed: support_bundle.run(parsed, _load(parsed)),
    **saved.COMMANDS,
}
