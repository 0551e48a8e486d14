"""Languages of documents: by the script where it decides alone, else by the model of py3langid."""

import unicodedata
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.curate.counts import text_classes
from lm.curate.document_batch import DocumentBatch, pack_documents
from lm.kernels.curation.language_features import count_scripts, walk_features
from lm.kernels.curation.text_classes import LETTER
from lm.kernels.jit import Bytes, Floats, Int32s, Int64s, log_compilation

UNDETERMINED = "und"
_NONE, _LETTERS, _HAN, _KANA, _POLYTONIC, _POINTS, _GREEK, _HEBREW, _FIRST_ALONE = range(9)
# Scripts of one language, and the ranges of their letters. Ancient Greek has accents of its own, and ancient Hebrew and
# Yiddish have points, so that Greek and Hebrew decide without these only.
_ALONE = {
    "ko": "1100-11FF 3131-318E A960-A97F AC00-D7FF",
    "th": "0E00-0E7F",
    "lo": "0E80-0EFF",
    "km": "1780-17FF",
    "ka": "10A0-10FF 1C90-1CBF 2D00-2D2F",
    "hy": "0530-058F",
    "si": "0D80-0DFF",
    "ta": "0B80-0BFF",
    "te": "0C00-0C7F",
    "kn": "0C80-0CFF",
    "ml": "0D00-0D7F",
    "gu": "0A80-0AFF",
    "pa": "0A00-0A7F",
    "or": "0B00-0B7F",
    "dv": "0780-07BF",
    "chr": "13A0-13FF AB70-ABBF",
}
_SHARED = {
    _HAN: "3400-4DBF 4E00-9FFF F900-FAFF 20000-3FFFF",
    _KANA: "3041-3096 30A1-30FA 31F0-31FF FF66-FF9D",
    _POLYTONIC: "1F00-1FFF",
    _GREEK: "0370-03FF",
    _HEBREW: "05D0-05EA",
}
_CODES = ("el", "he", *_ALONE)  # of the columns from _GREEK on
_MIN_SHARE = 0.5  # of the letters, for a script to decide
_MIN_KANA = 0.1  # of kana and Chinese characters, for Japanese
_MAX_MARKED = 0.02  # of Greek and Hebrew letters: letters with ancient accents, and points


class _Model(NamedTuple):
    """py3langid's naive Bayes classifier: F features, C classes, of which some have the same code."""

    next_states: Int32s
    rows: Int32s
    features: Int32s
    weights: Floats  # (F, C)
    biases: Floats  # (C,)
    codes: list[str]
    pairs: list[tuple[int, int]]  # classes of one code


@cache
def _scripts() -> Bytes:
    """Return the script of each code point, uint8 (0x110000,)."""
    is_letter = text_classes() & LETTER != 0
    scripts = np.where(is_letter, _LETTERS, _NONE).astype(np.uint8)
    for script, ranges in [*_SHARED.items(), *enumerate(_ALONE.values(), _FIRST_ALONE)]:
        for run in ranges.split():
            first, last = (int(point, 16) for point in run.split("-"))
            part = slice(first, last + 1)
            scripts[part][is_letter[part]] = script
    scripts[0x0591:0x05C8] = _POINTS
    return scripts


@cache
def _load_model() -> _Model:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError(
            "The language of this text needs an extra, because its script is that of several languages: "
            "pip install 'textmill[languages]'."
        ) from None
    identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE)
    codes = list(identifier.nb_classes)
    pairs = [(codes.index(code), place) for place, code in enumerate(codes) if codes.index(code) < place]
    return _Model(
        np.asarray(identifier.tk_nextmove, np.int32),
        np.asarray(identifier.tk_row, np.int32),
        np.asarray(identifier.tk_output, np.int32),
        identifier.nb_ptc.astype(np.float32),
        identifier.nb_pc.astype(np.float32),
        codes,
        pairs,
    )


def _decide_by_script(counts: Int64s) -> tuple[str, float] | None:
    """Return the language of a document and the share of its letters by which its script decides, or None."""
    total = int(counts[_LETTERS:].sum() - counts[_POINTS])
    if total == 0:
        return UNDETERMINED, 0.0
    kana, japanese = counts[_KANA], counts[_KANA] + counts[_HAN]
    if japanese > _MIN_SHARE * total and kana > _MIN_KANA * japanese:
        return "ja", float(japanese / total)
    script = int(counts[_GREEK:].argmax()) + _GREEK
    marked = {_GREEK: int(counts[_POLYTONIC]), _HEBREW: int(counts[_POINTS])}.get(script, 0)
    if counts[script] > _MIN_SHARE * total and marked <= _MAX_MARKED * counts[script]:
        return _CODES[script - _GREEK], float(counts[script] / total)
    return None


def _decide_by_model(text: str, counts: Int32s, found: Int32s) -> tuple[str, float]:
    """Return the language and its probability as py3langid does; ``counts`` are zeros, and are so again afterwards."""
    model = _load_model()
    data = np.frombuffer(unicodedata.normalize("NFC", text.lower() if text.isupper() else text).encode(), np.uint8)
    num_found = walk_features(data, model.next_states, model.rows, model.features, counts, found)
    features = found[:num_found]
    if not num_found:
        return UNDETERMINED, 0.0
    scores = np.log1p(counts[features].astype(np.float32)) @ model.weights[features] + model.biases
    counts[features] = 0
    scores *= 1 / np.sqrt(len(data))  # so that long texts have probabilities below 1 too
    scores = np.exp(scores - scores.max())
    scores /= scores.sum()
    for first, second in model.pairs:
        scores[first] += scores[second]
        scores[second] = 0
    best = int(scores.argmax())
    return model.codes[best], float(scores[best])


def identify_batch(batch: DocumentBatch) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Return the codes (ISO 639) of the languages of D documents, and scores between 0 and 1, float64 (D,).

    See :func:`identify_language`.
    """
    data, offsets = batch
    columns = _GREEK + len(_CODES)
    scripts = np.zeros((len(offsets) - 1) * columns, np.int64)
    with log_compilation("language"):
        count_scripts(data, offsets, _scripts(), _LETTERS, scripts)
    results: list[tuple[str, float]] = []
    counts = found = np.empty(0, np.int32)
    for row, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        result = _decide_by_script(scripts[row * columns : (row + 1) * columns])
        if result is None:
            if not len(counts):
                counts, found = (np.zeros(len(_load_model().weights), np.int32) for _ in range(2))
            result = _decide_by_model(data[begin:end].tobytes().decode(), counts, found)
        results.append(result)
    return [code for code, _ in results], np.array([score for _, score in results])


def identify_language(text: str) -> tuple[str, float]:
    """Return the code (ISO 639) of the language of a text, and a score between 0 and 1.

    If most letters belong to a script of one language, such as Thai, Hangul or kana with Chinese characters, the score
    is their share. Else py3langid tells the language and its probability. Without letters: ``("und", 0.0)``. Raises
    UserError if py3langid is needed and is not installed.
    """
    codes, scores = identify_batch(pack_documents([text]))
    return codes[0], float(scores[0])
