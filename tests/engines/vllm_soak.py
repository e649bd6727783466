"""The soak of `tests.engines.vllm_trials`."""

from __future__ import annotations

import argparse
import random
import signal
import time

from benchmarks.vllm_engine import Engine, Setup
from benchmarks.vllm_models import family, make_checkpoint
from tests.engines.vllm_world import MODELS, NEW, compare, directory, say, start_daemon, until
from tests.trials import report


def soak(arguments: argparse.Namespace) -> None:
    """Two engines on one store, for ``--minutes``: requests in bursts, and engines and daemons that are killed or
    stopped amid them.
    """
    rng = random.Random(arguments.seed)
    model = make_checkpoint(MODELS, "llama")
    extra = {"retry_s": 0.2, "longest_retry_s": 1.0}
    counts = dict.fromkeys(("calm", "engine killed", "daemon killed", "daemon stopped"), 0)
    requests = cached = 0
    with directory() as run_dir, Engine(Setup(model)) as right:
        setup = Setup(model, run_dir=run_dir, chunk=256, extra=extra)
        daemon = start_daemon(run_dir)
        engines = [Engine(setup), Engine(setup)]
        try:
            deadline = time.monotonic() + 60 * arguments.minutes
            while time.monotonic() < deadline:
                prompts = family(rng.randrange(40), rng.randrange(1, 40))  # of so many families that some come again
                expected = right.generate(prompts, NEW)
                event = rng.choice(list(counts))
                for engine in engines:
                    engine.ask(prompts, NEW)
                time.sleep(rng.uniform(0, 1.5))
                if event == "engine killed":
                    engines.pop(0).kill()
                elif event == "daemon killed":
                    daemon.process.kill()
                    daemon.process.wait()
                    daemon = start_daemon(run_dir)
                elif event == "daemon stopped":
                    daemon.process.send_signal(signal.SIGSTOP)
                    time.sleep(rng.uniform(0, 2))
                    daemon.process.send_signal(signal.SIGCONT)
                for engine in engines:
                    cached += compare(engine.answers(), expected, event)
                    requests += len(prompts)
                if len(engines) < 2:
                    engines.append(Engine(setup))
                counts[event] += 1
                if not sum(counts.values()) % 20:
                    say(f"{counts}: {requests} requests, {cached} tokens cached")
            for engine in engines:
                engine.settle()
                engine.kill()
            until(lambda: not daemon.stat().leases, 30)
            stats = daemon.stat()
            assert stats.ledger == "balanced"
            assert all(space.writing == space.pinned == 0 for space in stats.blocks), stats.blocks
            assert cached
        finally:
            for engine in engines:
                engine.kill()
            daemon.__exit__(None, None, None)
    report(
        "requests of a soak",
        requests,
        cached_tokens=cached,
        **{name.replace(" ", "_"): n for name, n in counts.items()},
    )
