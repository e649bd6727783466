"""Which model a bench is of, as ``--model``, ``--layers`` and ``--experts`` say it."""

from __future__ import annotations

from argparse import Namespace

from protocol.model import ModelConfig, model_named


def model_of(arguments: Namespace) -> ModelConfig:
    """The named model, or its first layers, with fewer routed experts. Raises `InvalidValue`."""
    config = model_named(arguments.model)
    if arguments.layers is not None:
        config = config.with_layers(arguments.layers)
    if arguments.experts is not None:
        config = config.with_experts(arguments.experts)
    return config
