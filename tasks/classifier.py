"""Stage ``classifier``: train the classifier that scores documents, on examples of wanted and unwanted text."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lm.curate.config import ScoreConfig
from lm.text.config import DataConfig
from lm.text.documents import TextStatistics, stream_documents
from lm.text.sources import Source
from tasks.pages import classifier as pages
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    from lm.curate.scorer import HeldOutScores, Scorer


@stage("classifier", page=pages.classifier_page)
def train_classifier(
    out: Attempt,
    wanted: list[Source],
    unwanted: list[Source],
    data: DataConfig,
    config: ScoreConfig,
    page_reader: Sequence[str] = (),
) -> None:
    """Write ``classifier.safetensors`` and ``least_score.json``; besides, as a record, the scores of the examples that
    the classifier was not trained on.

    ``page_reader``: what decides the text of web pages among the examples.
    """
    with keep_unchanged([*wanted, *unwanted], out.run.store):
        scorer, held_out = fit_on_files([part.url for part in wanted], [part.url for part in unwanted], data, config)
    scorer.classifier.save(out.directory / "classifier.safetensors")
    out.write_json("least_score.json", scorer.least_score)
    out.write_json("held_out_scores.json", {label: part.scores.tolist() for label, part in held_out.items()})
    out.records = ["held_out_scores.json"]
    out.sources = [*wanted, *unwanted]
    out.figures = {label: _figures(part, scorer) for label, part in held_out.items()}


def fit_on_files(
    wanted: Sequence[str], unwanted: Sequence[str], data: DataConfig, config: ScoreConfig
) -> "tuple[Scorer, dict[str, HeldOutScores]]":
    """Call :func:`lm.curate.scorer.fit_scorer` with the documents of files or URLs."""
    from lm.curate.scorer import fit_scorer  # slow to import

    return fit_scorer(_read_examples(wanted, data), _read_examples(unwanted, data), config)


def _read_examples(urls: Sequence[str], data: DataConfig) -> Iterator[str]:
    for url in urls:
        pieces: list[str] = []  # of a document
        for piece in stream_documents(url, data, TextStatistics()):
            pieces.append(piece.removesuffix(data.separator))
            if piece.endswith(data.separator):
                if text := "".join(pieces).strip():
                    yield text
                pieces = []


def _figures(part: "HeldOutScores", scorer: "Scorer") -> dict[str, float]:
    return {
        "trained": part.trained,
        "held_out": len(part.scores),
        "passing": part.passing(scorer.least_score),
    }
