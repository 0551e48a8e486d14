"""Configuration of the stages that decide which documents a corpus keeps, and of text classifiers."""

import re
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError

PersonalData = Literal["email", "phone", "ip"]
TextFormat = Literal["jsonl.zst", "parquet"]
Unit = Literal["line", "paragraph"]


@dataclass(frozen=True)
class ClassifierConfig(Config, section="classifier"):
    """How a :class:`TextClassifier` reads text and is trained."""

    table_bits: int = bounded_field(18, ge=8, le=26)
    """The table of weights has 2^table_bits rows. N-grams with the same hash share a row."""
    word_ngrams: int = bounded_field(2, ge=0, le=2)
    """0: no words. 1: words. 2: also pairs of words."""
    char_ngrams: int = bounded_field(4, ge=0, le=7)
    """Characters of an n-gram, across words; 0 turns them off."""
    epochs: int = bounded_field(5, ge=1)
    """Passes over the documents, in an order that the seed decides."""
    learning_rate: float = bounded_field(0.5, gt=0, le=2)
    """Part of a document's error that its update removes. Falls linearly to 0 over the training."""
    balance: bool = True
    """Whether each label counts the same in all, however many documents it has."""
    seed: int = bounded_field(0, ge=0)
    """Of the order of the documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.word_ngrams and not self.char_ngrams:
            raise UserError("classifier.word_ngrams and classifier.char_ngrams are 0; set one of them.")


@dataclass(frozen=True)
class RulesConfig(Config, section="filter.rules"):
    """Limits of documents, in the order in which the rules are asked; the first that fails is the reason. A field is a
    rule, and has its name; null turns it off. The fields at the end say what the rules count.

    Gopher: Rae et al. 2021, section A1.1 and table A1. C4: Raffel et al. 2020, section 2.2. FineWeb: Penedo et al.
    2024, section 3.6. Words are tokens with a letter or a number. Symbols, such as punctuation, are tokens too.
    """

    min_characters: int | None = bounded_field(None, ge=0)
    """Fewest characters of a document. Off by default: Gopher's rules limit its words."""
    max_characters: int | None = bounded_field(None, ge=1)
    """Most characters of a document. Off by default."""
    gopher_min_words: int | None = bounded_field(50, ge=0)
    """Fewest words of a document (Gopher)."""
    gopher_max_words: int | None = bounded_field(100_000, ge=1)
    """Most words of a document (Gopher)."""
    gopher_min_mean_word_length: float | None = bounded_field(3.0, ge=0)
    """Least mean length of the words, in characters (Gopher)."""
    gopher_max_mean_word_length: float | None = bounded_field(10.0, ge=0)
    """Largest mean length of the words, in characters (Gopher)."""
    gopher_max_hashes: float | None = bounded_field(0.1, ge=0)
    """Most hash signs over tokens (Gopher: symbol-to-word ratio)."""
    gopher_max_ellipses: float | None = bounded_field(0.1, ge=0)
    """Most ellipses, ... or …, over tokens (Gopher: symbol-to-word ratio)."""
    gopher_max_bullet_lines: float | None = bounded_field(0.9, ge=0)
    """Most lines that begin with a bullet, • or -, over lines (Gopher)."""
    gopher_max_ellipsis_lines: float | None = bounded_field(0.3, ge=0)
    """Most lines that end with an ellipsis over lines (Gopher)."""
    gopher_min_alphabetic_words: float | None = bounded_field(0.8, ge=0, le=1)
    """Fewest tokens with a letter over tokens (Gopher). Symbols count as tokens, as in datatrove, so that text with
    much dialog can fail."""
    gopher_min_stop_words: int | None = bounded_field(2, ge=0, le=8)
    """Fewest different words of: the, be, to, of, and, that, have, with (Gopher). For English text."""
    gopher_max_duplicate_paragraphs: float | None = bounded_field(0.3, ge=0)
    """Most paragraphs that equal an earlier one over paragraphs (Gopher). Blank lines divide paragraphs."""
    gopher_max_duplicate_paragraph_characters: float | None = bounded_field(0.2, ge=0)
    """Most characters in paragraphs that equal an earlier one over all characters (Gopher)."""
    gopher_max_duplicate_lines: float | None = bounded_field(0.3, ge=0)
    """Most lines that equal an earlier one over lines, without blank lines (Gopher)."""
    gopher_max_duplicate_line_characters: float | None = bounded_field(0.2, ge=0)
    """Most characters in lines that equal an earlier one over all characters (Gopher)."""
    gopher_max_top_2_gram: float | None = bounded_field(0.2, ge=0)
    """Most characters in the most frequent 2-gram, counted as often as it occurs, over all characters (Gopher)."""
    gopher_max_top_3_gram: float | None = bounded_field(0.18, ge=0)
    """Most characters in the most frequent 3-gram, counted as often as it occurs, over all characters (Gopher)."""
    gopher_max_top_4_gram: float | None = bounded_field(0.16, ge=0)
    """Most characters in the most frequent 4-gram, counted as often as it occurs, over all characters (Gopher)."""
    gopher_max_duplicate_5_grams: float | None = bounded_field(0.15, ge=0)
    """Most characters in 5-grams that occurred before, over all characters (Gopher)."""
    gopher_max_duplicate_6_grams: float | None = bounded_field(0.14, ge=0)
    """Most characters in 6-grams that occurred before, over all characters (Gopher)."""
    gopher_max_duplicate_7_grams: float | None = bounded_field(0.13, ge=0)
    """Most characters in 7-grams that occurred before, over all characters (Gopher)."""
    gopher_max_duplicate_8_grams: float | None = bounded_field(0.12, ge=0)
    """Most characters in 8-grams that occurred before, over all characters (Gopher)."""
    gopher_max_duplicate_9_grams: float | None = bounded_field(0.11, ge=0)
    """Most characters in 9-grams that occurred before, over all characters (Gopher)."""
    gopher_max_duplicate_10_grams: float | None = bounded_field(0.1, ge=0)
    """Most characters in 10-grams that occurred before, over all characters (Gopher)."""
    c4_max_lorem_ipsum_lines: int | None = bounded_field(0, ge=0)
    """Most lines with "lorem ipsum" (C4). All rules of C4 look only at the lines that C4 keeps, see the last fields."""
    c4_max_curly_bracket_lines: int | None = bounded_field(0, ge=0)
    """Most lines with a curly bracket (C4)."""
    c4_min_sentences: int | None = bounded_field(5, ge=0)
    """Fewest sentences in lines without the word javascript and without phrases of policies, such as "use cookies"
    (C4)."""
    fineweb_min_punctuated_lines: float | None = bounded_field(0.12, ge=0, le=1)
    """Fewest lines that end with the punctuation of a sentence over lines, without blank lines (FineWeb)."""
    fineweb_max_short_lines: float | None = bounded_field(0.67, ge=0)
    """Most short lines over lines, without blank lines (FineWeb)."""
    fineweb_max_duplicate_line_characters: float | None = bounded_field(0.01, ge=0)
    """Most characters in lines that equal an earlier one over all characters but line feeds (FineWeb)."""
    fineweb_max_line_feeds: float | None = bounded_field(0.3, ge=0)
    """Most line feeds over tokens (FineWeb)."""
    fineweb_short_line_characters: int = bounded_field(30, ge=0)
    """A line of at most so many characters is short (FineWeb)."""
    c4_min_words_per_line: int = bounded_field(3, ge=0)
    """C4 keeps lines of at least so many words; what white space separates is a word here."""
    c4_max_word_characters: int = bounded_field(1000, ge=1)
    """C4 keeps lines without longer words."""
    c4_end_marks: bool = True
    """Whether C4 keeps only lines that end with . ? ! " or '. FineWeb applies the rules of C4 without it."""


