"""Stage ``gate``: the verdict on a variant from the trials of a sweep, and its entry in the ledger below the root."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from lm.experiments.config import GateConfig
from lm.experiments.trial import TrialConfig, from_json
from tasks.runtime.gate_ledger import append_entry, find_spent
from tasks.runtime.output import Output, Ref, json_digest, read_output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage
from tasks.runtime.store import Store

TIMES = "times.json"


@dataclass(frozen=True)
class Look:
    """A look at a comparison, and the error that the earlier looks have spent."""

    comparison: str
    """Digest of the text, and of the configurations of both arms at both sizes, without their seeds."""
    evidence: str
    """Digest of the results of all trainings."""
    spent: float


def find_look(store: Store, index: Ref, arms: list[TrialConfig], trials: list[Ref]) -> Look:
    """Return the look at ``trials``. ``arms`` are a training of each arm at each size, ``index`` that of the shards."""
    identities = [config.identity for config in arms]
    for identity in identities:  # other seeds are another try of the same comparison
        identity["train"] = {name: value for name, value in identity["train"].items() if name != "seed"}
    comparison = json_digest([read_output(store, index).digest, identities])
    evidence = json_digest(store.map(lambda ref: read_output(store, ref).digest, trials))
    return Look(comparison, evidence, find_spent(store, comparison, evidence))


@stage("gate")
def gate(out: Attempt, trials: list[Output], models: list[Output], config: GateConfig, look: Look) -> None:
    """Write ``gate.json``, the verdict, and the record ``times.json``, what the trainings and more seeds cost. Append
    an entry to the ledger.

    ``trials`` are in the order of :func:`lm.experiments.gate.plan_trainings`. ``models`` are the trained models.
    """
    from lm.experiments.gate import judge

    results = [from_json(output.json("trial.json")) for output in trials]
    result = judge(config, results, look.spent)
    out.write_json("gate.json", {"config": asdict(config), "result": asdict(result)}, indent=1, allow_nan=False)
    times = _measure(trials, models, config, result)
    out.write_json(TIMES, times, indent=1, allow_nan=False)
    out.records = [TIMES]  # another machine has other times
    out.figures = {"verdict": result.verdict, "reason": result.reason, "seeds": config.seeds}
    out.figures |= {f"p_{number}": size.p for number, size in enumerate(result.sizes, start=1)}
    out.figures |= {f"speedup_{number}": size.speedup for number, size in enumerate(result.sizes, start=1)}
    entry = {
        "comparison": look.comparison,
        "evidence": look.evidence,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": out.run.name,
        "variant": config.variant,
        "sizes": config.sizes,
        "seeds": config.seeds,
        "level": result.level,
        "verdict": result.verdict,
        "reason": result.reason,
        "p": [size.p for size in result.sizes],
        "speedups": [size.speedup for size in result.sizes],
        "speedups_in_time": times["speedups"],
    }
    append_entry(out.run.store, entry, look.spent)


def _measure(trials: list[Output], models: list[Output], config: GateConfig, result: Any) -> dict[str, Any]:
    """Return the content of ``times.json``."""
    from lm.experiments.gate import measured_seconds, plan_trainings, speedup_in_time
    from lm.train.tracking import read_metrics

    by_key = {model.ref.key: model for model in models}
    steps: dict[tuple[str, int], list[float]] = {}  # seconds of the steps, by arm and size
    whole: dict[tuple[str, int], list[float]] = {}
    total = 0.0
    for training, trial in zip(plan_trainings(config), trials, strict=True):
        content = trial.json("trial.json")
        if not (model := by_key.get(content["model"])):
            continue  # it diverged, or its model was deleted
        seconds = float(model.manifest["made"]["seconds"])
        total += seconds
        if training.length == 1:
            whole.setdefault((training.arm, training.size), []).append(seconds)
            if measured := measured_seconds(read_metrics(model.path("metrics.jsonl")), content["tokens"]):
                steps.setdefault((training.arm, training.size), []).append(measured)
    numbers = range(len(config.sizes))
    baseline, variant = (
        [median(steps[arm, number]) if (arm, number) in steps else None for number in numbers]
        for arm in ("baseline", "variant")
    )
    seed_hours = sum(map(fmean, whole.values())) / 3600
    return {
        "baseline_seconds": baseline,
        "variant_seconds": variant,
        "speedups": [
            speedup_in_time(size, before, after) if before and after else None
            for size, before, after in zip(result.sizes, baseline, variant, strict=False)
        ],
        "hours": total / 3600,
        "hours_to_needed": (result.seeds_needed - config.seeds) * seed_hours if result.seeds_needed else None,
        "hours_to_largest": (config.max_seeds - config.seeds) * seed_hours,
    }
