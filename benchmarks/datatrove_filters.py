"""Run datatrove's filters over documents, in the Python that has datatrove: for benchmarks.curate and its comparison.

``PYTHON benchmarks/datatrove_filters.py rules|masks|decisions FILE``. FILE has one JSON string a line, a document.
``rules`` prints the CPU seconds of the four filters in a chain, ``masks`` those of the masks of addresses, and
``decisions`` for each rule the documents that it alone removes, as JSON. Imports nothing of this project.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.utils.text import split_into_words

_QUALITY: dict[str, Any] = {
    "min_doc_words": None,
    "max_doc_words": None,
    "min_avg_word_length": None,
    "max_avg_word_length": None,
    "max_symbol_word_ratio": None,
    "max_bullet_lines_ratio": None,
    "max_ellipsis_lines_ratio": None,
    "max_non_alpha_words_ratio": None,
    "min_stop_words": None,
}
_REPETITION: dict[str, Any] = {
    "dup_line_frac": None,
    "dup_para_frac": None,
    "dup_line_char_frac": None,
    "dup_para_char_frac": None,
    "top_n_grams": (),
    "dup_n_grams": (),
}
_FINEWEB: dict[str, Any] = {
    "line_punct_thr": 0,
    "short_line_thr": math.inf,
    "char_duplicates_ratio": math.inf,
    "new_line_ratio": math.inf,
}
_C4: dict[str, Any] = {"min_num_sentences": -1, "filter_lorem_ipsum": False, "filter_curly_bracket": False}


def rules() -> Iterator[tuple[str, Any]]:
    """Yield each rule of ours that datatrove has too, and datatrove's filter with this rule alone."""

    def quality(**limits: Any) -> Any:
        return GopherQualityFilter(**{**_QUALITY, **limits})

    def repetition(**limits: Any) -> Any:
        return GopherRepetitionFilter(**{**_REPETITION, **limits})

    yield "gopher_min_words", quality(min_doc_words=50)
    yield "gopher_max_words", quality(max_doc_words=100_000)
    yield "gopher_min_mean_word_length", quality(min_avg_word_length=3)
    yield "gopher_max_mean_word_length", quality(max_avg_word_length=10)
    yield "gopher_max_symbols", quality(max_symbol_word_ratio=0.1)
    yield "gopher_max_bullet_lines", quality(max_bullet_lines_ratio=0.9)
    yield "gopher_max_ellipsis_lines", quality(max_ellipsis_lines_ratio=0.3)
    yield "gopher_min_alphabetic_words", quality(max_non_alpha_words_ratio=0.8)
    yield "gopher_min_stop_words", quality(min_stop_words=2)
    yield "gopher_max_duplicate_paragraphs", repetition(dup_para_frac=0.3)
    yield "gopher_max_duplicate_paragraph_characters", repetition(dup_para_char_frac=0.2)
    yield "gopher_max_duplicate_lines", repetition(dup_line_frac=0.3)
    yield "gopher_max_duplicate_line_characters", repetition(dup_line_char_frac=0.2)
    for n, limit in ((2, 0.2), (3, 0.18), (4, 0.16)):
        yield f"gopher_max_top_{n}_gram", repetition(top_n_grams=((n, limit),))
    for n, limit in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)):
        yield f"gopher_max_duplicate_{n}_grams", repetition(dup_n_grams=((n, limit),))
    yield "c4_max_lorem_ipsum_lines", C4QualityFilter(**{**_C4, "filter_lorem_ipsum": True})
    yield "c4_max_curly_bracket_lines", C4QualityFilter(**{**_C4, "filter_curly_bracket": True})
    yield "c4_min_sentences", C4QualityFilter(**{**_C4, "min_num_sentences": 5})
    yield "fineweb_min_punctuated_lines", FineWebQualityFilter(**{**_FINEWEB, "line_punct_thr": 0.12})
    yield "fineweb_max_short_lines", FineWebQualityFilter(**{**_FINEWEB, "short_line_thr": 0.67})
    yield "fineweb_max_duplicate_line_characters", FineWebQualityFilter(**{**_FINEWEB, "char_duplicates_ratio": 0.01})
    yield "fineweb_max_line_feeds", FineWebQualityFilter(**{**_FINEWEB, "new_line_ratio": 0.3})


def keeps(rule: Any, text: str) -> bool:
    try:
        result = rule.filter(Document(text=text, id=""))
    except ZeroDivisionError:  # a text without words or lines
        return False
    return (result[0] if isinstance(result, tuple) else result) is True


def decide(texts: list[str]) -> dict[str, list[int]]:
    """Return for each rule the places of the texts that it removes."""
    removed: dict[str, list[int]] = {}
    filters = dict(rules())
    for place, text in enumerate(texts):  # datatrove remembers the words of the last texts
        for name, rule in filters.items():
            if not keeps(rule, text):
                removed.setdefault(name, []).append(place)
    return removed


def cpu_seconds(function: Callable[[str], object], texts: list[str]) -> float:
    split_into_words("The first call loads the tokenizer.")
    started = time.process_time()
    for text in texts:
        function(text)
    return time.process_time() - started


def main() -> None:
    work, file = sys.argv[1:]
    texts = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    if work == "decisions":
        print(json.dumps(decide(texts)))
    elif work == "masks":
        print(cpu_seconds(PIIFormatter().format, texts))
    else:
        chain = [GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(), FineWebQualityFilter()]
        print(cpu_seconds(lambda text: all(keeps(rule, text) for rule in chain), texts))


if __name__ == "__main__":
    main()
