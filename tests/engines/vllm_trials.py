"""Trials with the real engine: ``python -m tests.engines.vllm_trials TRIAL``.

They take minutes to hours. Each prints what it did, how many trials there were, and the bound that follows; the exit
status is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.vllm_engine import Engine, Setup, prepare
from benchmarks.vllm_models import BLOCK_TOKENS, KINDS, family, make_checkpoint
from tests.engines.vllm_soak import soak
from tests.engines.vllm_world import MODELS, NEW, compare, directory, say, start_daemon, until
from tests.trials import report, report_all

SETTINGS = ((None, True), (256, True), (256, False), (None, False))
"""Tokens of a chunk of a prefill, or None for whole prompts; whether the engine's own prefix cache is on."""


def equal(arguments: argparse.Namespace) -> None:
    """Outputs of an engine without the connector, of one that stores, and of new ones in every setting that hit."""
    compared = 0
    for kind in arguments.kinds:
        model = make_checkpoint(MODELS, kind)
        prompts = family(1, arguments.prompts, longest=200)
        with Engine(Setup(model, BLOCK_TOKENS[kind][0])) as engine:
            expected = engine.generate(prompts, NEW)
        distinct = len({token for one in expected for token in one.tokens})
        say(f"{kind}: {len(prompts)} prompts of {sum(map(len, prompts))} tokens; {distinct} distinct tokens made")
        for turn, block_tokens in enumerate(BLOCK_TOKENS[kind]):
            with directory() as run_dir, start_daemon(run_dir) as daemon:
                # The one that stores has the first of the settings, then the third.
                for number, (chunk, own_cache) in enumerate((SETTINGS[2 * turn], *SETTINGS)):
                    what = f"{kind}, blocks of {block_tokens}, chunks of {chunk}, own cache {own_cache}"
                    with Engine(Setup(model, block_tokens, run_dir, chunk, own_cache)) as engine:
                        cached = compare(engine.generate(prompts, NEW), expected, what)
                        engine.settle()
                    assert cached or not number, f"{what}: nothing was loaded"
                    say(f"{what}: equal, {cached} tokens cached" + (" (the first)" if not number else ""))
                    compared += len(prompts)
                assert daemon.stat().ledger == "balanced"
        corrupted(Setup(model, BLOCK_TOKENS[kind][0]), kind)
    report("outputs with and without kvd", compared)


def corrupted(setup: Setup, kind: str) -> None:
    """Equality can fail: one byte of each loaded block is wrong."""
    prompts = family(1, 20)
    with Engine(setup) as engine:
        expected = engine.generate(prompts, NEW)
    with directory() as run_dir, start_daemon(run_dir):
        setup.run_dir = run_dir
        with Engine(setup) as engine:
            engine.generate(prompts, NEW)
            engine.settle()
        setup.corrupt = True
        with Engine(setup) as engine:
            made = engine.generate(prompts, NEW)
    setup.run_dir, setup.corrupt = None, False
    different = sum(one.tokens != right.tokens for one, right in zip(made, expected, strict=True))
    say(f"{kind}, loaded blocks corrupted: {different} of {len(made)} outputs differ")
    assert different


