"""What the commands of ``textmill`` print when they end.

The columns are aligned by format strings. A library for tables would also draw rules and choose the widths.
"""

import csv
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from flows.forecast import Forecast
from flows.prefect_support.deployments import LOCAL_POOL
from lm.posttrain.config import Method
from tasks.pages.gate import comparison_rows, verdict_lines
from tasks.pages.markdown import format_size, plain, shorten
from tasks.pages.posttrain import percent_with_interval
from tasks.pages.profile import compute_rows, describe, memory_rows, phase_rows
from tasks.pages.sweep import record_line
from tasks.pages.tokenizer import compression_rows, loss_rows
from tasks.runs.models import RESULT_STAGES, DirectoryModel, RunModel
from tasks.runs.run_record import absolute_root, outputs_of
from tasks.runs.run_report import format_figures
from tasks.runtime.output import Output
from tasks.runtime.run_context import RunContext
from textmill.cli.terminal import wrap

if TYPE_CHECKING:
    from flows.compare_tokenizers import ComparisonResult
    from flows.deploy import Deployment
    from flows.evaluate import EvaluationResult
    from flows.profile import ProfileResult
    from flows.teach import TeachResult
    from lm.curate.document_filter import Verdict
    from textmill.runs.compare_runs import RunComparison
    from textmill.runs.run_list import RunSummary

_MAX_FAILURES = 5

_MAX_POINTS = 30

_COLUMNS = 80
_COMMAND_WIDTH = 40

# Beginnings of the figures that a summary shows of a stage. Of other stages, it shows all.
_SUMMARY_FIGURES = {
    "ingest": ("train ", "valid documents"),
    "encode": ("train tokens", "train bytes per token", "valid tokens"),
    "train": ("steps", "tokens", "valid"),
    **dict.fromkeys(get_args(Method), ("steps", "valid")),
    "evaluate": (),  # a table of its own
}


def format_sample(prompt: str, text: str) -> str:
    """Return a prompt and its continuation in one paragraph, wrapped in a terminal."""
    return wrap(f"\n> {prompt}|{text}", sys.stdout)


def format_verdicts(verdicts: "Sequence[Verdict]") -> str:
    """Return a table of what each rule makes of a document, and whether the filter keeps it."""
    width = max(len(verdict.rule) for verdict in verdicts)
    lines = [f"{'rule':<{width}} {'value':>12} {'limit':>12}  verdict"]
    for rule, value, limit, is_passed in verdicts:
        sign = " " if isinstance(limit, str) else "≥" if "min_" in rule else "≤"
        shown = f"{_short(value):>12} {sign}{_short(limit):>11}"
        lines.append(f"{rule:<{width}} {shown}  {'passes' if is_passed else 'FAILS'}")
    failed = [verdict.rule for verdict in verdicts if not verdict.is_passed]
    end = f"The filter removes this document. Reason: {failed[0]}." if failed else "The filter keeps this document."
    return "\n".join([*lines, "", end])


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


def format_summary(record: dict[str, Any]) -> str:
    """Return one screen of text: the stages of a run, its outputs, and the next commands to try."""
    run = RunContext(record["root"], record["name"])
    outputs = outputs_of(run, record)
    lines = _format_stages(record, outputs)
    if "evaluate" in outputs:
        lines += ["", *_format_models(outputs["evaluate"].manifest["figures"])]
    if "sample" in outputs:
        lines += [format_sample(**sample) for sample in outputs["sample"].json("samples.json")]
    lines += ["", "Files; the report has the pages of the stages and all paths:"]
    lines.append(f"  report   {_short_path(run.store.url('runs', run.name))}.md")
    trained = [outputs[name] for name, _ in reversed(RESULT_STAGES) if name in outputs]
    for model in trained[-1:]:
        lines.append(f"  metrics  {_short_pattern(model)}/metrics.jsonl")
        if any(file["path"].startswith("tensorboard/") for file in model.manifest["records"]):
            lines.append(f"  curves   tensorboard --logdir {_short_pattern(model)}/tensorboard")
    lines += ["", "Try next:"]
    lines += [f"  textmill {command:<{_COMMAND_WIDTH}}  {purpose}" for command, purpose in _next_commands(record)]
    return "\n".join(lines)


