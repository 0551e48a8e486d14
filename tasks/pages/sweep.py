"""The Markdown page of a sweep: table, curves, loss over the axes, scaling law, best configuration."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from tasks.pages.markdown import plain, table
from tasks.pages.plots import embed_figure, new_figure

if TYPE_CHECKING:
    from lm.experiments.report import SweepReport
    from lm.experiments.trial import TrialResult
    from tasks.runtime.context import Attempt
    from tasks.runtime.output import Output

_MAX_ROWS = 100
_MAX_NAMED_CURVES = 10  # the best; the others are grey
_MAX_GRID_VALUES = 20  # of an axis of the heat map; a search has another value at each trial
_MIN_LOG_RATIO = 4  # between the largest and the smallest value of an axis with a log scale


def sweep(
    out: "Attempt",
    trials: "list[Output]",
    models: "list[Output]",
    law: "list[Output]",
    check: "list[Output]",
    report: "SweepReport",
) -> Iterator[str]:
    """Show all points sorted by loss, their curves, the loss over each axis, and the best configuration."""
    from lm.experiments.report import table_rows
    from lm.experiments.trial import State, from_json

    results = [from_json(output.json("trial.json")) for output in (*trials, *check)]
    rows = table_rows(report, results)
    if report.description:
        yield report.description
    states = {state: count for state, count in out.figures.items() if state in get_args(State)}
    shown = ", ".join(f"{count:,} {state}" for state, count in states.items())
    yield f"**{len(results):,}** points: {shown}. The loss is {_loss_name(results)}; the lowest comes first."
    yield _results_table(report, results, rows)
    ended = [(row["point"], results[row["point"] - 1]) for row in rows]
    if not_finished := [(point, result) for point, result in ended if result.reason]:
        reasons = [(point, result.state, result.steps, result.reason) for point, result in not_finished[:_MAX_ROWS]]
        yield "### Points that did not finish\n\n" + table(("point", "state", "steps", "reason"), reasons)
    for unit in ("step", "tokens"):
        yield _curves(report, results, rows, unit)
    for name in report.axes:
        yield from _loss_over_axis(report, results, name)
    if len(varied := [name for name in report.axes if len(_values(report, name)) > 1]) == 2:
        draw = _scatter if any(len(_values(report, name)) > _MAX_GRID_VALUES for name in varied) else _heat_map
        yield draw(report, results, *varied)
    if law:
        yield from _scaling_law(law[0].json("law.json"), results[len(trials) :], _loss_axis(_has_validation(results)))
    path = out.directory / "best.yaml"
    if path.exists():
        yield "### Best configuration\n\n`best.yaml` beside the table. To run it: `textmill run --config best.yaml`."
        yield f"```yaml\n{path.read_text(encoding='utf-8')}```"


def _loss(result: "TrialResult") -> float | None:
    return result.objective if result.state == "finished" else None


def _has_validation(results: "Sequence[TrialResult]") -> bool:
    return any(result.has_validation for result in results)


def _loss_name(results: "Sequence[TrialResult]") -> str:
    return "bits per byte of the validation text" if _has_validation(results) else "the training loss, nats per token"


def _results_table(report: "SweepReport", results: "Sequence[TrialResult]", rows: list[dict[str, Any]]) -> str:
    columns = [name for name in report.columns if len({str(row[name]) for row in rows}) > 1]
    header = ("point", *columns, "bits per byte", "valid loss", "train loss", "steps", "tokens", "state")
    fields = ("valid_bits_per_byte", "valid_loss", "train_loss")
    body = [
        (
            row["point"],
            *(_text(row[name]) for name in columns),
            *("" if (loss := getattr(result, name)) is None else f"{loss:.4f}" for name in fields),
            result.steps,
            result.tokens,
            result.state,
        )
        for row in rows[:_MAX_ROWS]
        for result in [results[row["point"] - 1]]
    ]
    more = f"\n\n… and {len(rows) - _MAX_ROWS:,} more in `table.csv`." if len(rows) > _MAX_ROWS else ""
    return table(header, body) + more


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else plain(value)


def _drawn(value: Any) -> str:
    return "–" if value is None else _text(value).replace("$", r"\$")  # a dollar sign begins no formula


def _values(report: "SweepReport", name: str) -> list[Any]:
    """Return the different values of an option; numbers in their order, None first."""
    values = [report.value(index, name) for index in range(len(report.settings))]
    unique = list({str(value): value for value in values}.values())  # some are lists or dicts
    numbers = [value for value in unique if value is not None]
    if all(isinstance(value, (int, float)) for value in numbers):
        return [None] * (len(unique) - len(numbers)) + sorted(numbers)
    return unique


def _curves(report: "SweepReport", results: "list[TrialResult]", rows: list[dict[str, Any]], unit: str) -> str:
    """Draw the validation losses of all points over steps or tokens; the training losses without validation text."""
    has_validation = _has_validation(results)
    name = "valid_bits_per_byte" if has_validation else "smoothed_loss"
    title = f"Loss over {'steps' if unit == 'step' else 'tokens'}"
    figure, axes = new_figure(title, unit, _loss_axis(has_validation))
    figure.set_size_inches(8, 4.5)
    for place, row in reversed([*enumerate(rows)]):  # the best is drawn last, on top
        result = results[row["point"] - 1]
        per_step = result.tokens / result.steps if result.steps else 0
        points = [
            (line["step"] * (1 if unit == "step" else per_step), line[name])
            for line in result.curve
            if line.get(name) is not None
        ]
        if points:
            is_named = place < _MAX_NAMED_CURVES
            style = {"label": _label(report, row)} if is_named else {"color": "0.8"}
            style |= {"linestyle": "-" if result.state == "finished" else "--"}
            axes.plot(*zip(*points, strict=True), linewidth=1, marker="." if len(points) < 30 else None, **style)
    axes.set_xscale("log")
    if axes.get_legend_handles_labels()[0]:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize=7)
    return embed_figure(figure, title)


def _loss_axis(has_validation: bool) -> str:
    return "bits per byte" if has_validation else "nats per token"


def _label(report: "SweepReport", row: dict[str, Any]) -> str:
    names = [name for name in report.axes if len(_values(report, name)) > 1]
    words = ", ".join(f"{name.rpartition('.')[2]} {_drawn(row[name])}" for name in names[:3])
    return f"{row['point']}: {words}"[:70]


def _loss_over_axis(report: "SweepReport", results: "list[TrialResult]", name: str) -> Iterator[str]:
    """Draw the loss of each point over an axis with numbers, and a line through the best point of each value.

    An option that only some cases set belongs to those cases, so the loss is not drawn over it.
    """
    values = [value for value in _values(report, name) if value is not None]
    is_set_everywhere = all(name in settings for settings in report.settings)
    if len(values) < 2 or not is_set_everywhere or not all(_is_number(value) for value in values):
        return
    at_number = [(index, report.value(index, name)) for index in range(len(results))]
    at_number = [(index, value) for index, value in at_number if value is not None]
    points = [(value, loss) for index, value in at_number if (loss := _loss(results[index])) is not None]
    figure, axes = new_figure(f"Loss over {name}", name, _loss_axis(_has_validation(results)))
    if points:
        axes.plot(*zip(*points, strict=True), "o", markersize=4, color="0.6")
        best = {value: min(loss for at, loss in points if at == value) for value, _ in sorted(points)}
        axes.plot(list(best), list(best.values()), linewidth=1.5)
    for index, value in at_number:
        if results[index].state == "diverged":
            axes.axvline(value, color="tab:red", linewidth=1, linestyle=":")
    axes.set_xscale(_scale(values))
    yield embed_figure(figure, f"Loss over {name}; dotted red: diverged")


def _scale(numbers: Sequence[float]) -> str:
    """Return the scale of an axis with these numbers, which are sorted."""
    return "log" if numbers[0] > 0 and numbers[-1] / numbers[0] >= _MIN_LOG_RATIO else "linear"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _heat_map(report: "SweepReport", results: "list[TrialResult]", x_name: str, y_name: str) -> str:
    """Draw the lowest loss of each pair of values of two axes. An empty place has no finished point."""
    x_values, y_values = _values(report, x_name), _values(report, y_name)
    grid = [[math.nan for _ in x_values] for _ in y_values]
    for index, result in enumerate(results):
        x, y = report.value(index, x_name), report.value(index, y_name)
        if (loss := _loss(result)) is not None:
            row, column = y_values.index(y), x_values.index(x)
            grid[row][column] = loss if math.isnan(grid[row][column]) else min(loss, grid[row][column])
    title = f"Loss over {x_name} and {y_name}"
    figure, axes = new_figure(title, x_name, y_name)
    figure.set_size_inches(8, 1.5 + 0.5 * len(y_values))
    axes.grid(visible=False)
    picture = axes.imshow(grid, aspect="auto", origin="lower", cmap="viridis_r")
    axes.set_xticks(range(len(x_values)), [_drawn(value) for value in x_values])
    axes.set_yticks(range(len(y_values)), [_drawn(value) for value in y_values])
    for row, losses in enumerate(grid):
        for column, loss in enumerate(losses):
            text = "–" if math.isnan(loss) else f"{loss:.3f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, bbox={"fc": "white", "alpha": 0.6})
    figure.colorbar(picture)
    return embed_figure(figure, title)


def _scatter(report: "SweepReport", results: "list[TrialResult]", x_name: str, y_name: str) -> str:
    """Draw the loss of each finished point as the colour of a dot over two axes."""
    title = f"Loss over {x_name} and {y_name}"
    figure, axes = new_figure(title, x_name, y_name)
    figure.set_size_inches(8, 6)
    finished = [(index, loss) for index, result in enumerate(results) if (loss := _loss(result)) is not None]
    places = []
    for name, set_scale in ((x_name, axes.set_xscale), (y_name, axes.set_yscale)):
        values = [value for value in _values(report, name) if value is not None]
        at = [report.value(index, name) for index, _ in finished]
        if is_numeric := all(map(_is_number, values)):
            set_scale(_scale(values))
        places.append([(math.nan if value is None else value) if is_numeric else _drawn(value) for value in at])
    figure.colorbar(axes.scatter(*places, c=[loss for _, loss in finished], cmap="viridis_r"))
    return embed_figure(figure, title)


def _scaling_law(content: dict[str, Any], check: "list[TrialResult]", unit: str) -> Iterator[str]:
    """Show the parabola of each budget, the power law through their minima, and the prediction with its check."""
    import numpy as np

    from lm.experiments.scaling_law import MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS, Parabola

    law, prediction = content["law"], content["prediction"]
    figure, axes = new_figure("Loss over size at equal FLOPs", "parameters", unit)
    for fields in law["parabolas"]:
        parabola = Parabola(**fields)
        runs = [run for run in content["measurements"] if run["budget"] == parabola.budget]
        sizes = [run["parameters"] for run in runs]
        (line,) = axes.plot(sizes, [run["loss"] for run in runs], "o", label=f"{parabola.budget:.3g} FLOPs")
        shown = np.geomspace(min(*sizes, parabola.best_parameters), max(*sizes, parabola.best_parameters), 100)
        axes.plot(shown, [parabola(size) for size in shown], color=line.get_color(), linewidth=1)
        axes.plot(parabola.best_parameters, parabola.best_loss, "*", color=line.get_color(), markersize=10)
    axes.set_xscale("log")
    axes.legend()
    yield "### Scaling law\n\n" + embed_figure(figure, "Loss over size at equal FLOPs")
    header = ("FLOPs", "best parameters", "best tokens", "best loss", "between the sizes")
    rows = [
        (
            f"{fields['budget']:.3g}",
            f"{fields['best_parameters']:.4g}",
            f"{fields['best_tokens']:.4g}",
            f"{fields['best_loss']:.4f}",
            "yes" if fields["is_inside"] else "**no: add sizes**",
        )
        for fields in law["parabolas"]
    ]
    yield table(header, rows)
    irreducible = law.get("irreducible_loss", 0.0)
    laws = [
        (
            name,
            (f"{irreducible:.4g} + " if name == "loss" and irreducible else "")
            + f"{law[name]['coefficient']:.4g} · FLOPs^{law[name]['exponent']:.4f}",
            f"{law[name]['exponent_error']:.4f}",
        )
        for name in ("parameters", "tokens", "loss")
    ]
    yield table(("of the best size", "law", "standard error of the exponent"), laws)
    if not prediction:
        return
    has_few = len(law["parabolas"]) < MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS
    assumption = " if the power law goes on" if has_few else ""
    yield (
        f"Prediction for {prediction['budget']:.3g} FLOPs, written before its training: **{prediction['loss']:.4f}**, "
        f"95 % interval {prediction['low']:.4f} to {prediction['high']:.4f}{assumption}, with "
        f"{prediction['parameters']:.4g} parameters and {prediction['tokens']:.4g} tokens."
    )
    for result in check:
        loss = result.objective
        if loss is None:
            yield f"The check is {result.state}: {result.reason.removesuffix('.')}."
        else:
            difference = 100 * (loss / prediction["loss"] - 1)
            place = "inside" if prediction["low"] <= loss <= prediction["high"] else "outside"
            yield (
                f"Check: **{loss:.4f}** with {result.parameters:,} parameters and {result.tokens:,} tokens, "
                f"{difference:+.2f} % from the prediction, {place} the interval."
            )
    figure, axes = new_figure("Loss of the best size over FLOPs", "FLOPs", unit)
    budgets = [fields["budget"] for fields in law["parabolas"]]
    axes.loglog(budgets, [fields["best_loss"] for fields in law["parabolas"]], "o", label="minima")
    shown = np.geomspace(budgets[0], prediction["budget"], 50)
    losses = irreducible + law["loss"]["coefficient"] * shown ** law["loss"]["exponent"]
    axes.plot(shown, losses, linewidth=1, label="law")
    errors = [[prediction["loss"] - prediction["low"]], [prediction["high"] - prediction["loss"]]]
    axes.errorbar([prediction["budget"]], [prediction["loss"]], errors, fmt="s", capsize=4, label="prediction")
    measured = [result.objective for result in check if result.objective is not None]
    if measured:
        axes.plot([prediction["budget"]], measured[:1], "*", markersize=12, label="check")
    axes.legend()
    yield embed_figure(figure, "Loss of the best size over FLOPs")
