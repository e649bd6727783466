"""The arguments of ``kvd-worker serve``. What it does is in ``launch``, which is imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from compute import model_arguments
from protocol.errors import ConfigError

EXAMPLES = """examples:
  kvd-worker serve                                             # the demo model, on 127.0.0.1:8000
  kvd-worker serve --device cuda --model /models/glm --weights /models/glm --dtype fp8 --context 1048576
  kvd-worker serve --listen unix:http.sock                     # for this user alone
  torchrun --nproc-per-node 2 --no-python kvd-worker serve --tensor-parallel 2 --device cuda --model glm-5.3 --dtype fp8

  curl -N localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": true, "session": "chat-1"}'

A request with a "session" goes on with the history of that name, wherever the daemon has it; only what is new is sent.
Any OpenAI client works: OPENAI_BASE_URL=http://127.0.0.1:8000/v1. docs/serve.md has the whole of it.
"""


def configure(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP, as OpenAI's clients send them",
        description="Serve chat and text completions of many sessions at once, their histories in the daemon's memory.",
        epilog=EXAMPLES,
    )
    model_arguments.configure(parser)
    add = parser.add_argument
    model_arguments.configure_ranks(parser, stages=False)
    add("--listen", default="127.0.0.1:8000", metavar="ADDRESS", help="HOST:PORT or unix:PATH (default %(default)s)")
    add("--model-name", metavar="NAME", help="what clients call the model (default: the --model's name)")
    add(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="tokenizer and chat template (default: beside the weights; none: text is numbers of tokens)",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="clients must send the key in FILE")
    add(
        "--mtp",
        default="auto",
        metavar="N",
        help="tokens to draft for each step, 0 to 3, or auto: what is fastest, by measurement (default %(default)s)",
    )
    add(
        "--batch",
        default="auto",
        metavar="N",
        help="sessions decoded together, 1 to 16, or auto: all, unless fewer are clearly faster (default %(default)s)",
    )
    add("--running", type=int, default=16, metavar="N", help="requests with memory at a time (default %(default)s)")
    add("--queue", type=int, default=256, metavar="N", help="requests that may wait (default %(default)s)")
    add("--queue-timeout", type=float, default=600.0, metavar="S", help="longest wait (default %(default)s)")
    add("--context", type=int, default=8192, metavar="N", help="most tokens of a session (default %(default)s)")
    add("--output-tokens", type=int, default=512, metavar="N", help="of an answer, by default (default %(default)s)")
    add(
        "--token-gap",
        type=float,
        default=0.2,
        metavar="S",
        help="longest gap between a request's tokens while others' prompts are read; two steps, where one takes more "
        "than half of that (default %(default)s)",
    )
    add("--idle", type=float, default=30.0, metavar="S", help="how long a session stays open (default %(default)s)")
    add("--shutdown-timeout", type=int, default=30, metavar="S", help="time for requests to end (default %(default)s)")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"kvd-worker serve needs {package}: install kvd-tier[serve]", package=package)
    from compute.serve.launch import serve

    return serve(arguments)
