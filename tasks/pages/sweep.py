"""The Markdown page of a sweep: table, curves, loss over the axes, scaling law, best configuration."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from tasks.pages.charts import embed_figure, new_figure
from tasks.pages.gate import gate_section
from tasks.pages.markdown import plain, shorten, table
from tasks.pages.mixture import mixture_section
from tasks.runtime.gate_ledger import read_ledger

if TYPE_CHECKING:
    from lm.experiments.record import RecordedText
    from lm.experiments.report import SweepReport
    from lm.experiments.trial import TrialResult
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt

_MAX_ROWS = 100


def sweep(
    out: "Attempt",
    trials: "list[Output]",
    models: "list[Output]",
    law: "list[Output]",
    check: "list[Output]",
    report: "SweepReport",
    mixture: "list[Output] | None" = None,
    gate: "list[Output] | None" = None,
    record: "RecordedText | None" = None,
) -> Iterator[str]:
    """Show all points sorted by loss, their curves, the loss over each axis, and the best configuration."""
    from lm.experiments.trial import State, from_json

    page = _SweepPage(report, [from_json(output.json("trial.json")) for output in (*trials, *check)])
    if report.description:
        yield report.description
    if gate:
        contents = gate[0].json("gate.json"), gate[0].json("times.json")
        yield from gate_section(*contents, read_ledger(out.run.store), report)
    if record:
        yield f"### Record\n\n{record_line(out.read_json('record.json'))}"
    states = {state: count for state, count in out.figures.items() if state in get_args(State)}
    shown = ", ".join(f"{count:,} {state}" for state, count in states.items())
    loss = "bits per byte of the validation text" if page.has_validation else "the training loss, nats per token"
    yield f"**{len(page.results):,}** points: {shown}. The loss is {loss}; the lowest comes first."
    yield from page.tables()
    yield from map(page.curves, ("step", "tokens"))
    for name in () if gate else report.axes:
        yield from page.loss_over_axis(name)
    if not gate and len(page.varied) == 2:
        is_search = any(len(page.values(name)) > 20 for name in page.varied)  # another value at each trial
        yield (page.scatter if is_search else page.heat_map)(*page.varied)
    if law:
        yield from _scaling_law(law[0].json("law.json"), page.results[len(trials) :], page.unit)
    if mixture:
        yield from mixture_section(out.read_json("mixture.json"))
    path = out.directory / "best.yaml"
    if path.exists():
        yield "### Best configuration\n\n`best.yaml` beside the table. To run it: `textmill run --config best.yaml`."
        yield f"```yaml\n{path.read_text(encoding='utf-8')}```"


def record_line(content: dict[str, Any]) -> str:
    """Return the verdict of ``record.json`` in a plain sentence."""
    made = content["record"]["made"]
    result = content["result"]
    return f"**{result['verdict']}**: {result['reason']}{f' ({made})' if made else ''}."


class _SweepPage:
    """The tables and plots of a sweep. ``rows`` are those of the table, the best first."""

    def __init__(self, report: "SweepReport", results: "list[TrialResult]") -> None:
        from lm.experiments.report import table_rows

        self.report, self.results, self.rows = report, results, table_rows(report, results)
        self.has_validation = any(result.has_validation for result in results)
        self.unit = "bits per byte" if self.has_validation else "nats per token"
        self.losses = [result.objective if result.state == "finished" else None for result in results]
        self.varied = [name for name in report.axes if len(self.values(name)) > 1]

    def values(self, name: str) -> list[Any]:
        """Return the different values of an option; numbers in their order, None first."""
        values = [self.report.value(index, name) for index in range(len(self.report.settings))]
        unique = list({str(value): value for value in values}.values())  # some are lists or dicts
        numbers = [value for value in unique if value is not None]
        if all(isinstance(value, (int, float)) for value in numbers):
            return [None] * (len(unique) - len(numbers)) + sorted(numbers)
        return unique

    def tables(self) -> Iterator[str]:
        """Show a row for each point, and why some did not finish."""
        columns = [name for name in self.report.columns if len({str(row[name]) for row in self.rows}) > 1]
        header = ("point", *columns, "bits per byte", "valid loss", "train loss", "steps", "tokens", "state")
        ended = [(row, self.results[row["point"] - 1]) for row in self.rows]
        body = [
            (
                row["point"],
                *(_text(row[name]) for name in columns),
                *(
                    "" if loss is None else f"{loss:.4f}"
                    for loss in (result.valid_bits_per_byte, result.valid_loss, result.train_loss)
                ),
                result.steps,
                result.tokens,
                result.state,
            )
            for row, result in ended[:_MAX_ROWS]
        ]
        more = len(self.rows) - _MAX_ROWS
        yield table(header, body) + (f"\n\n… and {more:,} more in `table.csv`." if more > 0 else "")
        reasons = [(row["point"], result.state, result.steps, result.reason) for row, result in ended if result.reason]
        if reasons:
            header = ("point", "state", "steps", "reason")
            yield "### Points that did not finish\n\n" + table(header, reasons[:_MAX_ROWS])

    def curves(self, unit: str) -> str:
        """Draw the validation losses of all points over steps or tokens, or else the training losses."""
        name = "valid_bits_per_byte" if self.has_validation else "smoothed_loss"
        title = f"Loss over {'steps' if unit == 'step' else 'tokens'}"
        figure, axes = new_figure(title, unit, self.unit, size=(8, 4.5))
        for place, row in reversed([*enumerate(self.rows)]):  # the best is drawn last, on top
            result = self.results[row["point"] - 1]
            scale = 1 if unit == "step" else result.tokens / max(1, result.steps)
            points = [(line["step"] * scale, line[name]) for line in result.curve if line.get(name) is not None]
            if points:
                words = ", ".join(f"{name.rpartition('.')[2]} {_drawn(row[name])}" for name in self.varied[:3])
                label = f"{row['point']}: {words}"[:70]
                style = {"label": label} if place < 10 else {"color": "0.8"}  # the best have names
                style |= {"linestyle": "-" if result.state == "finished" else "--"}
                axes.plot(*zip(*points, strict=True), linewidth=1, marker="." if len(points) < 30 else None, **style)
        axes.set_xscale("log")
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            axes.legend(handles[::-1], labels[::-1], fontsize=7)
        return embed_figure(figure, title)

    def loss_over_axis(self, name: str) -> Iterator[str]:
        """Draw the loss of each point over an axis with numbers, and a line through the best point of each value.

        An option that only some cases set belongs to those cases, so the loss is not drawn over it.
        """
        values = [value for value in self.values(name) if value is not None]
        is_set_everywhere = all(name in settings for settings in self.report.settings)
        if len(values) < 2 or not is_set_everywhere or not all(map(_is_number, values)):
            return
        points = [(self.report.value(index, name), loss) for index, loss in enumerate(self.losses) if loss is not None]
        points = [(value, loss) for value, loss in points if value is not None]
        figure, axes = new_figure(f"Loss over {name}", name, self.unit)
        if points:
            axes.plot(*zip(*points, strict=True), "o", markersize=4, color="0.6")
            best = {value: min(loss for at, loss in points if at == value) for value, _ in sorted(points)}
            axes.plot(list(best), list(best.values()), linewidth=1.5)
        for index, result in enumerate(self.results):
            if result.state == "diverged" and (value := self.report.value(index, name)) is not None:
                axes.axvline(value, color="tab:red", linewidth=1, linestyle=":")
        axes.set_xscale(_scale(values))
        yield embed_figure(figure, f"Loss over {name}; dotted red: diverged")

    def heat_map(self, x_name: str, y_name: str) -> str:
        """Draw the lowest loss of each pair of values of two axes. An empty place has no finished point."""
        x_values, y_values = self.values(x_name), self.values(y_name)
        grid = np.full((len(y_values), len(x_values)), math.nan)
        for index, loss in enumerate(self.losses):
            place = y_values.index(self.report.value(index, y_name)), x_values.index(self.report.value(index, x_name))
            if loss is not None:
                grid[place] = np.fmin(grid[place], loss)
        title = f"Loss over {x_name} and {y_name}"
        figure, axes = new_figure(title, x_name, y_name, size=(8, 1.5 + 0.5 * len(y_values)))
        axes.grid(visible=False)
        picture = axes.imshow(grid, aspect="auto", origin="lower", cmap="viridis_r")
        axes.set_xticks(range(len(x_values)), [_drawn(value) for value in x_values])
        axes.set_yticks(range(len(y_values)), [_drawn(value) for value in y_values])
        for (row, column), loss in np.ndenumerate(grid):
            text = "–" if math.isnan(loss) else f"{loss:.3f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, bbox={"fc": "white", "alpha": 0.6})
        figure.colorbar(picture)
        return embed_figure(figure, title)

    def scatter(self, x_name: str, y_name: str) -> str:
        """Draw the loss of each finished point as the colour of a dot over two axes."""
        title = f"Loss over {x_name} and {y_name}"
        figure, axes = new_figure(title, x_name, y_name, size=(8, 6))
        finished = [(index, loss) for index, loss in enumerate(self.losses) if loss is not None]
        places = []
        for name, set_scale in ((x_name, axes.set_xscale), (y_name, axes.set_yscale)):
            values = [value for value in self.values(name) if value is not None]
            at = [self.report.value(index, name) for index, _ in finished]
            if is_numeric := all(map(_is_number, values)):
                set_scale(_scale(values))
            places.append([(math.nan if value is None else value) if is_numeric else _drawn(value) for value in at])
        figure.colorbar(axes.scatter(*places, c=[loss for _, loss in finished], cmap="viridis_r"))
        return embed_figure(figure, title)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else shorten(plain(value))


def _drawn(value: Any) -> str:
    return "–" if value is None else _text(value).replace("$", r"\$")  # a dollar sign begins no formula


def _scale(numbers: Sequence[float]) -> str:
    """Return the scale of an axis with these numbers, which are sorted."""
    return "log" if numbers[0] > 0 and numbers[-1] / numbers[0] >= 4 else "linear"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _loss_surface(content: dict[str, Any] | None) -> Iterator[str]:
    """Show the loss over parameters and tokens, and what it predicts."""
    if content is None:
        return
    fit, prediction = content["fit"], content["prediction"]
    text = (
        f"Loss over parameters and tokens, from all trainings: {fit['irreducible_loss']:.4g} + "
        f"{fit['parameter_scale']:.4g} · (parameters / {fit['middle_parameters']:.4g})^-{fit['parameter_exponent']:.4f}"
        f" + {fit['token_scale']:.4g} · (tokens / {fit['middle_tokens']:.4g})^-{fit['token_exponent']:.4f}; the losses "
        f"are {100 * fit['noise']:.2f} % around it."
    )
    if prediction:
        text += (
            f" For {prediction['budget']:.3g} FLOPs it predicts {prediction['loss']:.4f}, 95 % interval "
            f"{prediction['low']:.4f} to {prediction['high']:.4f}, with {prediction['parameters']:.4g} parameters."
        )
    yield text


def _scaling_law(content: dict[str, Any], check: "list[TrialResult]", unit: str) -> Iterator[str]:
    """Show the parabola of each budget, the power law through their minima, and the prediction with its check."""
    from lm.experiments.scaling_law import MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS, Parabola

    law, prediction = content["law"], content["prediction"]
    parabolas = [Parabola(**fields) for fields in law["parabolas"]]
    figure, axes = new_figure("Loss over size at equal FLOPs", "parameters", unit)
    for parabola in parabolas:
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
            f"{parabola.budget:.3g}",
            f"{parabola.best_parameters:.4g}",
            f"{parabola.best_tokens:.4g}",
            f"{parabola.best_loss:.4f}",
            "yes" if parabola.is_inside else "**no: add sizes**",
        )
        for parabola in parabolas
    ]
    yield table(header, rows)
    irreducible, laws = law["irreducible_loss"], []
    for name in ("parameters", "tokens", "loss"):
        fitted, offset = law[name], f"{irreducible:.4g} + " if name == "loss" and irreducible else ""
        formula = f"{offset}{fitted['coefficient']:.4g} · FLOPs^{fitted['exponent']:.4f}"
        laws.append((name, formula, f"{fitted['exponent_error']:.4f}"))
    yield table(("of the best size", "law", "standard error of the exponent"), laws)
    yield from _loss_surface(content["surface"])
    if not prediction:
        return
    has_few = len(parabolas) < MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS
    yield (
        f"Prediction for {prediction['budget']:.3g} FLOPs, written before its training: **{prediction['loss']:.4f}**, "
        f"95 % interval {prediction['low']:.4f} to {prediction['high']:.4f}"
        f"{' if the power law goes on' if has_few else ''}, with "
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
    budgets = [parabola.budget for parabola in parabolas]
    axes.loglog(budgets, [parabola.best_loss for parabola in parabolas], "o", label="minima")
    budget, loss = prediction["budget"], prediction["loss"]
    shown = np.geomspace(budgets[0], budget, 50)
    losses = irreducible + law["loss"]["coefficient"] * shown ** law["loss"]["exponent"]
    axes.plot(shown, losses, linewidth=1, label="law")
    errors = [[loss - prediction["low"]], [prediction["high"] - loss]]
    axes.errorbar([budget], [loss], errors, fmt="s", capsize=4, label="prediction")
    if measured := [result.objective for result in check if result.objective is not None]:
        axes.plot([budget], measured[:1], "*", markersize=12, label="check")
    axes.legend()
    yield embed_figure(figure, "Loss of the best size over FLOPs")
