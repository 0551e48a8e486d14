"""Counts of a document for the rules of curation, in one pass over its lines: words, lines, repetitions, sentences.

The reference is ``count_document`` in ``tests/helpers/document_counts.py``.
"""

from typing import NamedTuple

import numpy as np

from lm.kernels.bpe.scanners.bit_masks import character_at
from lm.kernels.curation.columns import COLUMNS, Column
from lm.kernels.curation.item_table import MIN_SLOTS, ItemTable, find_or_add, key_of
from lm.kernels.curation.line_ends import content_end, count_characters, find_line_end, has_end_mark
from lm.kernels.curation.phrases import has_phrase
from lm.kernels.curation.repeated_grams import GramWorkspace, count_grams
from lm.kernels.curation.text_classes import LETTER, STARTS_WORD, TERMINAL, WHITESPACE
from lm.kernels.curation.word_scan import FULL_STOP, contraction_start, is_title_before_stop, scan_word
from lm.kernels.jit import Bytes, Int, Int64s, Word, helper, inlined, kernel
from lm.kernels.simd import bit_count, read, write

NUM_COLUMNS, NUM_USED = len(COLUMNS), 6
_HASH, _HYPHEN, _ELLIPSIS, _BULLET, _CURLY_BRACKET = 0x23, 0x2D, 0x2026, 0x2022, 0x7B
_LONGEST_STOP_WORD = 4
_THE, _BE, _TO, _OF, _AND, _THAT, _HAVE, _WITH = (
    np.uint64(int.from_bytes(word, "little")) for word in b"the be to of and that have with".split()
)
LOREM_IPSUM, JAVASCRIPT, FIRST_POLICY = 0, 1, 2  # places in the phrases


class LineLimits(NamedTuple):
    """The limits of lines, of FineWeb and C4."""

    max_short_line_characters: int
    min_words: int
    max_word_characters: int
    needs_end_mark: bool


class TextTables(NamedTuple):
    """What all documents are read with."""

    classes: Bytes  # (0x110000,), see :mod:`lm.kernels.curation.text_classes`
    phrases: Bytes
    phrase_ends: Int64s
    seed: np.uint64


class CountWorkspace(NamedTuple):
    """Scratch arrays for one document at a time."""

    words: ItemTable
    lines: ItemTable
    paragraphs: ItemTable
    grams: GramWorkspace
    used: Int64s  # (NUM_USED,), see the names below


# Of a document so far: entries of ``grams.words`` and the end of the last one in the text; different words, lines and
# paragraphs; stop words as bits.
_ENTRIES, _LAST_END, _WORDS, _LINES, _PARAGRAPHS, _STOP_WORDS = range(NUM_USED)


@inlined
def _add(counts: Int64s, at: Int, number: Int) -> None:
    write(counts, at, read(counts, at) + number)


@inlined
def _stop_word_bit(key: Word) -> Int:
    """Return the bit of a stop word; 0 for another word of at most 8 bytes."""
    bit = (key == _THE) | (key == _BE) << 1 | (key == _TO) << 2 | (key == _OF) << 3
    return bit | (key == _AND) << 4 | (key == _THAT) << 5 | (key == _HAVE) << 6 | (key == _WITH) << 7


@helper
def _add_token(
    data: Bytes, begin: Int, end: Int, characters: Int, work: CountWorkspace, mask: Int, stamp: Int, seed: Word
) -> None:
    """Append a token to the words whose n-grams are counted."""
    used, grams = work.used, work.grams
    entry, word = read(used, _ENTRIES), read(used, _WORDS)
    key = key_of(data, begin, end, seed)
    is_new = True
    if entry < len(grams.words):
        found = find_or_add(data, work.words, mask, stamp, seed, key, begin, end, word)
        is_new = found == word
        if is_new:
            write(used, _WORDS, word + 1)
            write(grams.word_counts, found, np.int32(0))
            write(grams.word_lengths, found, np.int32(characters))
        write(grams.word_counts, found, np.int32(read(grams.word_counts, found) + 1))
        write(grams.words, entry, np.int32(found))
        write(used, _ENTRIES, entry + 1)
        write(used, _LAST_END, end)
    if is_new and end - begin <= _LONGEST_STOP_WORD:
        write(used, _STOP_WORDS, read(used, _STOP_WORDS) | _stop_word_bit(key))


