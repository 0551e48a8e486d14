"""Compare AdamW's step on a CPU with that of torch's fused one, in float32.

``python -m benchmarks.adamw [--threads N] [--rounds N] [--json]``. The parameters are those of the preset
``stories-cpu`` (5.3M) and of the shape 110m of :mod:`benchmarks.generate` (134M with both embeddings), with random
gradients, in the trainer's two groups. Both take turns of some steps in one process, on the same parameters, with state
of their own. The results are medians over the rounds. CPU time is that of all threads; other programs change it less
than the wall time. The last line is JSON: ``ratios`` are torch's time over ours.
"""

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict

import torch

from benchmarks.generate import SHAPES
from benchmarks.train import SHAPES as TRAIN_SHAPES
from lm.hardware.cpu import available_cpus
from lm.model.transformer import TransformerLM
from lm.optim import AdamW

_SHAPES = {"stories": TRAIN_SHAPES["stories"][0], "110m": SHAPES["110m"]}
_CLOCKS = ("wall", "cpu")
_TURN_PARAMETERS = 100_000_000  # fewest updates of a number in a turn


def measure(shape: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds a step of both: ``wall`` and ``cpu``."""
    params = list(TransformerLM(_SHAPES[shape]).parameters())
    for p in params:
        p.grad = torch.randn_like(p) / 100
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "ours": AdamW([group.copy() for group in groups], 1e-4, (0.9, 0.95)),
        "torch": torch.optim.AdamW([group.copy() for group in groups], 1e-4, (0.9, 0.95), fused=True),
    }
    for optimizer in optimizers.values():
        optimizer.step()  # makes the moments
    count = sum(p.numel() for p in params)
    steps = 1 + _TURN_PARAMETERS // count
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in sorted(optimizers, reverse=bool(number % 2)):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                optimizers[name].step()
            seconds[name, "wall"].append((time.perf_counter() - wall) / steps)
            seconds[name, "cpu"].append((time.process_time() - cpu) / steps)
    return {name: {clock: 1000 * statistics.median(seconds[name, clock]) for clock in _CLOCKS} for name in optimizers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    milliseconds = {shape: measure(shape, options.rounds) for shape in _SHAPES}
    ratios = {
        f"{shape}_{clock}": round(row["torch"][clock] / row["ours"][clock], 3)
        for shape, row in milliseconds.items()
        for clock in _CLOCKS
    }
    if not options.json:
        print(f"{'':10}" + "".join(f"{head:>14}" for head in ("ours, ms", "CPU", "torch, ms", "CPU")))
        for shape, row in milliseconds.items():
            cells = [row[name][clock] for name in ("ours", "torch") for clock in _CLOCKS]
            print(f"{shape:10}" + "".join(f"{cell:>14.2f}" for cell in cells))
    machine = {"threads": options.threads, "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"ratios": ratios, "milliseconds": milliseconds, "machine": machine}))


if __name__ == "__main__":
    main()
