"""The classes of characters that the pretoken patterns distinguish. Imports no numba, so that tables load fast."""

LETTER, DIGIT, WHITESPACE, OTHER = 0, 1, 2, 3
LOWER, UPPER, UNCASED, MARK = LETTER, 4, 5, 6  # with case: small letters, capitals, letters without case, marks
CONTROL = 7  # for DeepSeek: what is no letter, digit, whitespace, punctuation or symbol
CJK = 8  # added to the class of a Chinese or Japanese character
