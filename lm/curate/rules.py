"""Rules of quality and repetition for documents: Gopher's, C4's and FineWeb's, from one pass over the text."""

from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.curate.config import RulesConfig
from lm.curate.counts import count_batch
from lm.curate.document_batch import DocumentBatch, pack_documents
from lm.kernels.curation.columns import COLUMNS
from lm.kernels.curation.document_counts import LineLimits
from lm.kernels.jit import Int64s

Figures = dict[str, npt.NDArray[np.float64]]


class _Figure(NamedTuple):
    """What a rule compares with its limit: a count over another, or a count alone."""

    numerator: str
    denominator: str | None = None


_GRAMS = {f"top_{n}_gram": _Figure(f"top_{n}_gram_characters", "gram_characters") for n in (2, 3, 4)} | {
    f"duplicate_{n}_grams": _Figure(f"duplicate_{n}_gram_characters", "gram_characters") for n in range(5, 11)
}
_FIGURES = {
    "characters": _Figure("characters"),
    "gopher_words": _Figure("words"),
    "gopher_mean_word_length": _Figure("word_characters", "words"),
    "gopher_hashes": _Figure("hashes", "tokens"),
    "gopher_ellipses": _Figure("ellipses", "tokens"),
    "gopher_bullet_lines": _Figure("bullet_lines", "lines"),
    "gopher_ellipsis_lines": _Figure("ellipsis_lines", "lines"),
    "gopher_alphabetic_words": _Figure("alphabetic_words", "tokens"),
    "gopher_stop_words": _Figure("stop_words"),
    "gopher_duplicate_paragraphs": _Figure("duplicate_paragraphs", "paragraphs"),
    "gopher_duplicate_paragraph_characters": _Figure("duplicate_paragraph_characters", "characters"),
    "gopher_duplicate_lines": _Figure("duplicate_lines", "filled_lines"),
    "gopher_duplicate_line_characters": _Figure("duplicate_line_characters", "characters"),
    **{f"gopher_{name}": figure for name, figure in _GRAMS.items()},
    "c4_lorem_ipsum_lines": _Figure("c4_lorem_ipsum_lines"),
    "c4_curly_bracket_lines": _Figure("c4_curly_bracket_lines"),
    "c4_sentences": _Figure("c4_sentences"),
    "fineweb_punctuated_lines": _Figure("punctuated_lines", "filled_lines"),
    "fineweb_short_lines": _Figure("short_lines", "filled_lines"),
    "fineweb_duplicate_line_characters": _Figure("duplicate_line_characters", "characters_in_lines"),
    "fineweb_line_feeds": _Figure("line_feeds", "tokens"),
}


def figure_of(rule: str) -> str:
    """Return the name of the figure that a rule limits: the rule's without ``min_`` or ``max_``."""
    return rule.replace("min_", "", 1).replace("max_", "", 1)


RULES = tuple(name for name in RulesConfig.__dataclass_fields__ if figure_of(name) in _FIGURES)
"""The names of the rules in their order: fields of :class:`RulesConfig`."""

_COURSE_RULES = (
    *("gopher_min_words", "gopher_max_words", "gopher_min_mean_word_length", "gopher_max_mean_word_length"),
    *("gopher_max_ellipsis_lines", "gopher_min_alphabetic_words"),
)
_NO_OTHER_RULES: dict[str, Any] = {name: None for name in RULES if name not in _COURSE_RULES}
_COURSE = RulesConfig(**_NO_OTHER_RULES)


def compute_figures(batch: DocumentBatch, config: RulesConfig) -> Figures:
    """Return what the rules compare with their limits: for each figure float64 (D,), for D documents.

    A ratio whose denominator is 0 is 0. Repeated lines, paragraphs and n-grams are looked for among the first 2¹⁸ of a
    document. :func:`figure_of` has the name of the figure of a rule.
    """
    limits = LineLimits(
        config.fineweb_short_line_characters,
        config.c4_min_words_per_line,
        config.c4_max_word_characters,
        config.c4_end_marks,
    )
    columns: dict[str, Int64s] = dict(zip(COLUMNS, count_batch(batch, limits).T, strict=True))
    columns["characters_in_lines"] = columns["characters"] - columns["line_feeds"]
    return {
        name: columns[count].astype(np.float64) if over is None else columns[count] / np.maximum(columns[over], 1)
        for name, (count, over) in _FIGURES.items()
    }


def first_failed_rule(figures: Figures, config: RulesConfig) -> Int64s:
    """Return for each of D documents the place in :data:`RULES` of the first rule that it fails, int64 (D,).

    −1: it passes all rules. ``figures``: see :func:`compute_figures`, with the same configuration.
    """
    limits = asdict(config)
    first = np.full(len(figures["characters"]), -1)
    for place, rule in reversed([*enumerate(RULES)]):
        if (limit := limits[rule]) is None:
            continue
        figure = figures[figure_of(rule)]
        first[figure < limit if "min_" in rule else figure > limit] = place
    return first


def gopher_quality_filter(text: str) -> bool:
    """Return whether a text passes the rules of quality of Gopher that CS336 asks for (assignment 4).

    It has 50 to 100,000 words of 3 to 10 characters on average. At most 30 % of its lines end with an ellipsis. At
    least 80 % of its tokens, which are words and symbols, have a letter.
    """
    return bool(first_failed_rule(compute_figures(pack_documents([text]), _COURSE), _COURSE)[0] < 0)
