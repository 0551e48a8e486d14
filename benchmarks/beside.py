"""Compare how much a program that holds one core slows textmill and its peer.

``python -m benchmarks.beside [--rounds N] [--parent CHECKOUT] [--json]``. Each measurement is a process, alone or
beside a busy one; all take turns. Measured are a training step of the demo's model (:mod:`benchmarks.train`), and
prefill and decoding of a model of 110M parameters with 1 and 8 sequences (:mod:`benchmarks.generate`), all in float32
and with as many threads as cores. The peer is Hugging Face's Llama with OpenMP's default, to spin while it waits.

``loss`` is the time beside the busy process over the time alone, both medians. The last line is JSON: ``ratios`` are
our loss over the peer's, and ``alone`` our time alone over that of the checkout ``--parent``, if there is one.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.generate import Job

_HERE = Path(__file__).parents[1]
_BUSY = [sys.executable, "-c", "while True: pass"]
Figures = dict[str, list[float]]  # seconds of each round, by the name of what is measured


def commands(implementation: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the arguments of each measuring process, and which of its figures have which name."""
    job = json.dumps([implementation, "float32", False])
    yield {"seconds": "training step"}, ["benchmarks.train", "--shape", "demo", "--seconds", "3", "--worker", job]
    for batch in (1, 8):
        job = json.dumps(Job(implementation, "float32", batch))
        names = {"step": f"decode, {batch}", "prefill": f"prefill, {batch}"}
        yield names, ["benchmarks.generate", "--shape", "110m", "--worker", job]


def measure(implementation: str, checkout: Path, figures: Figures) -> None:
    """Add the figures of an implementation to ``figures``."""
    for names, arguments in commands(implementation):
        command = [sys.executable, "-m", *arguments, "--device", "cpu"]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        if implementation == "transformers":
            environment["GOMP_SPINCOUNT"] = "300000"  # the default of OpenMP, which lm changes
        result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{' '.join(command)} in {checkout} failed:\n{result.stderr[-2000:]}")
        row = json.loads(result.stdout.splitlines()[-1])
        for key, name in names.items():
            figures[name].append(row[key])


@contextmanager
def busy_core() -> Iterator[None]:
    """Hold one core in a ``with`` block."""
    with subprocess.Popen(_BUSY) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parent", type=Path, help="a checkout whose times alone are measured too")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    rows: dict[str, Figures] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        for implementation in ("ours", "transformers"):
            measure(implementation, _HERE, rows[f"{implementation} alone"])
            with busy_core():
                measure(implementation, _HERE, rows[f"{implementation} loaded"])
        if options.parent:
            measure("ours", options.parent.resolve(), rows["parent alone"])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    seconds = {name: {key: statistics.median(row[key]) for key in row} for name, row in rows.items()}
    losses = {
        name: {key: seconds[f"{name} loaded"][key] / seconds[f"{name} alone"][key] for key in seconds["ours alone"]}
        for name in ("ours", "transformers")
    }
    ratios = {key: losses["ours"][key] / losses["transformers"][key] for key in losses["ours"]}
    parent = seconds.get("parent alone", {})
    alone = {key: seconds["ours alone"][key] / parent[key] for key in parent}
    if not options.json:
        heads = ("ours, ms", "loaded", "loss", "peer, ms", "loaded", "loss", "ours / peer", "alone / parent")
        print(f"{'':15}" + "".join(f"{head:>15}" for head in heads))
        for key, ratio in ratios.items():
            cells = []
            for name, loss in losses.items():
                both = (1000 * seconds[f"{name} {state}"][key] for state in ("alone", "loaded"))
                cells += [*(f"{value:.1f}" for value in both), f"{loss[key]:.2f}"]
            cells += [f"{ratio:.2f}", f"{alone[key]:.2f}" if parent else ""]
            print(f"{key:15}" + "".join(f"{cell:>15}" for cell in cells))
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    rounded = {key: round(value, 3) for key, value in ratios.items()}
    print(
        json.dumps(
            {
                "ratios": rounded,
                "alone": {key: round(value, 3) for key, value in alone.items()},
                "seconds": seconds,
                "machine": machine,
            }
        )
    )


if __name__ == "__main__":
    main()