@dataclass(frozen=True)
class ScoreConfig(Config, section="filter.score"):
    """Scores of documents by a text classifier that is trained on examples. By default there is none."""

    wanted: list[str] = field(default_factory=list)
    """Examples of documents to keep: paths, globs or URLs in any form of data.train."""
    unwanted: list[str] = field(default_factory=list)
    """Examples of documents to remove."""
    kept: float = bounded_field(0.95, gt=0, le=1)
    """Share of the wanted examples that must pass: the least score is the one that so many of them reach. A fifth of
    the examples, on which the classifier is not trained, decides it."""
    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)
    """How the classifier reads text and is trained."""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. Examples enter it by their content."""
        return {"kept": self.kept, "classifier": asdict(self.classifier)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.wanted) != bool(self.unwanted):
            missing = "unwanted" if self.wanted else "wanted"
            raise UserError(f"filter.score.{missing} is empty; a classifier learns from examples of both kinds.")


@dataclass(frozen=True)
class FilterConfig(Config, section="filter"):
    """Which documents the stage ``filter`` keeps. By default it is off."""

    rules: RulesConfig | None = None
    """Rules of quality and repetition; {}: those of Gopher, C4 and FineWeb, with their own limits. Default: none."""
    languages: list[str] = field(default_factory=list)
    """Languages to keep, as codes of ISO 639, such as [en, de]. Empty (the default): all. Needs the extra languages."""
    min_language_score: float = bounded_field(0.5, ge=0, le=1)
    """Least score of a document's language: its probability, or the share of its script. Only with languages."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    """A text classifier that scores documents. By default there is none."""
    masks: list[PersonalData] = field(default_factory=list)
    """Personal data to replace in the documents kept: email, phone (of the USA) and ip addresses. Default: none."""
    keep_removed_text: bool = False
    """Whether removed.parquet has the text of the removed documents. Default: their places and reasons only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for language in self.languages:
            if not re.fullmatch("[a-z]{2,3}", language):
                raise UserError(f"filter.languages has {language!r}; a code of ISO 639 has 2 or 3 letters, such as en.")

    @property
    def is_on(self) -> bool:
        """Whether there is anything to filter by, or to mask."""
        return self.rules is not None or bool(self.languages or self.score.wanted or self.masks)

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. The score enters it by its classifier."""
        return {name: value for name, value in asdict(self).items() if name != "score"}

    @property
    def language_library(self) -> list[str]:
        """The version of py3langid if it decides anything, for keys. Raises UserError if it is missing."""
        if not self.languages:
            return []
        try:
            return [metadata.version("py3langid")]
        except metadata.PackageNotFoundError:
            raise UserError("filter.languages needs an extra: pip install 'textmill[languages]'.") from None


