"""The command ``kvd plan``: bytes per session, layer, replica and tier, and how many sessions fit; or nodes for a mix.

The arithmetic is in `kvd.planning`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.table import Table

from kvd.commands import plan_fleet
from kvd.console import output_console
from kvd.planning.footprint import Footprint
from kvd.planning.mix import SessionKind
from kvd.units import format_bytes, parse_bytes, parse_count
from protocol.errors import InvalidValue
from protocol.layout import Q8G64, encoding_named
from protocol.model import GLM_5_3, ModelConfig, model_named

SCHEMA = 1
"""Version of the object that ``kvd plan --json`` prints."""

_TIERS = {"host": "host RAM", "vram": "VRAM"}

_EXAMPLES = """examples:
  kvd plan --mtp --host-bytes 1.6TiB --vram-bytes 60GiB            # how many sessions of 1M tokens one node holds
  kvd plan --fleet --node hgx-h200 --mix 30x1M                     # nodes for thirty of them
  kvd plan --fleet --node hgx-h200 --mix 30x1M,500x50K/40 --mtp    # 500 of 50K as well, 40 of which decode at a time
  kvd plan --fleet --node h200,host=256GiB --layers 10 --experts 8 --mix 15x1M    # a cut model on a changed node
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the commands of ``kvd``."""
    parser = subparsers.add_parser(
        "plan",
        help="bytes per session and tier, and how many sessions fit",
        description="Bytes that sessions take in each tier, and how many fit; with --fleet, how many nodes a mix of "
        "sessions takes, which resource ends first and how fast they decode. Nothing is measured or allocated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--model", default="glm-5.3", help="glm-5.3, deepseek-v3.2, demo, or the path of a config.json")
    option("--layers", help="only the first layers of the model, to the end of an index group")
    option("--experts", help="routed experts of a layer (default: the model's)")
    option("--tokens", help="tokens of each session (default: the model's context)")
    option("--hot-rows", default="32768", help="cached rows of each layer (default: 32768)")
    option("--sessions", help="sessions to add up (default: 1)")
    option("--replicas", help="GPUs of this node that decode each session (default: 1)")
    option("--mtp", nargs="?", const="3", default="0", metavar="DRAFTS", help="drafts per step (default: 0; alone: 3)")
    option("--encoding", default=Q8G64.name, help="row encoding (default: q8g64)")
    option("--ring-pages", default="8", help="newest pages of each session, kept in VRAM (default: 8)")
    option("--host-bytes", metavar="SIZE", help="host RAM there is, such as 1.5TiB")
    option("--vram-bytes", metavar="SIZE", help="VRAM there is on each GPU beside the weights, such as 40GiB")
    option("--table", action="store_true", help="print the payload of GLM-5.3's rows in well-known cases")
    option("--json", action="store_true", help="print one JSON object")
    plan_fleet.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status. Raises `InvalidValue` for a bad argument."""
    if args.table:
        _print_payload_table(as_json=args.json)
        return 0
    model = _model(args)
    if args.fleet:
        _plan_fleet(args, model)
        return 0
    for name in plan_fleet.OPTIONS:
        if getattr(args, name) is not None:
            raise InvalidValue(f"--{name.replace('_', '-')}", getattr(args, name), "a value with --fleet only")
    footprint = Footprint(
        model,
        encoding_named(args.encoding),
        tokens=model.max_position_embeddings if args.tokens is None else parse_count(args.tokens, "--tokens", low=1),
        hot_rows=parse_count(args.hot_rows, "--hot-rows", low=1),
        drafts=parse_count(args.mtp, "--mtp", high=16),
        ring_pages=parse_count(args.ring_pages, "--ring-pages", low=1, high=4096),
    )
    sessions = _sessions(args)
    replicas = 1 if args.replicas is None else parse_count(args.replicas, "--replicas", low=1, high=1024)
    fits: dict[str, int] = {}
    if args.host_bytes is not None:
        fits["host"] = footprint.sessions_in_host(parse_bytes(args.host_bytes, "--host-bytes"))
    if args.vram_bytes is not None:
        fits["vram"] = footprint.sessions_in_vram(parse_bytes(args.vram_bytes, "--vram-bytes"))
    if args.json:
        print(json.dumps(_as_object(args.model, footprint, sessions, replicas, fits)))
        return 0
    _print_footprint(args.model, footprint, sessions, replicas)
    print(_answer(footprint.tokens, fits))
    return 0


def _model(args: argparse.Namespace) -> ModelConfig:
    model = model_named(args.model)
    if args.layers is not None:
        layers = parse_count(args.layers, "--layers", low=1, high=model.num_hidden_layers)
        ends = [group.end for group in model.index_groups()]
        if layers not in ends:
            raise InvalidValue("--layers", layers, f"the end of an index group: {', '.join(map(str, ends))}")
        model = model.with_layers(layers)
    if args.experts is not None:
        model = model.with_experts(parse_count(args.experts, "--experts", low=1, high=65536))
    return model


def _sessions(args: argparse.Namespace) -> int:
    return 1 if args.sessions is None else parse_count(args.sessions, "--sessions", low=1, high=10**6)


