"""Which model a bench is of, as ``--model``, ``--layers`` and ``--experts`` say it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from compute.decode.matrices import WEIGHT_TYPES
from protocol.model import ModelConfig, model_named


def add_model_arguments(
    parser: ArgumentParser, *, model: str = "glm-5.3", experts: int | None = 8, dtype: str = "fp8", device: str = "cuda"
) -> None:
    """Which model, in which type of weights, on which device; the values are the defaults."""
    add, told = parser.add_argument, "" if experts is None else " (default %(default)s)"
    add("--model", default=model, help="a preset, or a config.json (default %(default)s)")
    add("--layers", type=int, metavar="N", help="the first N layers only")
    add("--experts", type=int, default=experts, metavar="N", help=f"routed experts of a layer{told}")
    add("--dtype", choices=WEIGHT_TYPES, default=dtype, help="type of the weights (default %(default)s)")
    add("--device", default=device, help="cuda or cpu (default %(default)s)")


def model_of(arguments: Namespace) -> ModelConfig:
    """The named model, or its first layers, with fewer routed experts. Raises `InvalidValue`."""
    config = model_named(arguments.model)
    if arguments.layers is not None:
        config = config.with_layers(arguments.layers)
    if arguments.experts is not None:
        config = config.with_experts(arguments.experts)
    return config
