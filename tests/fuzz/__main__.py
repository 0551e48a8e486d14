"""``python -m tests.fuzz``: all targets, or one, each in a process of its own; then a table of what was done.

The executions asked for are divided among the targets; each ends when it has done its part, or its minutes are over.
Cases that fail are kept in ``--found``, the shortest of each kind; exits with 1 where there are any.
"""

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lm.errors import UserError
from tests.fuzz.engine import State, Target, Trial, keep, run

_GRACE = 600  # seconds that a target may take to start and, past its time, to end
_NOT_INSTRUMENTED = ("simd", "table", "scan", "walk", "count", "encode", "merge", "apply_merges", "decode")
"""Kernels: what numba compiles, Atheris cannot look into."""

PARSERS = {
    "texts": ("tokenizer", "tokenizer_json", "tiktoken", "sentencepiece", "sources", "counts", "shards"),
    "weights": ("checkpoint", "checkpoint_file", "meta", "hugging_face", "odd_tensors", "job"),
    "interfaces": ("manifest", "config", "preset", "request"),
}
KERNELS = ("scanning", "encoding", "refusing", "counting", "merging", "applying", "decoding")
TARGETS = [name for names in PARSERS.values() for name in names] + [f"kernels-{name}" for name in KERNELS]


def target_named(name: str, folder: Path) -> Target:
    """What a target does with bytes: a parser in ``folder``, or a loop of the kernels."""
    if name.startswith("kernels-"):
        from tests.fuzz import kernels

        loop: Callable[[random.Random], int] = getattr(kernels, name.removeprefix("kernels-"))
        return lambda data: loop(random.Random(data))
    from importlib import import_module

    from tests.fuzz.choices import Choices

    [module] = [module for module, names in PARSERS.items() if name in names]
    parser = getattr(import_module(f"tests.fuzz.{module}"), name)

    def parse(data: bytes) -> int:
        parser(Choices(data), folder)
        return 1

    return parse


def work(name: str, seed: int, seconds: float, executions: int, folder: Path, found: Path) -> None:
    """One target in this process, with its files in ``folder``."""
    logging.disable()
    if not name.startswith("kernels-"):
        try:
            import atheris
        except ImportError:
            pass
        else:
            kernels = [f"lm.kernels.{module}" for module in _NOT_INSTRUMENTED]
            with atheris.instrument_imports(include=["lm", "tasks", "flows"], exclude=["lm.kernels", *kernels]):
                target_named(name, Path())
    files = folder / "files"
    files.mkdir()
    target = target_named(name, files)
    warm = target_named("kernels-encoding", files) if name in PARSERS["texts"] else target
    for number in range(30):
        with suppress(UserError):
            warm(bytes([number] * number))  # what it needs is compiled, which takes longer than may be
    with suppress(UserError):
        target(b"")
    trial = Trial(name, target, State(folder / "state"), found, seconds, executions)
    if name.startswith("kernels-"):
        source = random.Random(seed)
        while not trial.is_over:
            trial.one(source.randbytes(8))
    else:
        run(trial, seed, folder / "corpus")


def one_target(name: str, seed: int, seconds: float, executions: int, found: Path, log: Path) -> State:
    """One target in a process that may crash or never end; what it was at then is kept."""
    memory = Path("/dev/shm")
    options = [*("--target", name, "--seed", str(seed), "--minutes", str(seconds / 60)), "--found", str(found)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *options, "--executions", str(executions)]
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        state = Path(folder) / "state"
        State(state)
        with log.open("wb") as output:
            process = subprocess.Popen([*command, "--folder", folder], stdout=output, stderr=subprocess.STDOUT)
            try:
                code: int | str = process.wait(seconds + _GRACE)
            except subprocess.TimeoutExpired:
                code = "no end"
            finally:
                process.kill()
                process.wait()
        done = State(state)
    if code != 0:
        keep(found, name, f"ended with {code}", done.last, log.read_text(errors="replace")[-20_000:])
    return done


def main() -> int:
    """Parse the options and run what they name."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="one of the targets; may be repeated")
    parser.add_argument("--minutes", type=float, default=15, help="most of them for a target")
    parser.add_argument("--executions", type=int, default=10_000_000, help="in all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--found", type=Path, default=Path(tempfile.gettempdir()) / "textmill-fuzz")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.target or TARGETS
    if options.folder:
        work(targets[0], options.seed, 60 * options.minutes, options.executions, options.folder, options.found)
        return 0
    options.found.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}; cases that fail go to {options.found}\n", flush=True)
    print(f"{'target':<18} {'executions':>12} {'seconds':>9} {'MB more':>8} {'findings':>9}")
    total, failed, seconds = 0, 0, 0.0
    for name in targets:
        log = options.found / f"{name}.log"
        done = one_target(
            name, options.seed, 60 * options.minutes, -(-options.executions // len(targets)), options.found, log
        )
        count = len([path for path in options.found.glob(f"{name}-*.txt") if path.stem[: -len("-12345678")] == name])
        grown = (done.memory - done.first_memory) >> 20
        print(f"{name:<18} {done.executions:>12,} {done.seconds:>9,.0f} {grown:>8,} {count:>9}", flush=True)
        total, failed, seconds = total + done.executions, failed + count, seconds + done.seconds
    print(f"{'all':<18} {total:>12,} {seconds:>9,.0f} {'':>8} {failed:>9}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
