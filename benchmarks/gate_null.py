"""Count how often the gate accepts a variant that is the baseline itself, from real trainings.

``python -m benchmarks.gate_null --root DIR [--size demo] [--seeds 24] [--comparisons 40]`` trains the baseline of
``textmill sweep gate`` with many seeds at both sizes; a second start takes them from the cache. Each comparison draws
half of the seeds as the baseline and the others as the variant, anew at each size. Prints JSON: the verdicts at the
whole level, and at that of a first look at half of the seeds.
"""

import argparse
import csv
import json
import random
from collections import Counter
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from flows.prefect_support.server import server_for_flow
from flows.sweep_config import SweepConfig, load_sweep
from lm.experiments.axes import Axis
from lm.experiments.config import GateConfig
from lm.experiments.gate import LEVEL, LossLaw, compare_size, decide, fit_loss_law, plan_trainings
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import RunContext


def train_pool(size: str, seeds: int, root: str) -> tuple[GateConfig, list[dict[str, str]]]:
    """Train the baselines of a gate. Return its configuration, and the rows of the table in the order of its plan."""
    shipped = load_sweep("gate", size)
    if shipped.gate is None:
        raise ValueError("the sweep has no gate")
    gate, base = replace(shipped.gate, seeds=seeds, max_seeds=max(seeds, shipped.gate.max_seeds)), shipped.base
    base = replace(base, execution=replace(base.execution, threads=1))
    cases = [training.settings(gate, base.train.seed, base.train.steps) for training in plan_trainings(gate)]
    with server_for_flow():
        from flows.sweep import sweep

        record = sweep(SweepConfig("gate-null", "", base, [Axis(cases=cases)], shipped.derive), root)
    output = read_output(RunContext(root, "").store, Ref("sweep", record["stages"]["sweep"]["key"]))
    with output.path("table.csv").open(encoding="utf-8", newline="") as file:
        return gate, sorted(csv.DictReader(file), key=lambda row: int(row["point"]))


def compare_with_itself(size: str, seeds: int, comparisons: int, root: str) -> dict[str, Any]:
    """Return how many comparisons of the baseline with itself have each verdict."""
    gate, rows = train_pool(size, seeds, root)
    plan = plan_trainings(gate)
    pool: list[list[float]] = [[], []]
    points: list[list[tuple[float, float]]] = [[], []]  # FLOPs and losses of the other lengths
    flops = [0.0, 0.0]
    for training, row in zip(plan, rows, strict=True):
        loss = float(row["valid_bits_per_byte"])
        if training.length == 1:
            pool[training.size].append(loss)
            flops[training.size] = float(row["flops"])
        else:
            points[training.size].append((float(row["flops"]), loss))
    laws: list[LossLaw] = []
    for number, losses in enumerate(pool):
        amounts, others = zip(*points[number], strict=True)
        laws.append(fit_loss_law([flops[number], *amounts], [fmean(losses), *others]))
    generator, verdicts = random.Random(0), {"whole level": Counter[str](), "half of it": Counter[str]()}
    values: list[float] = []  # p of all sizes, at the whole level
    for _ in range(comparisons):
        halves = []
        for losses in pool:
            drawn = generator.sample(losses, seeds)
            halves.append((drawn[: seeds // 2], drawn[seeds // 2 :]))
        for name, level in (("whole level", LEVEL), ("half of it", LEVEL / 2)):
            sizes = [
                compare_size(*halves[number], laws[number], (flops[number],) * 2, level, gate.least_speedup)
                for number in range(2)
            ]
            verdicts[name][decide(sizes)[0]] += 1
            values += [part.p for part in sizes] if level == LEVEL else []
    return {
        "comparisons": comparisons,
        "verdicts": {name: dict(counts) for name, counts in verdicts.items()},
        "share of p at a size": {
            f"<= {limit}": sum(p <= limit for p in values) / len(values) for limit in (0.01, 0.1, 0.5)
        },
        "loss": [round(fmean(losses), 4) for losses in pool],
        "deviation of the seeds": [round(stdev(losses), 5) for losses in pool],
        "gain of the least speed-up": [
            round(law(amount) - law(gate.least_speedup * amount), 5) for law, amount in zip(laws, flops, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the trainings")
    parser.add_argument("--size", default="demo", help="size of the sweep gate")
    parser.add_argument("--seeds", type=int, default=24, help="trainings at each size")
    parser.add_argument("--comparisons", type=int, default=40)
    options = parser.parse_args()
    print(json.dumps(compare_with_itself(options.size, options.seeds, options.comparisons, options.root), indent=1))


if __name__ == "__main__":
    main()
