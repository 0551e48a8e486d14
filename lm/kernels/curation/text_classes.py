"""The classes of characters that the figures of documents distinguish, as bits. Imports no numba."""

LETTER, NUMBER, MARK, WHITESPACE = 1, 2, 4, 8
TERMINAL = 16  # punctuation that ends a sentence: Sentence_Terminal in Unicode
STARTS_WORD, WORD = LETTER | NUMBER, LETTER | NUMBER | MARK
