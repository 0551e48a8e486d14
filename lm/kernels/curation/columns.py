"""The columns of the counts of a document."""

from enum import IntEnum


class Column(IntEnum):
    """What is counted of a document. Characters are code points."""

    CHARACTERS = 0
    TOKENS = 1  # words and symbols, see :mod:`lm.kernels.curation.word_scan`
    WORDS = 2
    WORD_CHARACTERS = 3
    ALPHABETIC_WORDS = 4  # with a letter
    STOP_WORDS = 5  # different ones
    HASHES = 6
    ELLIPSES = 7
    LINES = 8
    FILLED_LINES = 9  # not blank
    LINE_FEEDS = 10
    BULLET_LINES = 11
    ELLIPSIS_LINES = 12
    PUNCTUATED_LINES = 13
    SHORT_LINES = 14
    DUPLICATE_LINES = 15  # equal to an earlier one, blank lines apart
    DUPLICATE_LINE_CHARACTERS = 16
    PARAGRAPHS = 17
    DUPLICATE_PARAGRAPHS = 18
    DUPLICATE_PARAGRAPH_CHARACTERS = 19
    GRAM_CHARACTERS = 20  # of the text whose n-grams are counted
    TOP_2_GRAM_CHARACTERS = 21  # the most frequent n-gram, counted as often as it occurs
    TOP_3_GRAM_CHARACTERS = 22
    TOP_4_GRAM_CHARACTERS = 23
    DUPLICATE_5_GRAM_CHARACTERS = 24
    DUPLICATE_6_GRAM_CHARACTERS = 25
    DUPLICATE_7_GRAM_CHARACTERS = 26
    DUPLICATE_8_GRAM_CHARACTERS = 27
    DUPLICATE_9_GRAM_CHARACTERS = 28
    DUPLICATE_10_GRAM_CHARACTERS = 29
    C4_LONG_WORD_LINES = 30  # C4 removes a line for the first of these reasons
    C4_UNFINISHED_LINES = 31
    C4_FEW_WORD_LINES = 32
    C4_LOREM_IPSUM_LINES = 33
    C4_JAVASCRIPT_LINES = 34
    C4_CURLY_BRACKET_LINES = 35
    C4_POLICY_LINES = 36
    C4_SENTENCES = 37  # of the lines that are left


COLUMNS = tuple(column.name.lower() for column in Column)
