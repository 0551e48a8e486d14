"""Stage ``sweep``: the table, the curves and the best configuration of a sweep."""

import json
from dataclasses import asdict
from typing import Any

import yaml

from lm.experiments.record import RecordedText, judge_record
from lm.experiments.report import SweepReport, format_csv, table_rows
from lm.experiments.trial import from_json, rank
from tasks.pages import sweep as pages
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage


@stage("sweep", page=pages.sweep)
def sweep(
    out: Attempt,
    trials: list[Output],
    models: list[Output],
    law: list[Output],
    check: list[Output],
    report: SweepReport,
    mixture: list[Output] | None = None,
    gate: list[Output] | None = None,
    record: RecordedText | None = None,
) -> None:
    """Write ``table.csv``, ``curves.jsonl``, ``best.yaml``, and ``law.json`` if the sweep has a scaling law.

    ``models`` are the trained models: the sweep needs their files, so ``textmill gc`` keeps them. The last points of
    the report belong to ``check``, the trainings that check the law. With the law of a ``mixture``, ``best.yaml`` has
    the weights that it found, the best point is the longest one with the lowest target of the law, and
    ``mixture.json`` has the losses of the checks. With a ``gate``, the best point is of the arm to go on with. With a
    ``record``, ``record.json`` says whether it holds.
    """
    results = [from_json(output.json("trial.json")) for output in (*trials, *check)]
    rows = table_rows(report, results)
    (out.directory / "table.csv").write_text(format_csv(rows), encoding="utf-8")
    curves = [{"point": index + 1, **row} for index, result in enumerate(results) for row in result.curve]
    text = "".join(json.dumps(row) + "\n" for row in curves)
    (out.directory / "curves.jsonl").write_text(text, encoding="utf-8")
    states = [result.state for result in results]
    out.figures = {"points": len(results), **{state: states.count(state) for state in dict.fromkeys(states)}}
    best = rank(results)[0]
    found: dict[str, Any] | None = mixture[0].json("mixture.json") if mixture else None
    if found:
        best = min(found["runs"], key=lambda run: (-run["length"], run["target"]))["point"] - 1
        for number, result in enumerate(results[len(trials) :]):  # for each seed, the mixtures in their order
            if len(losses := result.source_bits_per_byte) == len(found["sources"]):
                part = list(found["mixtures"].values())[number % len(found["mixtures"])]
                part.setdefault("measured", []).append([losses[name] for name in found["sources"]])
    if gate:
        best = gate[0].json("gate.json")["result"]["kept"]
    if results[best].state == "finished":
        config = {"name": f"{report.name}-best", **report.configs[best]}
        if found:
            config["data"] = config["data"] | {"mix": _mix_found(config["data"]["mix"], found)}
        (out.directory / "best.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        out.figures |= {"best_point": best + 1, "best_loss": results[best].objective}
    if record:
        verdict = judge_record(record.config, record.text, [result.valid_loss for result in results])
        recorded = {"record": asdict(record.config), "text": record.text, "result": asdict(verdict)}
        out.write_json("record.json", recorded, indent=1)
        out.figures |= {"record": verdict.verdict}
    if law:
        content = law[0].json("law.json")
        out.write_json("law.json", content, indent=1)
    if found:
        out.write_json("mixture.json", found, indent=1)


def _mix_found(mix: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the sources of a mixture with the weights that the law found, and the limits of epochs that they had."""
    values = zip(found["sources"], found["mixtures"]["found"]["weights"], found["max_epochs"], strict=True)
    return {
        name: {**mix[name], "weight": round(weight, 4), "max_epochs": max_epochs} for name, weight, max_epochs in values
    }
