"""Scores of documents: how probably a document is like the wanted examples, by a classifier trained on both kinds."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from lm.common.errors import UserError
from lm.curate.classifier import TextClassifier, score_quantile
from lm.curate.config import ScoreConfig
from lm.curate.document_batch import DocumentBatch, pack_documents
from lm.kernels.jit import Floats

WANTED, UNWANTED = "wanted", "unwanted"
_MIN_EXAMPLES = 50  # of each kind: ten of them decide the least score
_HELD_OUT = 5  # one of so many
_EXAMPLE_CHARACTERS = 1 << 20  # of an example: a classifier is trained on no more


@dataclass(frozen=True)
class Scorer:
    """A classifier with the labels ``wanted`` and ``unwanted``, and the least score of a document to keep."""

    classifier: TextClassifier
    least_score: float

    def score(self, batch: DocumentBatch) -> Floats:
        """Return the probability of each of D documents to be wanted, float32 (D,)."""
        return self.classifier.predict_batch(batch)[:, self.classifier.labels.index(WANTED)]


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of the examples of one kind that the classifier was not trained on."""

    trained: int
    """Number of the other examples."""
    scores: Floats

    def passing(self, least_score: float) -> float:
        """Return the share of them that is kept."""
        return float((self.scores >= least_score).mean())


def fit_scorer(
    wanted: Iterable[str], unwanted: Iterable[str], config: ScoreConfig
) -> tuple[Scorer, dict[str, HeldOutScores]]:
    """Train a classifier on four fifths of the examples, and choose the least score by the others: the share
    ``config.kept`` of the wanted ones reaches it. Return the scores of these, by kind.

    The hash of an example decides, so that equal ones are on one side. All examples are held in memory. Raises
    UserError if a kind has fewer than 50 examples.
    """
    parts: dict[str, tuple[list[str], list[str]]] = {}
    for label, texts in ((WANTED, wanted), (UNWANTED, unwanted)):
        trained, held_out = parts[label] = [], []
        for text in texts:
            (held_out if _is_held_out(text) else trained).append(text[:_EXAMPLE_CHARACTERS])
        if len(trained) + len(held_out) < _MIN_EXAMPLES or not trained or not held_out:
            raise UserError(
                f"filter.score.{label} has {len(trained) + len(held_out):,} documents, "
                f"{len({*trained, *held_out}):,} of them different; give at least {_MIN_EXAMPLES} different ones."
            )
    training = [text for trained, _ in parts.values() for text in trained]
    labels = [label for label, (trained, _) in parts.items() for _ in trained]
    scorer = Scorer(TextClassifier.fit(training, labels, config.classifier), 0.0)
    held_out_scores = {
        label: HeldOutScores(len(trained), scorer.score(pack_documents(held_out)))
        for label, (trained, held_out) in parts.items()
    }
    return Scorer(scorer.classifier, score_quantile(held_out_scores[WANTED].scores, config.kept)), held_out_scores


def _is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT == 0
