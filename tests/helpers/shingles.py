"""Plain forms of the hashes of words and shingles, of signatures and of the similarity of documents."""

from lm.curate.normalized_words import normalize_words
from lm.kernels.curation.word_hashes import LENGTH_MULTIPLIER, MULTIPLIER, RUN_MULTIPLIER, SEED

MASK = (1 << 64) - 1


def fold(a: int, b: int) -> int:
    product = a * b
    return (product >> 64) ^ (product & MASK)


def hash_word(word: str) -> int:
    data, hashed = word.encode(), SEED
    for start in range(0, len(data), 8):
        hashed = fold(hashed ^ int.from_bytes(data[start : start + 8], "little"), MULTIPLIER)
    return fold(hashed ^ len(data), LENGTH_MULTIPLIER)


def hash_run(words: list[str]) -> int:
    hashed = 0
    for word in words:
        hashed = (hashed * RUN_MULTIPLIER + hash_word(word)) & MASK
    return hashed


def list_shingles(text: str, n: int) -> list[tuple[str, ...]]:
    words = normalize_words(text).split()
    if 0 < len(words) < n:
        return [tuple(words)]
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def jaccard(a: str, b: str, n: int) -> float:
    first, second = set(list_shingles(a, n)), set(list_shingles(b, n))
    return len(first & second) / len(first | second) if first and second else 0.0