def kills(arguments: argparse.Namespace) -> None:
    """Engines killed amid saves. Each is checked against one without kvd, and finds what those before it stored."""
    rng = random.Random(arguments.seed)
    model = make_checkpoint(MODELS, "llama")
    trials = cached = 0
    with directory() as run_dir, start_daemon(run_dir) as daemon, Engine(Setup(model)) as right:
        setup = Setup(model, run_dir=run_dir)
        checked = family(arguments.seed, 12)
        expected = right.generate(checked, NEW)
        deadline = time.monotonic() + 60 * arguments.minutes
        took_s = 3.0
        while trials < arguments.trials and time.monotonic() < deadline:
            begin = time.monotonic()
            with Engine(setup) as engine:
                cached += compare(engine.generate(checked, NEW), expected, f"trial {trials}")
                fresh = family(1000 + trials, 24)
                asked = time.monotonic()
                engine.ask(fresh, NEW)
                time.sleep(rng.uniform(0, took_s))
                engine.kill()
                after_s = time.monotonic() - asked
            until(lambda: not daemon.stat().leases, 30)
            stats = daemon.stat()
            assert stats.ledger == "balanced"
            assert all(space.writing == space.pinned == 0 for space in stats.blocks), stats.blocks
            stored = sum(space.stored for space in stats.blocks)
            checked = [*checked[:6], *fresh[:6]]  # half of what the killed one was saving
            expected = right.generate(checked, NEW)
            trials += 1
            whole_s = time.monotonic() - begin
            say(f"trial {trials}: killed {after_s:.2f} s into saves, {stored} blocks stored, {whole_s:.1f} s")
        assert cached
    report("engines killed amid saves", trials, cached_tokens=cached)


def restarts(arguments: argparse.Namespace) -> None:
    """The daemon killed and started again while an engine is at work."""
    rng = random.Random(arguments.seed)
    model = make_checkpoint(MODELS, "llama")
    extra = {"retry_s": 0.2, "longest_retry_s": 1.0}
    hits = trials = requests = 0
    with directory() as run_dir, Engine(Setup(model)) as right:
        daemon = start_daemon(run_dir)
        setup = Setup(model, run_dir=run_dir, own_cache=False, extra=extra)
        try:
            with Engine(setup) as engine:
                prompts = family(arguments.seed, 30)
                expected = right.generate(prompts, NEW)
                deadline = time.monotonic() + 60 * arguments.minutes
                while trials < arguments.trials and time.monotonic() < deadline:
                    engine.ask(prompts, NEW)
                    time.sleep(rng.uniform(0, 2))
                    daemon.process.kill()
                    daemon.process.wait()
                    time.sleep(rng.uniform(0, 1))
                    daemon = start_daemon(run_dir)
                    compare(engine.answers(), expected, f"trial {trials}")
                    again, asked = 0, 0
                    while not again and asked < 20:  # on a busy machine a look-up may be late, and kvd left alone
                        time.sleep(1.2)
                        again = compare(engine.generate(prompts, NEW), expected, f"after trial {trials}")
                        asked += 1
                    hits += again
                    trials += 1
                    requests += (1 + asked) * len(prompts)
                    assert again, "no hits after the restart"
                    say(f"trial {trials}: {again} tokens cached after the restart, the {asked}. time of asking")
                engine.settle()
            until(lambda: not daemon.stat().leases, 30)
            assert daemon.stat().ledger == "balanced"
        finally:
            daemon.__exit__(None, None, None)
    report("daemons killed under an engine", trials, requests=requests, cached_tokens=hits)


def shared(arguments: argparse.Namespace) -> None:
    """Two engines at once; others that must never hit; two hash seeds."""
    model, other = make_checkpoint(MODELS, "llama"), make_checkpoint(MODELS, "llama", seed=2)
    prompts = family(arguments.seed, 30)
    with directory() as run_dir, start_daemon(run_dir):
        setup = Setup(model, run_dir=run_dir, own_cache=False)
        with Engine(Setup(model)) as right:
            expected = right.generate(prompts, NEW)
        with Engine(setup) as first, Engine(setup) as second:
            first.ask(prompts, NEW)
            second.ask(list(reversed(prompts)), NEW)
            compare(first.answers(), expected, "first")
            compare(list(reversed(second.answers())), expected, "second")
            first.settle()
            hits = compare(second.generate(prompts, NEW), expected, "second, again")
            say(f"two engines at once: the second hits {hits} tokens")
            assert hits
            second.settle()
            salted = second.generate(prompts[:1], NEW, salt="tenant")
            say(f"another salt: {sum(one.cached for one in salted)} cached")
            assert not sum(one.cached for one in salted)
        strangers = {
            "another dtype": Setup(model, run_dir=run_dir, own_cache=False, dtype="bfloat16"),
            "other weights": Setup(other, run_dir=run_dir, own_cache=False),
            "another block size": Setup(model, 128, run_dir, own_cache=False),
        }
        for what, stranger in strangers.items():
            with Engine(stranger) as engine:
                cached = sum(one.cached for one in engine.generate(prompts[:1], NEW))
            say(f"{what}: {cached} cached")
            assert cached == 0
    report_all("engines that share", 2 + len(strangers) + 1)


