"""The section of a sweep's page about a gate: the verdict, the comparison at both sizes, and the ledger."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages.charts import embed_figure, new_figure
from tasks.pages.markdown import code, table

if TYPE_CHECKING:
    from lm.experiments.gate import SizeResult
    from lm.experiments.report import SweepReport

_MAX_ENTRIES = 50


def verdict_lines(content: dict[str, Any], times: dict[str, Any]) -> list[str]:
    """Return the verdict of ``gate.json`` in plain sentences, with what more seeds would cost."""
    config, result = content["config"], content["result"]
    lines = [f"{result['verdict']}: {result['reason']} ({config['seeds']} seeds, {_hours(times['hours'])})."]
    if result["verdict"] != "undecided":
        return lines
    seeds, needed, largest = config["seeds"], result["seeds_needed"], config["max_seeds"]
    speedup = f"a speed-up of {config['least_speedup']:g}"
    if needed is None:
        more = "The looks so far have spent the allowed error" if seeds >= largest else "No number of seeds"
        lines.append(f"{more}{'.' if seeds >= largest else f' finds {speedup} in 80 % of cases.'}")
    else:
        cost = f"{needed - seeds} more, {_hours(times['hours_to_needed'])}"
        hint = f": --seeds {needed}" if needed <= largest else ""
        lines.append(f"{needed} seeds ({cost}) find {speedup} in 80 % of cases{hint}.")
    if seeds < largest and (needed is None or needed > largest):
        cost = f"gate.max_seeds {largest}, {_hours(times['hours_to_largest'])} more"
        lines.append(f"That is above the largest cost ({cost}).")
    return lines


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1.5 else f"{60 * hours:.0f} min"


def comparison_rows(content: dict[str, Any], times: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the comparison at both sizes."""
    header = ["size", "baseline", "variant", "gain", "p", "speed-up in FLOPs", "95 % interval", "in time"]
    rows = [
        [
            str(number),
            f"{size.baseline_loss:.4f}",
            f"{size.variant_loss:.4f}",
            f"{size.gain:+.4f} ± {size.gain_error:.4f}",
            f"{size.p:.2g}",
            _speedup(size.speedup),
            f"{_speedup(size.speedup_low)} to {_speedup(size.speedup_high)}",
            "" if in_time is None else _speedup(in_time),
        ]
        for number, (size, in_time) in enumerate(zip(_read_sizes(content), times["speedups"], strict=True), start=1)
    ]
    return header, rows


def _read_sizes(content: dict[str, Any]) -> "list[SizeResult]":
    from lm.experiments.gate import LossLaw, SizeResult

    return [SizeResult(**{**size, "law": LossLaw(**size["law"])}) for size in content["result"]["sizes"]]


def _speedup(value: float | None) -> str:
    return "∞" if value is None else f"{value:.3f}"


def gate_section(
    content: dict[str, Any], times: dict[str, Any], ledger: Sequence[dict[str, Any]], report: "SweepReport"
) -> Iterator[str]:
    """Show the verdict of ``gate.json``, the comparison, the law of each size, and the entries of the ledger."""
    config, result = content["config"], content["result"]
    verdict, *more = verdict_lines(content, times)
    yield f"### Gate\n\n**{verdict[0].upper()}{verdict[1:]}** {' '.join(more)}".rstrip()
    options = sorted({*config["variant"], *config["sizes"][0], *config["sizes"][1]})
    rows = [
        (
            option,
            *(code(str(report.value(index, option))) for index in (0, 2)),
            code(str(config["variant"][option])) if option in config["variant"] else "",
        )
        for option in options
    ]
    yield table(("option", "baseline, size 1", "size 2", "variant"), rows)
    if not (sizes := _read_sizes(content)):
        return
    header, cells = comparison_rows(content, times)
    yield (
        "Losses are bits per byte of the validation text, means over the seeds; the gain has its standard error. p is "
        "of a one-sided paired t test; at most 0.01 at both sizes is accepted. This look may spend "
        f"{result['level']:.4f} of it, earlier looks have spent {result['spent']:.4f}; p is multiplied accordingly. "
        "The speed-up is the compute that the baseline's law needs for the variant's loss, over the variant's; its "
        "interval leaves out the error of the law.\n\n" + table(header, cells)
    )
    if far := [str(number) for number, size in enumerate(sizes, start=1) if size.is_extrapolated]:
        yield f"At size {' and '.join(far)} the speed-up lies beyond the longest training of the baseline."
    if any(size.needed_gain for size in sizes):
        needed = ", ".join(f"{size.needed_gain:+.4f}" for size in sizes)
        yield (
            f"The variant computes more or less per token than the baseline. The test is of a gain above {needed}, "
            "what the baseline's law gains by the same compute."
        )
    for number, size in enumerate(sizes, start=1):
        yield _draw_law(number, size)
    if ledger:
        yield "### Ledger\n\n" + _ledger_table(ledger)


def _draw_law(number: int, size: "SizeResult") -> str:
    """Draw the law of the baseline's loss over compute, and the means of both arms."""
    title = f"Loss over FLOPs at size {number}"
    figure, axes = new_figure(title, "FLOPs", "bits per byte")
    lengths = [flops for flops, _ in size.points]
    shown = np.geomspace(min([*lengths, size.baseline_flops]), max([*lengths, size.baseline_flops]), 100)
    axes.plot(shown, [size.law(flops) for flops in shown], color="0.5", linewidth=1, label="law of the baseline")
    axes.plot(*zip(*size.points, strict=True), "o", color="0.5", markersize=4, label="baseline, other lengths")
    axes.plot(size.baseline_flops, size.baseline_loss, "o", label="baseline")
    axes.plot(size.variant_flops, size.variant_loss, "x", markersize=9, label="variant")
    axes.set_xscale("log")
    axes.legend()
    return embed_figure(figure, title)


def _ledger_table(ledger: Sequence[dict[str, Any]]) -> str:
    def figures(values: Sequence[float | None], form: str) -> str:
        return ", ".join("∞" if value is None else format(value, form) for value in values)

    rows = [
        (
            entry["at"][:16].replace("T", " "),
            ", ".join(f"{name} {value}" for name, value in entry["variant"].items()),
            entry["seeds"],
            entry["verdict"],
            figures(entry["p"], ".2g"),
            figures(entry["speedups"], ".3f"),
            figures(entry["speedups_in_time"], ".3f"),
            f"{entry['level']:.4f}",
        )
        for entry in ledger[-_MAX_ENTRIES:]
    ]
    more = f"The last {_MAX_ENTRIES} of {len(ledger):,} looks" if len(ledger) > _MAX_ENTRIES else "All looks"
    header = ("at", "variant", "seeds", "verdict", "p", "speed-up in FLOPs", "in time", "error spent")
    return f"{more} below this root, also at other variants and sizes.\n\n" + table(header, rows)
