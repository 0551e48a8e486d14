"""The filter of documents: all configured rules for a batch, and why a document is removed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.curate.config import FilterConfig
from lm.curate.document_batch import pack_utf8
from lm.curate.document_reader import MAX_DOCUMENT_BYTES, Document
from lm.curate.language import identify_batch
from lm.curate.masks import mask_batch
from lm.curate.rules import RULES, Figures, compute_figures, figure_of, first_failed_rule
from lm.curate.scorer import Scorer
from lm.kernels.jit import Int64s

TOO_LONG, LANGUAGES, LANGUAGE_SCORE, MIN_SCORE = "max_document_bytes", "languages", "min_language_score", "min_score"


class Decisions(NamedTuple):
    """What the filter makes of D documents."""

    reasons: Int64s
    """(D,): the place in :attr:`DocumentFilter.reasons` of the first rule that a document fails; −1: it is kept."""
    values: npt.NDArray[np.float64]
    """(D,): the figure that the rule compared with its limit, for ``languages`` the score; nan for a document that is
    kept."""
    figures: Figures
    """All figures of the rules, each (D,), and the scores of the documents that pass the rules and languages. Of a
    document past MAX_DOCUMENT_BYTES: the figures of an empty one."""
    languages: list[str | None]
    """The language of each document, if it passes the rules and languages are chosen."""


class Verdict(NamedTuple):
    """What one rule makes of a document."""

    rule: str
    value: float | str
    limit: float | str
    is_passed: bool


class DocumentFilter:
    """Decides which documents to keep, by a configuration. A document is judged by itself, so batches do not matter.

    Rules see a document as it is; personal data are masked in what is kept.
    """

    def __init__(self, config: FilterConfig, scorer: Scorer | None = None) -> None:
        """``scorer``: of ``config.score``."""
        self.config, self.scorer = config, scorer
        limits: dict[str, float | str | None] = {TOO_LONG: MAX_DOCUMENT_BYTES}
        limits |= {name: getattr(config.rules, name, None) for name in RULES}
        if config.languages:
            limits |= {LANGUAGES: ", ".join(config.languages), LANGUAGE_SCORE: config.min_language_score}
        if scorer:
            limits[MIN_SCORE] = scorer.least_score
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        """The limit of each rule that is on, in the order of the rules."""
        self.reasons = (TOO_LONG, *RULES, LANGUAGES, LANGUAGE_SCORE, MIN_SCORE)
        """Names of the rules in their order: the first that a document fails is the reason to remove it."""

    def decide(self, documents: Sequence[Document]) -> Decisions:
        """Return which documents to remove, and why."""
        reasons: Int64s = np.full(len(documents), -1)
        values = np.full(len(documents), np.nan)
        figures: Figures = {}
        if self.config.rules:
            batch = pack_utf8([document.data if document.is_whole else b"" for document in documents])
            figures = compute_figures(batch, self.config.rules)
            failed = first_failed_rule(figures, self.config.rules)
            for place in np.unique(failed[failed >= 0]):
                is_failed = failed == place
                reasons[is_failed] = self.reasons.index(RULES[place])
                values[is_failed] = figures[figure_of(RULES[place])][is_failed]
        for number, document in enumerate(documents):
            if not document.is_whole:
                reasons[number], values[number] = 0, document.size
        languages = self._decide_languages(documents, reasons, values)
        if self.scorer:
            figures["score"] = self._decide_scores(self.scorer, documents, reasons, values)
        return Decisions(reasons, values, figures, languages)

    def _decide_languages(
        self, documents: Sequence[Document], reasons: Int64s, values: npt.NDArray[np.float64]
    ) -> list[str | None]:
        """Return the languages of the documents that are not removed yet, and enter those to remove in the arrays."""
        languages: list[str | None] = [None] * len(documents)
        left: list[int] = np.flatnonzero(reasons < 0).tolist()
        if not self.config.languages or not left:
            return languages
        for place, code, score in zip(left, *identify_batch(pack_utf8([documents[i].data for i in left])), strict=True):
            languages[place] = code
            is_chosen = code in self.config.languages
            if not is_chosen or score < self.config.min_language_score:
                reasons[place] = self.reasons.index(LANGUAGE_SCORE if is_chosen else LANGUAGES)
                values[place] = score
        return languages

    def _decide_scores(
        self, scorer: Scorer, documents: Sequence[Document], reasons: Int64s, values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the scores of the documents that are not removed yet, and enter those to remove in the arrays."""
        left = np.flatnonzero(reasons < 0)
        scores = scorer.score(pack_utf8([documents[place].data for place in left.tolist()])).astype(np.float64)
        is_low = scores < scorer.least_score
        reasons[left[is_low]] = self.reasons.index(MIN_SCORE)
        values[left[is_low]] = scores[is_low]
        return scores

    def mask(self, texts: Sequence[bytes]) -> tuple[list[bytes], dict[str, int]]:
        """Return texts in UTF-8 with the configured personal data masked, and how many of each kind there were."""
        if not self.config.masks or not texts:
            return [*texts], {}
        batch, counts = pack_utf8(texts), dict[str, int]()
        for kind in self.config.masks:
            batch, found = mask_batch(batch, kind)
            counts[kind] = int(found.sum())
        data, ends = batch.data.tobytes(), batch.offsets.tolist()
        return [data[start:end] for start, end in zip(ends, ends[1:], strict=False)], counts

    def explain(self, document: Document) -> list[Verdict]:
        """Return what each rule makes of a document. A document past MAX_DOCUMENT_BYTES has the first verdict only."""
        verdicts = [Verdict(TOO_LONG, document.size, MAX_DOCUMENT_BYTES, document.is_whole)]
        if not document.is_whole:
            return verdicts
        batch = pack_utf8([document.data])
        figures = compute_figures(batch, self.config.rules) if self.config.rules else {}
        for rule in RULES:
            if rule in self.limits:
                value, limit = float(figures[figure_of(rule)][0]), float(self.limits[rule])
                verdicts.append(Verdict(rule, value, limit, not (value < limit if "min_" in rule else value > limit)))
        if self.config.languages:
            [code], [score] = identify_batch(batch)
            verdicts.append(Verdict(LANGUAGES, code, self.limits[LANGUAGES], code in self.config.languages))
            is_sure = bool(score >= self.config.min_language_score)
            verdicts.append(Verdict(LANGUAGE_SCORE, float(score), self.limits[LANGUAGE_SCORE], is_sure))
        if self.scorer:
            [score] = self.scorer.score(batch)
            verdicts.append(Verdict(MIN_SCORE, float(score), self.scorer.least_score, score >= self.scorer.least_score))
        return verdicts
