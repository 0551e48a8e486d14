"""The section of a sweep's page about a mixture: the best weights, the law, and how well it predicts."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tasks.pages.charts import embed_figure, new_figure
from tasks.pages.markdown import table


def mixture_section(content: dict[str, Any]) -> Iterator[str]:
    """Show the content of ``mixture.json``: the weights found beside others, the trainings, and the law."""
    sources, runs = content["sources"], content["runs"]
    target = ", ".join(f"{name} {100 * share:.3g} %" for name, share in zip(sources, content["target"], strict=True))
    yield (
        "### Mixture\n\nThe target is the mean bits per byte of the sources' validation texts, weighted: "
        f"{target}. The weights are for a training of {content['target_tokens']:,.0f} tokens. A law that is fitted "
        f"without a training predicts its target with a mean error of **{100 * content['left_out_error']:.2f} %**."
    )
    header = ("mixture", *sources, "predicted target", *(f"predicted {name}" for name in sources))
    rows = [
        (name, *_percents(part["weights"]), f"{part['target']:.4f}", *_figures(part["losses"]))
        for name, part in content["mixtures"].items()
    ]
    yield table(header, rows)
    yield from _checks(content)
    limited = [
        f"{name} at {100 * high:.3g} %"
        for name, high, weight in zip(
            sources, content["highest_weights"], content["mixtures"]["found"]["weights"], strict=True
        )
        if high < 1 and weight > high - 1e-6
    ]
    if limited:
        yield f"`max_epochs` limits the weight of {', '.join(limited)}."
    header = ("point", "length", *sources, "target", "predicted without it", *sources)
    rows = [
        (
            run["point"],
            f"{run['length']:.3g}",
            *_percents(run["weights"]),
            f"{run['target']:.4f}",
            f"{run['left_out_target']:.4f}",
            *_figures(run["losses"]),
        )
        for run in sorted(runs, key=lambda run: run["target"])
    ]
    yield "Trainings, the lowest target first; the last columns are bits per byte of each source.\n\n" + table(
        header, rows
    )
    yield table(
        ("bits per byte of", "irreducible", "exponent", *(f"worth of {name}" for name in sources)),
        [
            (name, *_figures([irreducible, exponent]), *(f"{worth:.4g}" for worth in worths))
            for name, irreducible, exponent, worths in zip(
                sources, *(content["law"][part] for part in ("irreducible", "exponents", "worths")), strict=True
            )
        ],
    )
    title = "Bits per byte of each training, predicted without it"
    figure, axes = new_figure(title, "measured", "predicted")
    measured, predicted = (np.array([run[name] for run in runs]) for name in ("losses", "left_out"))
    for number, name in enumerate(sources):
        axes.plot(measured[:, number], predicted[:, number], "o", markersize=4, label=name)
    ends = measured.min(), measured.max()
    axes.plot(ends, ends, color="0.6", linewidth=1)
    axes.legend()
    yield embed_figure(figure, title)


def _checks(content: dict[str, Any]) -> Iterator[str]:
    """Show the losses of the trainings that check the mixtures, if there are any."""
    measured = {name: np.array(part["measured"]) for name, part in content["mixtures"].items() if part.get("measured")}
    if not measured:
        return
    rows = []
    targets = {name: losses_SL @ np.array(content["target"]) for name, losses_SL in measured.items()}
    for name, losses_SL in measured.items():
        targets_S, predicted = targets[name], content["mixtures"][name]["target"]
        error = f"± {targets_S.std(ddof=1) / math.sqrt(len(targets_S)):.4f}" if len(targets_S) > 1 else ""
        above = targets_S.mean() / targets["found"].mean() - 1 if "found" in targets else math.nan
        rows.append(
            (
                name,
                len(targets_S),
                f"{targets_S.mean():.4f} {error}",
                f"{100 * above:+.2f} %",
                f"{100 * (predicted / targets_S.mean() - 1):+.2f} %",
                *_figures(losses_SL.mean(0)),
            )
        )
    header = ("mixture", "trainings", "target", "above found", "predicted is off by", *content["sources"])
    yield (
        "Trainings with these weights, left out of the law: the mean of their targets and its standard error, and the "
        "mean bits per byte of each source.\n\n" + table(header, rows)
    )


def _percents(weights: Sequence[float]) -> list[str]:
    return [f"{100 * weight:.2f} %" for weight in weights]


def _figures(values: Sequence[float]) -> list[str]:
    return [f"{value:.4f}" for value in values]
