"""All settings of the daemon: what they are, and where their values come from.

Later sources override earlier ones: the defaults here, ``/etc/kvd/kvd.toml`` (or the file given with ``--config``), the
files of ``/etc/kvd/kvd.d`` in the order of their names, environment variables ``KVD_*``, flags. All of them are read
once, by `load`; a `Config` never changes, and nothing reads the environment later.

``docs/configure.md`` explains every key to those who run a daemon.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvd.settings import (
    SOCKET_PATH_LIMIT,
    FileMode,
    Kind,
    LocalAddress,
    Number,
    Size,
    Text,
    Word,
    exact_size,
    parse_setting,
    setting,
)
from protocol.errors import ConfigError

SYSTEM_FILE = Path("/etc/kvd/kvd.toml")
SYSTEM_DIRECTORY = Path("/etc/kvd/kvd.d")
ENVIRONMENT_PREFIX = "KVD_"

CONTROL_SOCKET = "kvd.sock"
HANDLE_SOCKET = "handles.sock"

MOST_EXTENTS = 4096
"""A reply that opens a session may name every extent, and must stay below the limit of a control message."""

_MIB = 1 << 20


@dataclass(frozen=True)
class HostConfig:
    """Host RAM."""

    capacity: int = setting(
        Size(least=2 * _MIB, multiple=2 * _MIB),
        "1GiB",
        "Host RAM that the daemon takes at start and serves from.",
        reloadable=True,
    )
    extent: int = setting(
        # A worker registers an extent with its GPU in one piece, so that no page lies across two registrations; recent
        # drivers fail on pieces of half a TiB.
        Size(least=2 * _MIB, multiple=2 * _MIB, most=64 << 30),
        "1GiB",
        "Host RAM is cut into extents of this size; an extent belongs to one uid at a time.",
    )
    state_capacity: int = setting(
        Size(least=_MIB, multiple=4096),
        "256MiB",
        "Host RAM beside that, for the state of sessions: about 4.2 MiB for each with room for 1M tokens.",
        reloadable=True,
    )
    numa_node: int = setting(
        Number(-1, 1023), -1, "NUMA node that the extents are bound to; -1 leaves it to the kernel."
    )


@dataclass(frozen=True)
class VramConfig:
    """Memory of the devices."""

    capacity: int = setting(
        Size(least=2 * _MIB, multiple=2 * _MIB),
        "1GiB",
        "VRAM that the daemon gives out, on each device.",
        reloadable=True,
    )


@dataclass(frozen=True)
class BlocksConfig:
    """Blocks of the prefix store: a cache in what sessions leave of host RAM."""

    capacity: int = setting(
        Size(least=0),
        "1TiB",
        "Most bytes of host RAM for blocks, never more than sessions leave; 0 to store none.",
        reloadable=True,
    )
    per_uid: int = setting(
        Size(least=0), "1TiB", "Most bytes of host RAM for the blocks of one uid; 0 to store none.", reloadable=True
    )
    disk: int = setting(
        Size(least=0),
        "16GiB",
        "Most bytes of disk for cold blocks, in disk.state_dir, beside saved sessions; 0 to spill none.",
        reloadable=True,
    )


@dataclass(frozen=True)
class DiskConfig:
    """Saved sessions."""

    state_dir: str = setting(
        Text("(/.*)?", "an absolute path, or an empty string to save nothing"),
        "",
        "Directory of saved sessions, which nobody but the daemon may enter.",
    )
    capacity: int = setting(
        Size(least=_MIB),
        "64GiB",
        "Most bytes of saved sessions; the least recently used go for new ones.",
        reloadable=True,
    )


@dataclass(frozen=True)
class SocketConfig:
    """Who may connect."""

    group: str = setting(
        Text("[A-Za-z0-9_.-]{0,32}", "a group's name, or an empty string for the daemon's own group"),
        "",
        "Group that owns the sockets.",
    )
    mode: int = setting(FileMode(), "0660", "Permission bits of the sockets.")
    admin_group: str = setting(
        Text("[A-Za-z0-9_.-]{0,32}", "a group's name, or an empty string for none"),
        "",
        "Group whose members may, like root and the daemon's own user, revoke leases, end sessions and drain.",
    )


@dataclass(frozen=True)
class LimitsConfig:
    """How many of each there may be."""

    max_leases: int = setting(
        Number(1, 1024), 256, "Leases at the same time; each is one worker process.", reloadable=True
    )
    max_sessions: int = setting(Number(1, 1024), 1024, "Sessions at the same time, held and stored.", reloadable=True)
    host_per_uid: int = setting(
        Size(least=0),
        "0B",
        "Most bytes of pages in host RAM for the sessions of one uid; 0 for no limit.",
        reloadable=True,
    )
    max_handles: int = setting(Number(1, 1 << 16), 4096, "Pieces of VRAM that one lease may hold.", reloadable=True)


@dataclass(frozen=True)
class LogConfig:
    """The log, on standard error."""

    format: str = setting(
        Word(("auto", "console", "json")), "auto", "``auto`` is console on a terminal and JSON lines elsewhere."
    )
    level: str = setting(
        Word(("debug", "info", "warning", "error")), "info", "Least severe level that is logged.", reloadable=True
    )


@dataclass(frozen=True)
class MetricsConfig:
    """Metrics for Prometheus."""

    listen: str = setting(LocalAddress(), "", "Where metrics and probes are served over HTTP; nowhere if empty.")


@dataclass(frozen=True)
class StallWatchConfig:
    """The watch for what the kernel does to pages."""

    interval_s: float = setting(
        Number(0, 3600, real=True),
        1.0,
        "Seconds between looks at the kernel's counters of moved and split pages; 0 for none.",
    )


@dataclass(frozen=True)
class Config:
    """The settings in force. ``origins`` says for each key where its value came from."""

    run_dir: str = setting(
        Text("/.*", "an absolute path"), "/run/kvd", "Directory of the sockets and the lock; one daemon in each."
    )
    device: str = setting(
        Word(("cpu", "cuda")), "cuda", "Kind of device that VRAM is taken from. There is no fallback between them."
    )
    drain_timeout_s: float = setting(
        Number(0, 86400, real=True),
        30.0,
        "Seconds that a daemon told to stop waits for leases to end.",
        reloadable=True,
    )
    host: HostConfig = field(default_factory=HostConfig)
    vram: VramConfig = field(default_factory=VramConfig)
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    socket: SocketConfig = field(default_factory=SocketConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    stall_watch: StallWatchConfig = field(default_factory=StallWatchConfig)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def files_needed(self) -> int:
        """File descriptors that the limits allow for."""
        limits = self.limits
        extents = self.host.capacity // self.host.extent
        return 256 + extents + 4 * limits.max_sessions + 4 * limits.max_leases + limits.max_handles

    @property
    def control_socket(self) -> Path:
        return Path(self.run_dir) / CONTROL_SOCKET

    @property
    def handle_socket(self) -> Path:
        return Path(self.run_dir) / HANDLE_SOCKET


@dataclass(frozen=True)
class Key:
    """One setting, by its dotted name. ``section`` is empty for those of the top level."""

    section: str
    name: str
    kind: Kind
    default: Any
    doc: str
    reloadable: bool

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENVIRONMENT_PREFIX + self.dotted.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--" + self.dotted.replace(".", "-").replace("_", "-")

    def value_in(self, config: Config) -> Any:
        return getattr(getattr(config, self.section) if self.section else config, self.name)


_SECTIONS: dict[str, type[Any]] = {
    "host": HostConfig,
    "vram": VramConfig,
    "blocks": BlocksConfig,
    "disk": DiskConfig,
    "socket": SocketConfig,
    "limits": LimitsConfig,
    "log": LogConfig,
    "metrics": MetricsConfig,
    "stall_watch": StallWatchConfig,
}


def _keys_of(section: str, cls: Any) -> Iterator[Key]:
    for item in dataclasses.fields(cls):
        if "kind" in item.metadata:
            yield Key(section, item.name, default=item.default, **item.metadata)


KEYS = {key.dotted: key for section, cls in {"": Config, **_SECTIONS}.items() for key in _keys_of(section, cls)}
"""Every setting by its dotted name."""

RESIZABLE = ("host.capacity", "host.state_capacity", "vram.capacity", "disk.capacity")
"""Limits of tiers: a running daemon takes them up if what is in use allows it."""


def load(
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    file: Path | None = None,
    system_file: Path = SYSTEM_FILE,
    directory: Path = SYSTEM_DIRECTORY,
) -> Config:
    """Read all sources and check the whole.

    ``flags`` maps dotted names to what was written. With ``file`` neither the system's file nor its directory is read.
    Raises `ConfigError` for an unknown key, a bad value, a file that cannot be read, or values that do not fit.
    """
    values = {dotted: key.default for dotted, key in KEYS.items()}
    origins = dict.fromkeys(KEYS, "default")

    def take(found: Mapping[str, object], origin: str) -> None:
        for dotted, value in found.items():
            values[dotted] = parse_setting(KEYS[dotted].kind, dotted, value, origin)
            origins[dotted] = origin

    for path in [file] if file else [system_file, *sorted(directory.glob("*.toml"))]:
        if file or path.exists():
            take(_read_file(path), str(path))
    for dotted, variable, text in _read_environment(environment):
        take({dotted: text}, variable)
    for dotted, text in flags.items():
        take({dotted: text}, KEYS[dotted].flag)
    return check(_build(values, origins))


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    parts: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
    for dotted, key in KEYS.items():
        parts[key.section][key.name] = values[dotted]
    sections = {section: cls(**parts[section]) for section, cls in _SECTIONS.items()}
    return Config(**parts[""], **sections, origins=MappingProxyType(dict(origins)))


def with_value(config: Config, key: Key, value: Any, origin: str) -> Config:
    """``config`` with one setting changed; without an ``origin`` it is said to come from where it came from."""
    if origin:
        config = dataclasses.replace(config, origins=MappingProxyType({**config.origins, key.dotted: origin}))
    if not key.section:
        return dataclasses.replace(config, **{key.name: value})
    section = dataclasses.replace(getattr(config, key.section), **{key.name: value})
    return dataclasses.replace(config, **{key.section: section})


def check(config: Config) -> Config:
    """``config``, if it has nothing wrong that no single setting can tell; raises `ConfigError`."""
    host, origins = config.host, config.origins
    if host.capacity % host.extent:
        raise ConfigError(
            f"host.capacity is {exact_size(host.capacity)} ({origins['host.capacity']}); allowed: multiples of "
            f"host.extent, {exact_size(host.extent)} ({origins['host.extent']})",
            key="host.capacity",
        )
    if host.capacity // host.extent > MOST_EXTENTS:
        raise ConfigError(
            f"host.capacity {exact_size(host.capacity)} ({origins['host.capacity']}) makes "
            f"{host.capacity // host.extent} extents of host.extent {exact_size(host.extent)} "
            f"({origins['host.extent']}); the limit is {MOST_EXTENTS}",
            key="host.extent",
        )
    longest = max((config.control_socket, config.handle_socket), key=lambda path: len(os.fsencode(path)))
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"run_dir {config.run_dir!r} ({origins['run_dir']}) makes a socket path of {len(os.fsencode(longest))} "
            f"bytes, {longest}; the limit is {SOCKET_PATH_LIMIT}",
            key="run_dir",
            limit=SOCKET_PATH_LIMIT,
        )
    return config


def _read_file(path: Path) -> dict[str, object]:
    """The settings of a TOML file by dotted name; raises `ConfigError` for anything that is not one."""
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", file=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", file=str(path)) from None
    found: dict[str, object] = {}
    for name, value in document.items():
        if name in _SECTIONS and isinstance(value, dict):
            found.update({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            found[name] = value
    for dotted in found:
        if dotted not in KEYS:
            raise ConfigError(f"{path}: unknown key {dotted!r}{_nearest(dotted, KEYS)}", file=str(path), key=dotted)
    return found


def _read_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Dotted name, variable and text of every setting in the environment."""
    by_variable = {key.variable: dotted for dotted, key in KEYS.items()}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable not in by_variable:
            raise ConfigError(
                f"environment: unknown variable {variable!r}{_nearest(variable, by_variable)}", key=variable
            )
        yield by_variable[variable], variable, text


def _nearest(word: str, words: Mapping[str, object]) -> str:
    matches = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; the nearest known is {matches[0]!r}" if matches else f"; known: {', '.join(words)}"