def seeds(arguments: argparse.Namespace) -> None:
    """Interpreters with different PYTHONHASHSEED: what one stores the other hits."""
    with directory() as run_dir, start_daemon(run_dir):
        made = []
        for seed in ("1", "77"):
            command = [sys.executable, "-m", "tests.engines.vllm_trials", "one", "--run-dir", str(run_dir)]
            done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            made.append(done.stdout.strip().splitlines()[-1].split(" ", 1))
        say(f"hash seeds 1 and 77: {made[0][0]} then {made[1][0]} tokens cached")
        assert made[0][0] == "0"
        assert int(made[1][0]) > 0
        assert made[0][1] == made[1][1]
    report_all("hash seeds", 2)


def one(arguments: argparse.Namespace) -> None:
    """One engine, one prompt: prints the tokens cached and the tokens made."""
    model = make_checkpoint(MODELS, "llama")
    with Engine(Setup(model, run_dir=Path(arguments.run_dir), own_cache=False)) as engine:
        (made,) = engine.generate([family(7, 1, prefixes=1)[0] * 2], NEW)
        engine.settle()
    sys.stdout.write(f"{made.cached} {made.tokens}\n")


def harm(arguments: argparse.Namespace) -> None:
    """Daemons that are absent, full, stopped, or with a full disk: what it costs, and that the tokens are the same."""
    model = make_checkpoint(MODELS, "llama")
    prompts = family(arguments.seed, 30)

    def timed(engine: Engine, what: str) -> float:
        begin = time.monotonic()
        cached = compare(engine.generate(prompts, NEW), expected, what)
        took_s = time.monotonic() - begin
        say(f"{what}: {took_s:.2f} s for {len(prompts)} prompts, {cached} tokens cached")
        return took_s

    with Engine(Setup(model, own_cache=False)) as right:
        expected = right.generate(prompts, NEW)
        timed(right, "without the connector")
    trials = 0
    with directory() as run_dir:
        run_dir.mkdir(mode=0o700)
        with Engine(Setup(model, run_dir=run_dir, own_cache=False)) as engine:
            timed(engine, "kvd is absent")
            timed(engine, "kvd is absent, again")
            with start_daemon(run_dir) as daemon:
                time.sleep(2.5)
                timed(engine, "kvd has come")
                engine.settle()
                timed(engine, "kvd is there")
                daemon.process.send_signal(signal.SIGSTOP)
                try:
                    for turn in range(3):
                        timed(engine, f"kvd is stopped (SIGSTOP), {turn}")
                finally:
                    daemon.process.send_signal(signal.SIGCONT)
                time.sleep(5)
                timed(engine, "kvd goes on")
            trials += 7
    for what, settings in {
        "a full store": {"host_capacity": "4MiB", "host_extent": "4MiB"},
        "a store of two blocks' room": {"host_capacity": "4MiB", "host_extent": "4MiB", "blocks_capacity": "256KiB"},
    }.items():
        with directory() as run_dir, start_daemon(run_dir, **settings) as daemon:
            with Engine(Setup(model, run_dir=run_dir, own_cache=False)) as engine:
                timed(engine, what)
                timed(engine, f"{what}, again")
            until(lambda daemon=daemon: not daemon.stat().leases, 30)  # type: ignore[misc]
            assert daemon.stat().ledger == "balanced"
            trials += 2
    report_all("daemons that cannot serve", trials)


