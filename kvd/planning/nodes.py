"""Kinds of nodes: those of ``nodes.toml``, those of a file of one's own, and either with some keys changed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvd.planning.step_model import Rates
from kvd.units import parse_bytes
from protocol.errors import InvalidValue

_SIZES = ("vram", "host", "reserved")
_NUMBERS = ("hbm_read", "bus_read", "compute")
_NEEDED = ("gpus", "vram", "host", "hbm_read", "bus_read")
_TEXTS = ("about", "source")
KEYS = ("gpus", *_SIZES, *_NUMBERS, *_TEXTS)


@dataclass(frozen=True)
class NodeType:
    """A node: ``gpus`` GPUs with ``vram`` bytes each, ``host`` bytes of RAM of which kvd gets all but ``reserved``."""

    name: str
    gpus: int
    vram: int
    host: int
    rates: Rates
    reserved: int = 8 << 30
    about: str = ""
    source: str = "given"

    @property
    def host_for_kvd(self) -> int:
        return max(self.host - self.reserved, 0)


def node_types(file: Path | None = None) -> dict[str, NodeType]:
    """By name; those of ``file`` beside those that are known. Raises `InvalidValue` naming file, node and key."""
    known = tomllib.loads(files("kvd.planning").joinpath("nodes.toml").read_text())
    types = {name: _node(name, table, "nodes.toml") for name, table in known.items()}
    if file is None:
        return types
    try:
        own = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValue("file of nodes", str(file), f"a readable TOML file ({error})") from None
    for name, table in own.items():
        if not isinstance(table, dict):
            raise InvalidValue(f"{name} in {file}", table, "a table [NAME] for each kind of node")
        types[name] = _node(name, table, str(file))
    return types


def node_named(text: str, file: Path | None = None) -> NodeType:
    """The node that ``text`` names, such as ``h200`` or ``hgx-h200,host=1TiB,gpus=4``."""
    name, *changes = text.split(",")
    types = node_types(file)
    if name not in types:
        raise InvalidValue("node", name, f"one of {', '.join(types)}, or one of a file given with --nodes")
    given: dict[str, Any] = {}
    for change in changes:
        key, separator, value = change.partition("=")
        if key not in KEYS or key in _TEXTS or not separator:
            allowed = ", ".join(key for key in KEYS if key not in _TEXTS)
            raise InvalidValue(f"change of node {name}", change, f"KEY=VALUE with one of {allowed}")
        given[key] = _number(value) if key not in _SIZES else value
    if not given:
        return types[name]
    return replace(_changed(types[name], given, f"--node {text}"), source=f"given: {text}")


def _node(name: str, table: Mapping[str, Any], where: str) -> NodeType:
    missing = [key for key in _NEEDED if key not in table]
    if missing:
        raise InvalidValue(f"node {name} of {where}", f"without {missing[0]}", f"all of {', '.join(_NEEDED)}")
    empty = NodeType(name, 0, 0, 0, Rates(0, 0))
    return _changed(empty, table, where)


def _changed(node: NodeType, table: Mapping[str, Any], where: str) -> NodeType:
    for key in table:
        if key not in KEYS:
            raise InvalidValue(f"key of node {node.name} in {where}", key, f"one of {', '.join(KEYS)}")
    changes: dict[str, Any] = {key: str(table[key]) for key in _TEXTS if key in table}
    changes |= {key: parse_bytes(table[key], f"{key} of node {node.name}") for key in _SIZES if key in table}
    numbers = {key: _positive(f"{key} of node {node.name}", table[key]) for key in _NUMBERS if key in table}
    gpus = table.get("gpus", node.gpus)
    if not isinstance(gpus, int | float) or isinstance(gpus, bool) or gpus != int(gpus) or not 1 <= gpus <= 1024:
        raise InvalidValue(f"gpus of node {node.name}", gpus, "1 to 1024")
    return replace(node, gpus=int(gpus), rates=replace(node.rates, **numbers), **changes)


def _positive(what: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise InvalidValue(what, value, "a number above 0")
    return float(value)


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