@dataclass(frozen=True)
class DeduplicateConfig(Config, section="deduplicate"):
    """Which copies of documents, and of lines, are removed from the training text. By default none are."""

    equal: bool = False
    """Whether to keep only the first of equal documents, apart from white space around them."""
    jaccard_threshold: float | None = bounded_field(None, gt=0, le=1)
    """Documents of at least this Jaccard similarity, such as 0.8, are near-duplicates: only the first stays. Off by
    default."""
    num_hashes: int = bounded_field(112, ge=1, le=1 << 16)
    """Values of a MinHash signature."""
    num_bands: int = bounded_field(14, ge=1)
    """Bands of a signature. Documents that share one are compared: more bands find more of the less similar ones."""
    ngrams: int = bounded_field(5, ge=1)
    """Words of a shingle, the unit of the similarity."""
    repeats: Unit | None = None
    """Remove each line, or each paragraph, that occurs more than once in the training text, wherever it occurs. Off by
    default."""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key of the comparison of documents."""
        return {name: value for name, value in asdict(self).items() if name != "repeats"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hashes % self.num_bands:
            raise UserError(
                f"deduplicate.num_hashes {self.num_hashes} cannot be divided into {self.num_bands} bands of one size; "
                "choose a multiple of deduplicate.num_bands."
            )

    @property
    def is_on(self) -> bool:
        """Whether any copies of documents are removed."""
        return self.equal or self.jaccard_threshold is not None


@dataclass(frozen=True)
class DecontaminateConfig(Config, section="decontaminate"):
    """What the stage ``decontaminate`` removes: training text that a model is tested on. By default it is off.

    Brown et al. 2020 (GPT-3), appendix C.
    """

    validation: bool = False
    """Whether the validation text is protected."""
    files: list[str] = field(default_factory=list)
    """Other protected text, such as the questions of a test: paths, globs or URLs in any form of data.train."""
    tasks: dict[str, list[str]] = field(default_factory=dict)
    """Protected tasks of textmill evaluate, with the files of their problems: {gsm8k: [test.jsonl]}."""
    ngrams: int = bounded_field(13, ge=2, le=64)
    """Words of a run that counts as shared. Words are normalized: no case, accents or punctuation."""
    action: Literal["drop", "cut"] = "drop"
    """drop: remove documents that share a run. cut: remove the shared words only."""

    @property
    def is_on(self) -> bool:
        """Whether anything is protected."""
        return self.validation or bool(self.files or self.tasks)
