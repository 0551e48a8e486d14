"""Scores of documents: the least score is a quantile of wanted examples that the classifier has not seen."""

import numpy as np
import pytest

from lm.common.errors import UserError
from lm.curate import FilterConfig, pack_documents
from lm.curate.config import ClassifierConfig, ScoreConfig
from lm.curate.document_filter import DocumentFilter
from lm.curate.document_reader import Document
from lm.curate.scorer import fit_scorer

WANTED = [f"The fox number {number} walked home, because it was late and the rain had begun." for number in range(200)]
UNWANTED = [f"BUY {number} pills now!!! best price $$$ click here click here" for number in range(200)]


def make_config(kept: float = 0.95) -> ScoreConfig:
    return ScoreConfig(["w"], ["u"], kept, ClassifierConfig(table_bits=12))


def test_the_least_score_keeps_the_chosen_share_of_wanted_examples_held_out() -> None:
    scorer, held_out = fit_scorer(WANTED, UNWANTED, make_config(kept=0.5))
    wanted = held_out["wanted"]
    assert wanted.trained + len(wanted.scores) == len(WANTED) and 20 < len(wanted.scores) < 60
    assert int((wanted.scores >= scorer.least_score).sum()) == round(0.5 * len(wanted.scores))
    assert scorer.least_score == np.sort(wanted.scores)[-round(0.5 * len(wanted.scores))]
    assert held_out["unwanted"].passing(scorer.least_score) == 0
    assert fit_scorer(WANTED, UNWANTED, make_config(kept=1))[0].least_score == wanted.scores.min()


def test_equal_examples_are_on_one_side() -> None:
    copies = [text for text in WANTED for _ in range(3)]
    _, once = fit_scorer(WANTED, UNWANTED, make_config())
    _, thrice = fit_scorer(copies, UNWANTED, make_config())
    assert len(thrice["wanted"].scores) == 3 * len(once["wanted"].scores)


def test_the_filter_removes_documents_with_a_low_score_last() -> None:
    scorer, _ = fit_scorer(WANTED, UNWANTED, make_config(kept=1))
    judge = DocumentFilter(FilterConfig(), scorer)
    documents = [Document(text.encode(), len(text.encode()), 0) for text in (WANTED[3], UNWANTED[4], WANTED[5])]
    documents.append(Document(b"", 1 << 40, 0))
    decisions = judge.decide(documents)
    assert [judge.reasons[place] if place >= 0 else None for place in decisions.reasons] == [
        None,
        "min_score",
        None,
        "max_document_bytes",
    ]
    assert decisions.values[1] == scorer.score(pack_documents([UNWANTED[4]]))[0] < scorer.least_score
    assert len(decisions.figures["score"]) == 3, "not of the document that is removed before"
    verdicts = [judge.explain(document)[-1] for document in documents[:2]]
    assert [(verdict.rule, verdict.is_passed) for verdict in verdicts] == [("min_score", True), ("min_score", False)]
    assert {verdict.limit for verdict in verdicts} == {scorer.least_score}


def test_too_few_examples_are_named() -> None:
    with pytest.raises(UserError, match=r"filter\.score\.unwanted has 49 documents, 49 of them different"):
        fit_scorer(WANTED, UNWANTED[:49], make_config())
    with pytest.raises(UserError, match=r"filter\.score\.wanted has 60 documents, 1 of them different"):
        fit_scorer(WANTED[:1] * 60, UNWANTED, make_config())
    with pytest.raises(UserError, match=r"filter\.score\.unwanted is empty; a classifier learns"):
        ScoreConfig(["w"], [])