def _format_stages(record: dict[str, Any], outputs: dict[str, Output]) -> list[str]:
    width = max(10, *map(len, outputs)) if outputs else 10
    lines = ["", f"{'stage':<{width}} {'state':<7} {'seconds':>8}  figures"]
    for name, output in outputs.items():
        figures = [figure.replace("`", "") for figure in format_figures(output.manifest["figures"])]
        shown = [figure for figure in figures if figure.startswith(_SUMMARY_FIGURES.get(name, ""))]
        stage = record["stages"][name]
        start = f"{name:<{width}} {stage['state']:<7} {stage['seconds']:>8.1f}  "
        lines += textwrap.wrap(
            ", ".join(shown) or "–", _COLUMNS, initial_indent=start, subsequent_indent=" " * len(start)
        )
    return lines


def format_curation(record: dict[str, Any]) -> str:
    """Return the stages of a run of the flow curate, and where its text and its report are."""
    run = RunContext(record["root"], record["name"])
    outputs = outputs_of(run, record)
    lines = [*_format_stages(record, outputs), "", "Files; the report has the pages of the stages:"]
    lines.append(f"  report   {_short_path(run.store.url('runs', run.name))}.md")
    if export := outputs.get("export"):
        lines.append(f"  text     {_short_path(export.url)}")
    return "\n".join(lines)


