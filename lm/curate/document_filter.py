"""The filter of documents: all configured rules for a batch, and why a document is removed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm.curate.config import FilterConfig
from lm.curate.document_batch import pack_utf8
from lm.curate.document_reader import MAX_DOCUMENT_BYTES, Document
from lm.curate.rules import RULES, Figures, compute_figures, figure_name, first_failed_rule
from lm.kernels.jit import Int64s

TOO_LONG = "max_document_bytes"


class Decisions(NamedTuple):
    """What the filter makes of D documents."""

    reasons: Int64s
    """(D,): the place in :attr:`DocumentFilter.reasons` of the first rule that a document fails; −1: it is kept."""
    values: npt.NDArray[np.float64]
    """(D,): the figure that the rule compared with its limit; nan for a document that is kept."""
    figures: Figures
    """All figures, each (D,). Of a document past MAX_DOCUMENT_BYTES: those of an empty one."""


class Verdict(NamedTuple):
    """What one rule makes of a document."""

    rule: str
    value: float
    limit: float
    is_passed: bool


class DocumentFilter:
    """Decides which documents to keep, by a configuration. A document is judged by itself, so batches do not matter."""

    def __init__(self, config: FilterConfig) -> None:
        self.config = config
        rules = config.rules
        limits: dict[str, float | None] = {name: getattr(rules, name) if rules else None for name in RULES}
        self.limits = {TOO_LONG: MAX_DOCUMENT_BYTES} | {
            name: limit for name, limit in limits.items() if limit is not None
        }
        """The limit of each rule that is on, in the order of the rules."""
        self.reasons = (TOO_LONG, *RULES)
        """Names of the rules in their order: the first that a document fails is the reason to remove it."""

    def decide(self, documents: Sequence[Document]) -> Decisions:
        """Return which documents to remove, and why."""
        batch = pack_utf8([document.data if document.is_whole else b"" for document in documents])
        reasons: Int64s = np.full(len(documents), -1)
        values = np.full(len(documents), np.nan)
        figures: Figures = {}
        if self.config.rules:
            figures = compute_figures(batch, self.config.rules)
            failed = first_failed_rule(figures, self.config.rules)
            reasons = np.where(failed >= 0, failed + 1, -1)
            for place in np.unique(failed[failed >= 0]):
                is_failed = failed == place
                values[is_failed] = figures[figure_name(RULES[place])][is_failed]
        for number, document in enumerate(documents):
            if not document.is_whole:
                reasons[number], values[number] = 0, document.size
        return Decisions(reasons, values, figures)

    def explain(self, document: Document) -> list[Verdict]:
        """Return what each rule makes of a document. A document past MAX_DOCUMENT_BYTES has the first verdict only."""
        verdicts = [Verdict(TOO_LONG, document.size, MAX_DOCUMENT_BYTES, document.is_whole)]
        if not document.is_whole or not self.config.rules:
            return verdicts
        figures = self.decide([document]).figures
        for rule, limit in self.limits.items():
            if rule != TOO_LONG:
                value = float(figures[figure_name(rule)][0])
                verdicts.append(Verdict(rule, value, limit, not (value < limit if "min_" in rule else value > limit)))
        return verdicts
