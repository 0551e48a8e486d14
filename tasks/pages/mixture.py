"""The section of a sweep's page about a mixture: the best weights, the law, and how well it predicts."""

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
        f"{target}. A law that is fitted without a training predicts its target with a mean error of "
        f"**{100 * content['left_out_error']:.2f} %**."
    )
    header = ("mixture", *sources, "predicted target", *(f"predicted {name}" for name in sources))
    rows = [
        (name, *_percents(part["weights"]), f"{part['target']:.4f}", *_figures(part["losses"]))
        for name, part in content["mixtures"].items()
    ]
    yield table(header, rows)
    limited = [
        f"{name} at {100 * high:.3g} %"
        for name, high, weight in zip(
            sources, content["highest_weights"], content["mixtures"]["found"]["weights"], strict=True
        )
        if high < 1 and weight > high - 1e-6
    ]
    if limited:
        yield f"`max_epochs` limits the weight of {', '.join(limited)}."
    header = ("point", *sources, "target", "predicted without it", *sources)
    rows = [
        (
            run["point"],
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
        ("bits per byte of", "irreducible", *(f"coefficient of {name}" for name in sources)),
        [
            (name, f"{irreducible:.4f}", *_figures(coefficients))
            for name, irreducible, coefficients in zip(
                sources, content["law"]["irreducible"], content["law"]["coefficients"], strict=True
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


def _percents(weights: Sequence[float]) -> list[str]:
    return [f"{100 * weight:.2f} %" for weight in weights]


def _figures(values: Sequence[float]) -> list[str]:
    return [f"{value:.4f}" for value in values]
