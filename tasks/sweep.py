"""Stage ``sweep``: the table, the curves and the best configuration of a sweep."""

import json

import yaml

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
) -> None:
    """Write ``table.csv``, ``curves.jsonl``, ``best.yaml``, and ``law.json`` if the sweep has a scaling law.

    ``models`` are the trained models: the sweep needs their files, so ``textmill gc`` keeps them. The last point of the
    report belongs to ``check``, the training that checks the law.
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
    if results[best].state == "finished":
        config = {"name": f"{report.name}-best", **report.configs[best]}
        (out.directory / "best.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        out.figures |= {"best_point": best + 1, "best_loss": results[best].objective}
    if law:
        content = law[0].json("law.json")
        out.write_json("law.json", content, indent=1)