def _format_models(models: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of the models before and after each method of post-training, on held-out examples."""
    lines = [f"{'model':<14}{'answer loss':>12}{'accuracy, 95 % interval':>28}{'reward':>10}"]
    for name, figures in models.items():
        loss = "–" if figures["answer_loss"] is None else f"{figures['answer_loss']:.3f}"
        accuracy = percent_with_interval(figures) if "accuracy" in figures else "–"
        reward = f"{figures['reward']:.3f}" if "reward" in figures else "–"
        lines.append(f"{name:<14}{loss:>12}{accuracy:>28}{reward:>10}")
    return lines


def _short_path(path: str) -> str:
    """Return a path below the working directory as a relative one."""
    return path.removeprefix(f"{Path.cwd()}/")


def _short_pattern(output: Output) -> str:
    """Return a pattern that a shell completes to the directory of an output. It leaves out the digest and the random
    part of the path, with which a line would not fit into a terminal. On an object store, return the URL."""
    if "://" in output.url:
        return output.url
    directory = Path(output.url)
    start = directory.name.partition("-")[0]
    return f"{shlex.quote(_short_path(str(directory.parents[1])))}/*/{start}-*"


def _next_commands(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return commands to try after a run, and what each does."""
    root = "" if record["root"] == absolute_root("artifacts") else f" --root {shlex.quote(_short_path(record['root']))}"
    if "base" in record["stages"]:
        return [(f"chat{root}", "chat with the model"), (f"serve{root}", "serve it over HTTP")]
    config, commands = record["config"], []
    if "train" in record["stages"]:
        commands.append((f'sample{root} --prompt "Once upon a time"', "write text"))
    if any(path.startswith("demo:") for path in config["data"]["train"][:1]):  # none with data.mix
        commands.append((f"run{root} --data.train PATHS --budget 30m", "train on your own text"))
    elif not config["budget"]:
        commands.append((f"run{root} --again --budget 30m", "a model that suits the text"))
    commands.append((f"plan{root} --again --train.steps {2 * config['train']['steps']}", "what a change would rerun"))
    if "train" in record["stages"]:
        commands.append((f"posttrain{root}", "fine-tune the model"))
    return [*commands, (f"runs{root}", "all runs so far")]


def describe_model(model: RunModel | DirectoryModel) -> str:
    """Return the name of a model, and of a run's its stage and loss."""
    if not isinstance(model, RunModel):
        return model.name
    loss = model.model.manifest["figures"].get("valid_loss")
    return f"{model.public_name}, {model.model.ref.stage}" + (f", loss {loss:.3f}" if isinstance(loss, float) else "")


def format_runs(summaries: "Sequence[RunSummary]") -> str:
    """Return the runs as a table, the newest first."""
    rows = [("name", "last stage", "started", "state", "loss", "size")]
    for run in summaries:
        started = _format_date(datetime.fromisoformat(run.started).astimezone()) if run.started else "–"
        loss = "–" if run.loss is None else f"{run.loss:.3f}"
        rows.append((run.name, run.stages, started, run.state or "–", loss, format_size(run.bytes)))
    template = "  ".join(f"{{:<{max(map(len, column))}}}" for column in zip(*rows, strict=True))
    return "\n".join(template.format(*row).rstrip() for row in rows)


def _format_date(date: datetime) -> str:
    """Return day and time of a date in this year, otherwise the date."""
    return f"{date:%b %d %H:%M}" if date.year == datetime.now().year else f"{date:%Y-%m-%d}"


def format_forecasts(forecasts: Sequence[Forecast]) -> str:
    """Return a table of the memory, disk and time that stages need."""
    disk, seconds = sum(f.disk or 0 for f in forecasts), sum(f.seconds or 0 for f in forecasts)
    rows = [("stage", "memory", "disk", "time")]
    sizes = ["–" if size is None else format_size(size) for f in forecasts for size in (f.memory, f.disk)]
    times = [_format_seconds(f.seconds) for f in forecasts]
    rows += zip([f.stage for f in forecasts], sizes[::2], sizes[1::2], times, strict=True)
    rows.append(("total", "", format_size(disk), _format_seconds(seconds)))
    lines = [f"{stage:<10} {memory:>12} {disk:>12} {time:>12}" for stage, memory, disk, time in rows]
    return "\n".join(["", "About what the stages that run need (–: not known yet):", *lines])


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def format_sweep(record: dict[str, Any]) -> str:
    """Return the best points of a sweep as a table, and the paths of its outputs."""
    outputs = outputs_of(RunContext(record["root"], record["name"]), record)
    output = outputs["sweep"]
    with output.path("table.csv").open(encoding="utf-8", newline="") as file:
        points = list(csv.DictReader(file))

    def column(name: str) -> str:
        return f"trained_{name}" if f"trained_{name}" in points[0] else name

    losses = [column(name) for name in ("valid_bits_per_byte", "train_loss")]
    loss = next((name for name in losses if any(point[name] for point in points)), losses[0])
    hidden = {column(name) for name in ("valid_loss", "train_loss", "flops", "reason")} - {loss}
    varied = {name for name in points[0] if len({point[name] for point in points}) > 1} - hidden
    columns = [name for name in points[0] if name in {"point", loss, column("state")} | varied]
    rows = [columns, *([_shorten(point[name]) for name in columns] for point in points[:_MAX_POINTS])]
    lines = ["", *_align(rows)]
    if gate := outputs.get("gate"):
        content, times = gate.json("gate.json"), gate.json("times.json")
        header, rows = comparison_rows(content, times)
        lines = ["", *_align([header, *rows]), "", *verdict_lines(content, times)]
    elif (more := len(points) - _MAX_POINTS) > 0:
        lines.append(f"… and {more:,} more")
    if "record" in output.manifest["figures"]:
        lines += ["", f"The record is {record_line(output.json('record.json')).replace('**', '')}"]
    lines += ["", "Outputs:", f"  table   {output.url}/table.csv"]
    lines.append(f"  report  {output.store.url('runs', record['name'])}.md")
    if "best_point" in output.manifest["figures"]:
        root, best = shlex.quote(record["root"]), shlex.quote(f"{output.url}/best.yaml")
        lines += [f"  best    {output.url}/best.yaml", "", "Try next:", f"  textmill run --root {root} --config {best}"]
    return "\n".join(lines)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with columns of equal widths."""
    template = "  ".join(f"{{:<{max(map(len, cells))}}}" for cells in zip(*rows, strict=True))
    return [template.format(*row).rstrip() for row in rows]


def _shorten(text: str) -> str:
    """Return a number with up to six digits, and other text with its first 40 characters."""
    try:
        return text if text.isdigit() else f"{float(text):.6g}"
    except ValueError:
        return shorten(text)


def format_evaluation(result: "EvaluationResult") -> str:
    """Return the figures of an evaluation as a table, and the paths of its files."""
    summary = result.summary
    rows: dict[str, Any] = {
        "accuracy": f"{percent_with_interval(asdict(summary))}, the 95 % interval",
        "reward": f"{summary.reward:.3f}  (format {summary.format_reward:.3f}, answer {summary.answer_reward:.3f})",
        **{name: f"{count:,}" for name, count in summary.categories.items()},
        "cut at the maximum": f"{summary.cut_responses:,}",
        "reward failed": f"{summary.failed_rewards:,}",
        "responses": result.responses,
        "summary": result.summary_file,
    }
    title = f"{result.task}, {summary.problems:,} problems, {result.model}"
    return "\n".join([title, *(f"  {name:<18}  {text}" for name, text in rows.items())])


def format_profile(result: "ProfileResult") -> str:
    """Return where time and memory of a step go, as a table, and the paths of the files."""
    profile = result.profile
    operations = profile["operations"][:5]
    files = {
        "page": "profile.md",
        "figures": "profile.json",
        "trace": "trace.json.gz",
        "memory snapshot": "memory_snapshot.pickle",
    }
    rows = [
        *compute_rows(profile),
        (
            "largest micro-batch",
            f"{profile['largest_micro_batch']:,} sequences by the formula, now {profile['micro_batch']:,}",
        ),
        *((title, path) for title, name in files.items() if (path := result.directory / name).exists()),
    ]
    lines = [
        f"{describe(profile)}, mean of {profile['steps']:,} steps",
        f"\n{'time of a step':<30} {'ms':>10}",
        *(f"  {name:<28} {value:>10,.1f} {share:>7}" for name, value, share in phase_rows(profile)),
        f"  {'step without the clock':<28} {profile['plain_seconds_per_step'] * 1e3:>10,.1f}",
        f"\n{'operations with most own time':<58} {'ms':>10}",
        *(f"  {row['name']:<56} {row['seconds'] * 1e3:>10,.1f}" for row in operations),
        f"\n{'memory, MB':<30} {'measured':>10} {'predicted':>10}",
        *(f"  {name:<28} {here:>10,.1f} {predicted:>10,.1f}" for name, here, predicted in memory_rows(profile)),
        "",
        *(f"{name:<30} {text}" for name, text in rows),
    ]
    return "\n".join(lines)


def format_comparison(result: "ComparisonResult") -> str:
    """Return the bytes per token of each tokenizer on each text as a table, the losses of models if there are
    any, and the paths of the files."""
    names = list(result.comparison.tokenizers)
    width = max(map(len, ["bytes per token", *result.comparison.texts]))
    sizes = [max(8, len(name)) for name in names]
    heads = "  ".join(f"{name:>{size}}" for name, size in zip(names, sizes, strict=True))
    template = "  ".join([f"{{:<{width}}}  {{:>12,}}", *(f"{{:>{size}.3f}}" for size in sizes)])
    lines = ["", f"{'bytes per token':<{width}}  {'bytes':>12}  {heads}"]
    lines += [template.format(*row) for row in compression_rows(result.comparison)]
    if result.losses:
        width = max(map(len, ["bits per byte at equal FLOPs", *result.losses]))
        columns = ("bits per byte at equal FLOPs", "mean", "error", "seeds", "FLOPs", "steps", "tokens")
        template = f"{{:<{width}}}  {{:>8}}  {{:>8}}  {{:>5}}  {{:>9}}  {{:>8}}  {{:>14}}"
        lines += ["", template.format(*columns)]
        lines += [template.format(*map(plain, row)) for row in loss_rows(result.losses)]
    files = ("page", "comparison.md"), ("figures", "comparison.json")
    return "\n".join([*lines, "", *(f"{name:<8}  {result.directory / file}" for name, file in files)])


def format_teaching(result: "TeachResult") -> str:
    """Return the counts of the answers of another model as a table, the path of the file, and the next command."""
    kept = result.outcomes["kept"]
    rows: dict[str, Any] = {
        "prompts": f"{result.prompts:,}, and {result.repeated_prompts:,} repeated",
        "answers": f"{result.answers:,}, {result.earlier_answers:,} of them from earlier runs",
        "failed": f"{len(result.failures):,}",
        "not asked": f"{result.not_asked:,}{', as the token budget is reached' if result.not_asked else ''}",
        **{name: f"{count:,}" for name, count in sorted(result.outcomes.items()) if name != "kept"},
        "kept": f"{kept:,}{f' ({kept / result.answers:.1%} of the answers)' if result.answers else ''}",
        "tokens": f"{result.prompt_tokens:,} of prompts, {result.completion_tokens:,} of answers",
        "all answers": result.answers_file,
        "kept answers": result.file,
    }
    lines = [f"{name:<18}  {text}" for name, text in rows.items()]
    if result.failures:
        lines += ["", "Failed; the same command asks them again:"]
        lines += [f"  {failure}" for failure in result.failures[:_MAX_FAILURES]]
    if (more := len(result.failures) - _MAX_FAILURES) > 0:
        lines.append(f"  and {more:,} more")
    if kept:
        command = f"textmill posttrain --preset dialogs --dialogs.train {shlex.quote(str(result.file))}"
        lines += ["", "Try next:", f"  {command}"]
    return "\n".join(lines)


def format_run_comparison(result: "RunComparison") -> str:
    """Return the last figures of each training as a table, and the paths of the curves."""
    lines = [f"{'run':<26}{'steps':>9}{'M tokens':>10}{'seconds':>9}{'train':>8}{'valid':>8}{'bits/byte':>10}"]
    for training in result.trainings:
        tokens = training.figure("tokens")
        figures = (
            (9, ",.0f", training.figure("steps")),
            (10, ",.2f", tokens and tokens / 1e6),
            (9, ",.0f", training.last("seconds")),
            (8, ".3f", training.last(result.quantity.train)),
            (8, ".3f", training.figure(result.quantity.valid)),
            (10, ".3f", training.figure("valid_bits_per_byte")),
        )
        cells = (f"{'–' if figure is None else format(figure, form):>{width}}" for width, form, figure in figures)
        lines.append(f"{training.label:<26}{''.join(cells)}")
    notes = (f"train, valid: last {result.quantity.label}", *result.notes)
    lines += ["", *(line for note in notes for line in textwrap.wrap(note, 80, break_on_hyphens=False)), ""]
    return "\n".join(["", *lines, *(f"curves  {file}" for file in result.files)])


def format_deployment(deployment: "Deployment", api_url: str) -> str:
    """Return when a deployment runs, and the commands that run, list and delete it."""
    name, schedule, evaluation = deployment.full_name, deployment.schedule, deployment.evaluation
    when = f"{schedule.cron} ({schedule.timezone})" if schedule else "on request"
    worker = "textmill up" if deployment.pool == LOCAL_POOL else f"prefect worker start --pool {deployment.pool}"
    if deployment.on_event:
        when = (
            f"on the event {deployment.on_event}" if not schedule else f"{when}, and on the event {deployment.on_event}"
        )
    rows = {
        "starts": when,
        "needs": f"a worker: {worker}",
        "root": deployment.parameters["root"],
        **({"then": f"{evaluation.full_name} on {evaluation.parameters['config']['task']}"} if evaluation else {}),
        **({"alerts": "if a loss is not finite"} if deployment.alert_url else {}),
        "see it": f"{api_url.removesuffix('/api')}/deployments",
        "run it now": f"prefect deployment run {shlex.quote(name)} --watch",
        "delete it": f"prefect deployment delete {shlex.quote(name)}",
    }
    lines = [f"{title:<10}  {text}" for title, text in rows.items()]
    export = f"Prefect's commands need: export PREFECT_API_URL={api_url}"
    return "\n".join([f"Deployment {name}:", *lines, export])
