"""``python -m tests.fuzz``: run all targets or some, each in its own process, and print a table of the results.

The executions are divided equally among the targets. A target ends after its share, or after ``--minutes``. The inputs
that fail are saved in ``--findings``, the shortest of each kind. The exit code is 1 if there are any.
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

from lm.common.errors import UserError
from tests.fuzz.engine import State, Target, Trial, run, save_finding
from tests.helpers.processes import PROJECT

_GRACE_SECONDS = 600  # for the start of a target, and for its end after its time is over

PARSERS = {
    "texts": ("tokenizer", "tokenizer_json", "tiktoken", "sentencepiece", "sources", "web", "counts", "shards"),
    "weights": (
        "checkpoint",
        "checkpoint_file",
        "meta",
        "hugging_face",
        "odd_tensors",
        "torch_file",
        "gguf",
        "job",
        "adapter",
    ),
    "interfaces": ("manifest", "config", "preset", "request", "embeddings", "structured_output", "authorization"),
    "tool_requests": ("tool_request",),
    "chat_templates": ("chat_template",),
}
KERNELS = (
    *("pretoken_starts", "encoding", "invalid_utf8", "counting", "training", "random_merges"),
    *("decode_step", "generation"),
)
TARGETS = [name for names in PARSERS.values() for name in names] + [f"kernels-{name}" for name in KERNELS]


def make_target(name: str, folder: Path) -> Target:
    """Return the target of this name: a parser with its files in ``folder``, or a comparison of kernels."""
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


def work(name: str, seed: int, seconds: float, executions: int, folder: Path, findings: Path) -> None:
    """Run one target in this process, with its files in ``folder``."""
    logging.disable()
    if not name.startswith("kernels-"):
        try:
            import atheris
        except ImportError:
            pass
        else:
            # numba cannot compile instrumented code.
            paths = [path.relative_to(PROJECT).with_suffix("") for path in (PROJECT / "lm" / "kernels").rglob("*.py")]
            kernels = [".".join(path.parts).removesuffix(".__init__") for path in paths]
            with atheris.instrument_imports(include=["lm", "tasks", "flows", "textmill"], exclude=kernels):
                make_target(name, Path())
    files = folder / "files"
    files.mkdir()
    target = make_target(name, files)
    warm_up = make_target("kernels-encoding", files) if name in PARSERS["texts"] else target
    for number in range(30):
        with suppress(UserError):
            warm_up(bytes([number] * number))  # compiles the kernels, which takes longer than the limit
    with suppress(UserError):
        target(b"")
    trial = Trial(name, target, State(folder / "state"), findings, seconds, executions)
    if name.startswith("kernels-"):
        source = random.Random(seed)
        while not trial.is_over:
            trial.execute(source.randbytes(8))
    else:
        run(trial, seed, folder / "corpus")


def run_target(name: str, seed: int, seconds: float, executions: int, findings: Path, log: Path) -> State:
    """Run one target in a process. If it crashes or hangs, save its last input."""
    shared_memory = Path("/dev/shm")
    options = [*("--target", name, "--seed", str(seed), "--minutes", str(seconds / 60)), "--findings", str(findings)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *options, "--executions", str(executions)]
    with tempfile.TemporaryDirectory(dir=shared_memory if os.access(shared_memory, os.W_OK) else None) as folder:
        state = Path(folder) / "state"
        State(state)
        with log.open("wb") as output:
            process = subprocess.Popen([*command, "--folder", folder], stdout=output, stderr=subprocess.STDOUT)
            try:
                code: int | str = process.wait(seconds + _GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                code = "a timeout"
            finally:
                process.kill()
                process.wait()
        result = State(state)
    if code != 0:
        save_finding(findings, name, f"ended with {code}", result.last, log.read_text(errors="replace")[-20_000:])
    return result


def main() -> int:
    """Run the targets of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="a target; may be repeated; default: all")
    parser.add_argument("--minutes", type=float, default=15, help="time limit of a target")
    parser.add_argument("--executions", type=int, default=10_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "textmill-fuzz")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.target or TARGETS
    if options.folder:
        work(targets[0], options.seed, 60 * options.minutes, options.executions, options.folder, options.findings)
        return 0
    options.findings.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}; inputs that fail are saved in {options.findings}\n", flush=True)
    print(f"{'target':<18} {'executions':>12} {'seconds':>9} {'MB grown':>8} {'findings':>9}")
    total, failed, seconds = 0, 0, 0.0
    for name in targets:
        log = options.findings / f"{name}.log"
        share = -(-options.executions // len(targets))
        result = run_target(name, options.seed, 60 * options.minutes, share, options.findings, log)
        count = len([path for path in options.findings.glob(f"{name}-*.txt") if path.stem[: -len("-12345678")] == name])
        growth = (result.memory - result.first_memory) >> 20
        print(f"{name:<18} {result.executions:>12,} {result.seconds:>9,.0f} {growth:>8,} {count:>9}", flush=True)
        total, failed, seconds = total + result.executions, failed + count, seconds + result.seconds
    print(f"{'all':<18} {total:>12,} {seconds:>9,.0f} {'':>8} {failed:>9}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