def _plan_fleet(args: argparse.Namespace, model: ModelConfig) -> None:
    for name in ("host_bytes", "vram_bytes", "replicas"):
        if getattr(args, name) is not None:
            raise InvalidValue(f"--{name.replace('_', '-')}", getattr(args, name), "nothing with --fleet: see --node")
    mix = None
    if args.sessions is not None or args.tokens is not None:
        tokens = model.max_position_embeddings
        tokens = tokens if args.tokens is None else parse_count(args.tokens, "--tokens", low=1)
        mix = (SessionKind(tokens, _sessions(args), _sessions(args)),)
    found = plan_fleet.fleet_plan(args, model, encoding_named(args.encoding), mix)
    if args.json:
        print(json.dumps({"schema": SCHEMA, **plan_fleet.as_object(args.model, found)}))
    else:
        plan_fleet.print_plan(args.model, found)


def payload_table() -> list[tuple[str, int, int]]:
    """Rows of GLM-5.3 in q8g64 without keys, padding or tables: the case, its bytes, and the decimals to print."""
    row, layers = Q8G64.rows.row_bytes, GLM_5_3.num_hidden_layers
    both_replicas = 2 * layers * row
    million = 1 << 20
    return [
        ("50,000 tokens, one layer, one replica", 50_000 * row, 3),
        (f"50,000 tokens, {layers} layers, two replicas", 50_000 * both_replicas, 3),
        ("2,048 selected rows, one layer, one replica", 2_048 * row, 5),
        ("32,768 hot rows, one layer, one replica", 32_768 * row, 1),
        (f"{million:,} tokens, {layers} layers, two replicas", million * both_replicas, 2),
        ("fifteen of those", 15 * million * both_replicas, 2),
        (f"fifteen hot caches of 32,768 rows, {layers} layers, two replicas", 15 * 32_768 * both_replicas, 2),
    ]


def _print_payload_table(*, as_json: bool) -> None:
    rows = payload_table()
    if as_json:
        print(
            json.dumps({"schema": SCHEMA, "rows": [{"object": case, "payload_bytes": size} for case, size, _ in rows]})
        )
        return
    width = max(len(case) for case, _, _ in rows)
    print(f"{'object':<{width}}  {'payload':>12}")
    for case, size, decimals in rows:
        print(f"{case:<{width}}  {format_bytes(size, decimals):>12}")


def _print_footprint(model: str, footprint: Footprint, sessions: int, replicas: int) -> None:
    page = footprint.page_format
    print(
        f"{model}, {footprint.encoding.name}: {page.layer_count} layers in {len(page.groups)} index groups, "
        f"pages of {page.payload_bytes:,} bytes at a stride of {page.stride:,}\n"
        f"tokens {footprint.tokens:,}, pages {footprint.pages:,}, hot rows {footprint.hot_rows:,}, "
        f"query rows {1 + footprint.drafts}, sessions {sessions:,}, replicas {replicas:,}\n"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    table.add_column("purpose")
    for heading in ("one layer", "requested", "committed"):
        table.add_column(heading, justify="right")
    for part in footprint.parts:
        layer = "" if part.layer_bytes is None else format_bytes(part.layer_bytes)
        sizes = format_bytes(part.requested_bytes), format_bytes(part.committed_bytes)
        table.add_row(_TIERS[part.tier], part.purpose, layer, *sizes)
    output_console().print(table)
    host, vram = footprint.host_bytes(sessions), footprint.vram_bytes(sessions)
    print(f"\nhost RAM of all sessions  {format_bytes(host):>14}")
    print(f"VRAM of all sessions      {format_bytes(vram):>14} on each GPU, {format_bytes(replicas * vram)} on all")


def _answer(tokens: int, fits: dict[str, int]) -> str:
    """How many sessions fit, and which tier runs out first, of those whose limit is known."""
    if not fits:
        return "How many fit: give --host-bytes, --vram-bytes, or both."
    counts = ", ".join(f"{_TIERS[tier]} holds {count:,}" for tier, count in fits.items())
    if len(fits) == 1:
        return f"Sessions of {tokens:,} tokens that fit: {counts}; no limit was given for the other tier."
    first = _first_out(fits)
    last = f"{_TIERS[first]} runs out first" if first else "both run out together"
    return f"Sessions of {tokens:,} tokens that fit: {min(fits.values()):,}; {last} ({counts})."


def _first_out(fits: dict[str, int]) -> str | None:
    """The tier that holds the fewest sessions; None if the tiers hold equally many, or only one limit is known."""
    return min(fits, key=lambda tier: fits[tier]) if len(set(fits.values())) == 2 else None


def _as_object(
    model: str, footprint: Footprint, sessions: int, replicas: int, fits: dict[str, int]
) -> dict[str, object]:
    page = footprint.page_format
    vram = footprint.vram_bytes(sessions)
    return {
        "schema": SCHEMA,
        "model": model,
        "encoding": footprint.encoding.name,
        "layers": page.layer_count,
        "index_groups": len(page.groups),
        "page_payload_bytes": page.payload_bytes,
        "page_stride_bytes": page.stride,
        "tokens": footprint.tokens,
        "pages": footprint.pages,
        "hot_rows": footprint.hot_rows,
        "query_rows": 1 + footprint.drafts,
        "sessions": sessions,
        "replicas": replicas,
        "one_session": [asdict(part) for part in footprint.parts],
        "position_table_bytes": footprint.position_table_bytes,
        "slot_table_bytes": footprint.slot_table_bytes,
        "address_table_bytes": footprint.address_table_bytes,
        "index_key_slabs": footprint.key_slabs(sessions).count,
        "host_committed_bytes": footprint.host_bytes(sessions),
        "vram_committed_bytes_per_gpu": vram,
        "vram_committed_bytes": replicas * vram,
        "sessions_that_fit": {"host": fits.get("host"), "vram": fits.get("vram")},
        "runs_out_first": _first_out(fits),
    }