def preempted(arguments: argparse.Namespace) -> None:
    """An engine whose cache is too small for what it is asked at once: requests lose their blocks and begin again."""
    model = make_checkpoint(MODELS, "llama")
    prompts = family(arguments.seed, 24, longest=200)
    new = 160
    with Engine(Setup(model)) as right:
        expected = right.generate(prompts, new)
    for own_cache in (True, False):
        with directory() as run_dir, start_daemon(run_dir) as daemon:
            setup = Setup(model, run_dir=run_dir, own_cache=own_cache, max_tokens=1024, blocks=64)
            for turn in ("the first", "the second"):
                with Engine(setup) as engine:
                    cached = compare(engine.generate(prompts, new), expected, f"{turn}, own cache {own_cache}")
                    engine.settle()
                    preemptions = engine.preemptions()
                say(f"{turn}, own cache {own_cache}: {preemptions} preemptions, {cached} tokens cached")
                assert preemptions, "nothing was preempted"
            assert cached
            until(lambda daemon=daemon: not daemon.stat().leases, 30)  # type: ignore[misc]
            assert daemon.stat().ledger == "balanced"
    report("outputs of engines that preempt", 4 * len(prompts))


def reset(arguments: argparse.Namespace) -> None:
    """After a reset an engine finds only what it stores itself, and another never finds that."""
    model = make_checkpoint(MODELS, "llama")
    prompts = family(arguments.seed, 12)
    with directory() as run_dir, start_daemon(run_dir):
        setup = Setup(model, run_dir=run_dir, own_cache=False)
        with Engine(setup) as engine, Engine(setup) as other:
            expected = engine.generate(prompts, NEW)
            engine.settle()
            before = compare(engine.generate(prompts, NEW), expected, "before")
            engine.reset_cache()
            (first,) = engine.generate(prompts[:1], NEW)
            assert (first.tokens, first.cached) == (expected[0].tokens, 0), "found what was stored before the reset"
            fresh = family(arguments.seed + 1, 12)
            right = engine.generate(fresh, NEW)
            engine.settle()
            again = compare(engine.generate(fresh, NEW), right, "after the reset")
            (theirs,) = other.generate(fresh[:1], NEW)
            say(f"{before} tokens cached before the reset, {again} of what came after; another engine {theirs.cached}")
            assert before
            assert again
            assert theirs.cached == 0
    report_all("engines that were reset", 1)


def refused(arguments: argparse.Namespace) -> None:
    """A model whose attention cannot go on behind loaded tokens is refused by name, before it makes a token."""
    model = make_checkpoint(MODELS, "mla")
    said = ""
    with directory() as run_dir:
        try:
            Engine(Setup(model, 16, run_dir)).kill()
        except RuntimeError as error:
            said = str(error)
    say(said)
    assert "CPU_MLA" in said, "MLA without AMX was not refused"
    report_all("models that are refused", 1)


TRIALS = {
    "equal": equal,
    "kills": kills,
    "restarts": restarts,
    "shared": shared,
    "seeds": seeds,
    "harm": harm,
    "preempted": preempted,
    "soak": soak,
    "reset": reset,
    "refused": refused,
    "one": one,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm_trials", description=__doc__)
    parser.add_argument("what", choices=list(TRIALS), nargs="+")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["llama", "qwen"])
    parser.add_argument("--prompts", type=int, default=200, help="prompts of each setting of `equal`")
    parser.add_argument("--trials", type=int, default=50, help="most kills of `kills` and `restarts`")
    parser.add_argument("--minutes", type=float, default=60.0, help="longest that these and `soak` go on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", help="of the daemon, for `one`")
    arguments = parser.parse_args()
    MODELS.mkdir(exist_ok=True)
    prepare()
    status = 0
    for what in arguments.what:
        try:
            TRIALS[what](arguments)
        except (AssertionError, TimeoutError) as error:
            say(f"{what}: {type(error).__name__}: {error}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
