"""The page of the classifier: how well it tells wanted from unwanted text that it has not seen."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.pages.charts import histogram
from tasks.pages.markdown import table

if TYPE_CHECKING:
    from lm.curate.config import ScoreConfig
    from lm.text.config import DataConfig
    from lm.text.sources import Source
    from tasks.runtime.run_context import Attempt

_EDGES = np.linspace(0, 1, 41)


def classifier_page(
    out: "Attempt",
    wanted: "list[Source]",
    unwanted: "list[Source]",
    data: "DataConfig",
    config: "ScoreConfig",
    page_reader: "Sequence[str]" = (),
) -> Iterator[str]:
    """Show the examples, how many of those held out pass, and their scores."""
    least = out.read_json("least_score.json")
    yield (
        f"A document is kept if its score is at least {least:.4f}: {100 * config.kept:g} % of the wanted examples that "
        "were held out reach it."
    )
    columns = ("examples", "trained on", "held out", "of them kept")
    rows = [
        (label, part["trained"], part["held_out"], f"{100 * part['passing']:.2f} %")
        for label, part in out.figures.items()
    ]
    yield table(columns, rows)
    for label, scores in out.read_json("held_out_scores.json").items():
        counts = np.histogram(scores, _EDGES)[0]
        label_text = "score; the line is the least score of a document to keep"
        yield histogram(f"{label} examples that were held out", label_text, counts, _EDGES, "documents", least)
