"""``kvd-worker`` on several ranks: its arguments, and the worker that it runs on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from compute.parallel.grid import Grid, Place
from compute.parallel.team import Team
from compute.parallel.worker import ParallelWorker
from protocol.errors import InvalidValue
from protocol.layout import Encoding
from protocol.model import ModelConfig

_ALIKE = (
    *("tokens", "mode", "max_tokens", "hot_rows", "ring_pages", "session", "chunk", "kernels"),
    *("keep", "resume", "save", "restore", "negative_control"),
)
"""Arguments that all ranks must have been given alike, beside those that the model is made of."""


def is_parallel(arguments: argparse.Namespace) -> bool:
    """Whether the model is on several ranks."""
    return (arguments.tensor_parallel, arguments.pipeline_parallel) != (1, 1)


def require_one_process(arguments: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raise `InvalidValue` where the model is to be on several ranks, or ``torchrun`` has started several processes,
    none of which would know of the others.
    """
    asked = str(arguments.tensor_parallel * arguments.pipeline_parallel)
    for ranks in (asked, environment.get("WORLD_SIZE", "1")):
        if ranks != "1":
            raise InvalidValue(
                f"ranks of kvd-worker {arguments.command}",
                ranks,
                "1; on several there are serve with --tensor-parallel, and generate with that or --pipeline-parallel, "
                "under torchrun",
            )


@contextmanager
def open_grid(arguments: argparse.Namespace, alike: Mapping[str, object]) -> Iterator[Grid]:
    """The ranks' connections. Raises `InvalidValue` on all of them where ``alike`` is not the same on all."""
    place = Place.of_environment(arguments.tensor_parallel, arguments.pipeline_parallel, os.environ)
    with Grid(place, device=place.device(arguments.device), timeout_s=arguments.peer_timeout) as grid:
        Team(grid.control, place.tensor).agree({name: str(value) for name, value in alike.items()})
        yield grid


def open_worker(
    arguments: argparse.Namespace, config: ModelConfig, encoding: Encoding, grid: Grid, **options: Any
) -> ParallelWorker:
    """The worker of this rank."""
    options["dtype"] = arguments.dtype or "bf16"
    return ParallelWorker(arguments.run_dir, grid.place.device(arguments.device), config, encoding, grid, **options)


@contextmanager
def open_ranks(
    arguments: argparse.Namespace,
    config: ModelConfig,
    encoding: Encoding,
    read_prompt: Callable[[], list[int]],
    **options: Any,
) -> Iterator[tuple[ParallelWorker, list[int]]]:
    """The worker of this rank, and rank 0's prompt, without which none of them loads weights."""
    if arguments.on_daemon_loss == "wait":
        raise InvalidValue("--on-daemon-loss", "wait", "fail, with several ranks")
    with open_grid(arguments, {f"argument {name}": getattr(arguments, name) for name in _ALIKE}) as grid:
        team = Team(grid.control, grid.place.tensor)
        prompt = team.together(lambda: read_prompt() if grid.place.rank == 0 else [])
        prompt = team.share(prompt, list[int])
        with open_worker(arguments, config, encoding, grid, **options) as worker:
            yield worker, prompt
