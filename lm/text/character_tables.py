"""Tables of the class of each character, such as letter or digit, which decide the pretokens.

The releases of ``regex`` have the tables of different versions of Unicode. So that a text keeps its token ids, a
tokenizer keeps the tables under which it was made or published. A table is a string of runs in the order of the code
points: "c9s5" are nine control characters, then five of white space.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import regex

from lm.common.errors import UserError
from lm.kernels.bpe.scanners.character_classes import (
    CJK,
    CONTROL,
    DIGIT,
    LOWER,
    MARK,
    OTHER,
    UNCASED,
    UPPER,
    WHITESPACE,
)
from lm.text.patterns import CJK as CJK_RANGES
from lm.text.patterns import has_compiled_scanner, resolve_patterns
from lm.text.pretokenize import Pattern, pretokenize

if TYPE_CHECKING:
    from lm.kernels.bpe.scanners.registry import Scanner

log = logging.getLogger(__name__)

_CODE_POINTS = 0x110000
# Letter in a table, pattern, and a character without another role in the patterns. Later patterns come first.
_CLASSES = {
    OTHER: ("o", r"[\p{P}\p{S}]+", "§"),
    LOWER: ("l", r"\p{Ll}+", "é"),
    UPPER: ("u", r"[\p{Lu}\p{Lt}]+", "É"),
    UNCASED: ("t", r"[\p{Lm}\p{Lo}]+", "ª"),
    MARK: ("m", r"\p{M}+", "\u0300"),
    CONTROL: ("c", r"\p{C}+", "\x80"),
    DIGIT: ("n", r"\p{N}+", "²"),
    WHITESPACE: ("s", r"\s+", "\xa0"),
}
# Of published tokenizers: Unicode 16, as in tiktoken 0.14 and in tokenizers 0.23.
PUBLISHED_TABLES = Path(__file__).with_name("unicode_16.txt").read_text(encoding="ascii").strip()
_BY_LETTER = {letter: character_class for character_class, (letter, *_) in _CLASSES.items()}


@cache
def installed_tables() -> str:
    """Return the tables of the installed ``regex``."""
    characters = np.arange(_CODE_POINTS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    classes = np.full(_CODE_POINTS, OTHER, np.uint8)
    for character_class, (_, pattern, _) in _CLASSES.items():
        for run in regex.finditer(pattern, characters):
            classes[run.start() : run.end()] = character_class
    return pack_tables(classes)


def pack_tables(classes: npt.NDArray[np.uint8]) -> str:
    """Return the tables of an array of classes by code point, uint8 (0x110000,)."""
    starts = np.flatnonzero(np.diff(classes, prepend=classes[:1] + 1))
    lengths = np.diff(starts, append=len(classes)).tolist()
    runs = zip(classes[starts].tolist(), lengths, strict=True)
    return "".join(f"{_CLASSES[character_class][0]}{length}" for character_class, length in runs)


@lru_cache(maxsize=4)
def unpack_tables(tables: str) -> npt.NDArray[np.uint8]:
    """Return the class of each code point, uint8 (0x110000,). Raises ValueError for malformed tables."""
    runs = regex.findall(r"\G([a-z])([0-9]{1,7})", tables)
    lengths = [int(length) for _, length in runs]
    size = sum(len(letter) + len(length) for letter, length in runs)
    if size != len(tables) or sum(lengths) != _CODE_POINTS or not _BY_LETTER.keys() >= {letter for letter, _ in runs}:
        raise ValueError("has malformed character_tables")
    classes = np.repeat(np.array([_BY_LETTER[letter] for letter, _ in runs], np.uint8), lengths)
    classes.flags.writeable = False
    return classes


@lru_cache(maxsize=8)
def scanner_classes(scanner: "Scanner", tables: str) -> npt.NDArray[np.uint8]:
    """Return the class of each code point that a scanner distinguishes, uint8 (0x110000,), by ``tables``."""
    classes: npt.NDArray[np.uint8] = np.array(scanner.classes, np.uint8)[unpack_tables(tables)]
    for first, last in zip(CJK_RANGES[::3], CJK_RANGES[2::3], strict=True) if scanner.has_cjk else ():
        classes[ord(first) : ord(last) + 1] |= CJK
    return classes


def tables_identity(pattern: str | Sequence[str]) -> str:
    """Return the identity of the character classes that decide pretokens besides the pattern, for keys of results.

    It is a digest of the tables, or the version of ``regex``, which itself finds pretokens without a compiled scanner.
    """
    if has_compiled_scanner(resolve_patterns(pattern)):
        return hashlib.sha256(installed_tables().encode()).hexdigest()
    return f"regex {metadata.version('regex')}"


def check_tables(pattern: str | Sequence[str], expected: str) -> None:
    """Raise UserError if :func:`tables_identity` of a pattern is not the expected one, of another machine."""
    if tables_identity(pattern) != expected:
        raise UserError(
            f"regex {metadata.version('regex')} of this worker has other character tables than that of the machine "
            "which started the run. Install the same version on both."
        )


def pretokenize_by_tables(text: str, pattern: Pattern, tables: str) -> Iterator[str]:
    """Yield the pretokens of ``text`` by ``tables``, if the pattern has a compiled scanner. Other patterns follow
    ``regex``. See :func:`lm.text.pretokenize.pretokenize`."""
    if not has_compiled_scanner(pattern) or tables == installed_tables():
        yield from pretokenize(text, pattern)
        return
    start = 0
    for pretoken in pretokenize(text.translate(_substitutes(tables)), pattern):
        yield text[start : start + len(pretoken)]
        start += len(pretoken)


@lru_cache(maxsize=4)
def _substitutes(tables: str) -> dict[int, str]:
    """Return a character of the class in ``tables`` for each code point that the installed ``regex`` has in another."""
    classes = unpack_tables(tables)
    different = np.flatnonzero(classes != unpack_tables(installed_tables()))
    classes_by_code = zip(different.tolist(), classes[different].tolist(), strict=True)
    return {code: _CLASSES[character_class][2] for code, character_class in classes_by_code}


@cache
def warn_of_other_tables(tables: str, pattern: Pattern) -> None:
    """Log, once in a process, that ``tables`` of a tokenizer are not those of the installed ``regex``, if so.

    Recent releases of ``regex`` differ from published tokenizers. This is a warning only if it changes ids.
    """
    if tables == installed_tables():
        return
    is_usual = tables == PUBLISHED_TABLES and has_compiled_scanner(pattern)
    log.log(
        logging.INFO if is_usual else logging.WARNING,
        "The tokenizer was made or published with other character tables than those of the installed regex %s, which "
        "differ in %s characters. %s",
        metadata.version("regex"),
        f"{len(_substitutes(tables)):,}",
        "It splits text by its own tables."
        if has_compiled_scanner(pattern)
        else "Its pattern has no compiled scanner, so text with these characters may be split otherwise. To split as "
        "before, install the version of regex with which it was made.",
    )