@helper
def _count_line(
    data: Bytes,
    begin: Int,
    end: Int,
    tables: TextTables,
    limits: LineLimits,
    work: CountWorkspace,
    mask: Int,
    stamp: Int,
    phrases: Int,
    counts: Int64s,
    base: Int,
) -> bool:
    """Add the counts of a line that do not depend on other lines. Returns whether the line is not blank.

    ``phrases``: bit k is set if the document has phrases of kind k, so that the line may have them.
    """
    classes, seed = tables.classes, tables.seed
    content = content_end(data, begin, end, classes)
    tokens = words = word_characters = alphabetic = sentences = np.int64(0)
    first_point: Int = np.int64(0)
    last_class = np.int64(0)  # of the last character that is not white space
    is_ellipsis_last = is_after_sentence = has_bracket = False
    # Of C4, words are what white space separates.
    gap_words = word_tails = np.int64(0)
    longest_word: Int = np.int64(0)
    word_begin: Int = np.int64(-1)
    position = begin
    while position < end:
        point: Int = np.int64(read(data, position))
        length: Int = np.int64(1)
        if point >= 0x80:
            point, length = character_at(data, position, end)
            length = max(length, np.int64(1))
        character_class = np.int64(read(classes, point))
        if character_class & WHITESPACE:
            if word_begin >= 0:
                longest_word = max(longest_word, position - word_begin - word_tails)
                word_begin = np.int64(-1)
            position += length
            continue
        if word_begin < 0:
            word_begin, word_tails = position, np.int64(0)
            gap_words += 1
        if tokens == 0:
            first_point = point
            sentences += position < content
        token = position
        is_ellipsis_last = False
        if character_class & STARTS_WORD:
            position, tails, letters, join, letters_before_join = scan_word(data, token, end, classes)
            last_class = character_class & LETTER
            split = contraction_start(data, token, join, position)
            if split < position:
                letters_before = letters_before_join - (split < join)
                split_characters = 1 + (split < join) + position - join - (3 if read(data, join) == 0xE2 else 1)
                characters = position - token - tails - split_characters
                _add_token(data, token, split, characters, work, mask, stamp, seed)
                _add_token(data, split, position, split_characters, work, mask, stamp, seed)
                alphabetic += np.int64(letters_before > 0) + 1
                words += 2
                tokens += 2
                word_characters += position - token - tails
            else:
                if is_title_before_stop(data, token, position, end):
                    position += 1
                    last_class = np.int64(TERMINAL)
                characters = position - token - tails
                _add_token(data, token, position, characters, work, mask, stamp, seed)
                alphabetic += letters > 0
                words += 1
                tokens += 1
                word_characters += characters
            word_tails += tails
            if is_after_sentence:
                sentences += token < content
                is_after_sentence = False
            continue
        position += length
        if point in (FULL_STOP, _HYPHEN):
            while position < end and read(data, position) == point:
                position += 1
        size = position - token
        if point == FULL_STOP and size >= 3:
            is_ellipsis_last = True
            _add(counts, base + Column.ELLIPSES, size // 3)
        elif point == _ELLIPSIS:
            is_ellipsis_last = True
            _add(counts, base + Column.ELLIPSES, 1)
        elif point == _HASH:
            _add(counts, base + Column.HASHES, 1)
        has_bracket |= point == _CURLY_BRACKET
        is_after_sentence |= character_class & TERMINAL != 0 and size == length
        last_class = character_class
        word_tails += length - 1
        tokens += 1
        _add_token(data, token, position, size - length + 1, work, mask, stamp, seed)
    if tokens == 0:
        return False
    if word_begin >= 0:
        longest_word = max(longest_word, end - word_begin - word_tails)
    _add(counts, base + Column.TOKENS, tokens)
    _add(counts, base + Column.WORDS, words)
    _add(counts, base + Column.WORD_CHARACTERS, word_characters)
    _add(counts, base + Column.ALPHABETIC_WORDS, alphabetic)
    _add(counts, base + Column.BULLET_LINES, first_point in (_HYPHEN, _BULLET))
    _add(counts, base + Column.ELLIPSIS_LINES, is_ellipsis_last)
    _add(counts, base + Column.PUNCTUATED_LINES, last_class & TERMINAL != 0)
    if longest_word > limits.max_word_characters:
        _add(counts, base + Column.C4_LONG_WORD_LINES, 1)
    elif limits.needs_end_mark and not has_end_mark(data, begin, content):
        _add(counts, base + Column.C4_UNFINISHED_LINES, 1)
    elif gap_words < limits.min_words:
        _add(counts, base + Column.C4_FEW_WORD_LINES, 1)
    else:
        _count_c4_line(data, begin, content, tables, phrases, has_bracket, sentences, counts, base)
    return True


@inlined
def _has_phrase(data: Bytes, begin: Int, end: Int, tables: TextTables, kind: int) -> bool:
    first = kind
    stop = len(tables.phrase_ends) if kind == FIRST_POLICY else kind + 1
    return has_phrase(data, begin, end, tables.phrases, tables.phrase_ends, first, stop)


@helper
def _count_c4_line(
    data: Bytes,
    begin: Int,
    end: Int,
    tables: TextTables,
    phrases: Int,
    has_bracket: bool,
    sentences: Int,
    counts: Int64s,
    base: Int,
) -> None:
    """Count a line of complete sentences by what C4 looks for in it."""
    if phrases & 1 << LOREM_IPSUM and _has_phrase(data, begin, end, tables, LOREM_IPSUM):
        _add(counts, base + Column.C4_LOREM_IPSUM_LINES, 1)
    if phrases & 1 << JAVASCRIPT and _has_phrase(data, begin, end, tables, JAVASCRIPT):
        _add(counts, base + Column.C4_JAVASCRIPT_LINES, 1)
        return
    _add(counts, base + Column.C4_CURLY_BRACKET_LINES, has_bracket)
    if phrases & 1 << FIRST_POLICY and _has_phrase(data, begin, end, tables, FIRST_POLICY):
        _add(counts, base + Column.C4_POLICY_LINES, 1)
        return
    _add(counts, base + Column.C4_SENTENCES, sentences)


@inlined
def _is_repeated(
    data: Bytes,
    table: ItemTable,
    used: Int64s,
    kind: int,
    mask: Int,
    stamp: Int,
    seed: Word,
    begin: Int,
    end: Int,
) -> bool:
    """Return whether a line or a paragraph equals an earlier one of the document."""
    count = read(used, kind)
    if count == len(table.keys):
        return False
    if find_or_add(data, table, mask, stamp, seed, key_of(data, begin, end, seed), begin, end, count) < count:
        return True
    write(used, kind, count + 1)
    return False


@helper
def _count_paragraph(
    data: Bytes,
    begin: Int,
    end: Int,
    characters: Int,
    work: CountWorkspace,
    mask: Int,
    stamp: Int,
    seed: Word,
    counts: Int64s,
    base: Int,
) -> None:
    """Add the counts of a paragraph, which may have no line."""
    if characters <= 0:
        return
    _add(counts, base + Column.PARAGRAPHS, 1)
    if _is_repeated(data, work.paragraphs, work.used, _PARAGRAPHS, mask, stamp, seed, begin, end):
        _add(counts, base + Column.DUPLICATE_PARAGRAPHS, 1)
        _add(counts, base + Column.DUPLICATE_PARAGRAPH_CHARACTERS, characters)


@helper
def _count_document(
    data: Bytes,
    begin: Int,
    end: Int,
    tables: TextTables,
    limits: LineLimits,
    work: CountWorkspace,
    stamp: Int,
    counts: Int64s,
    base: Int,
) -> None:
    """Write the counts of a document to its row of ``counts``, which begins at ``base``."""
    seed, used = tables.seed, work.used
    for k in range(len(used)):
        write(used, k, np.int64(0))
    mask = np.int64(MIN_SLOTS)  # above the number of different tokens: at most 128 have one byte, the others more
    while mask <= 128 + (end - begin) // 2 and 2 * mask <= len(work.words.slots):
        mask += mask
    mask -= 1
    phrases = np.int64(0)
    for kind in range(FIRST_POLICY + 1):
        phrases |= np.int64(_has_phrase(data, begin, end, tables, kind)) << kind
    characters = np.int64(0)
    paragraph, paragraph_characters = begin, np.int64(0)  # the lines since the last blank one
    position = begin
    while position < end:
        line_end = find_line_end(data, position, end)
        is_filled = _count_line(data, position, line_end, tables, limits, work, mask, stamp, phrases, counts, base)
        line_characters = count_characters(data, position, line_end)
        characters += line_characters
        _add(counts, base + Column.LINES, 1)
        _add(counts, base + Column.LINE_FEEDS, line_end < end)
        if is_filled:
            _add(counts, base + Column.FILLED_LINES, 1)
            _add(counts, base + Column.SHORT_LINES, line_characters <= limits.max_short_line_characters)
            if _is_repeated(data, work.lines, used, _LINES, mask, stamp, seed, position, line_end):
                _add(counts, base + Column.DUPLICATE_LINES, 1)
                _add(counts, base + Column.DUPLICATE_LINE_CHARACTERS, line_characters)
            paragraph_characters += line_characters + 1
        else:
            _count_paragraph(
                data, paragraph, position - 1, paragraph_characters - 1, work, mask, stamp, seed, counts, base
            )
            paragraph, paragraph_characters = line_end + 1, np.int64(0)
        position = line_end + 1
    last = end - 1 if read(counts, base + Column.LINES) == read(counts, base + Column.LINE_FEEDS) else end
    _count_paragraph(data, paragraph, last, paragraph_characters - 1, work, mask, stamp, seed, counts, base)
    characters += read(counts, base + Column.LINE_FEEDS)
    write(counts, base + Column.CHARACTERS, characters)
    write(counts, base + Column.STOP_WORDS, bit_count(np.uint64(read(used, _STOP_WORDS))))
    entries = read(used, _ENTRIES)
    if entries == len(work.grams.words) and entries < read(counts, base + Column.TOKENS):
        characters = count_characters(data, begin, read(used, _LAST_END))
    write(counts, base + Column.GRAM_CHARACTERS, characters)
    count_grams(work.grams, entries, seed, counts, base + Column.TOP_2_GRAM_CHARACTERS)


@kernel
def count_documents(
    data: Bytes, offsets: Int64s, tables: TextTables, limits: LineLimits, work: CountWorkspace, counts: Int64s
) -> None:
    """Add the counts of D documents to ``counts`` (D × NUM_COLUMNS,), which are zeros.

    ``data`` is valid UTF-8 with 64 bytes of padding, ``offsets`` (D + 1,).
    """
    for row in range(len(offsets) - 1):
        begin, end = read(offsets, row), read(offsets, row + 1)
        _count_document(data, begin, end, tables, limits, work, row + 1, counts, row * NUM_COLUMNS)
