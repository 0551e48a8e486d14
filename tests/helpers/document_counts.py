"""The counts of a document for the rules of curation, in plain Python: the reference of the kernels."""

import re
from collections import Counter

from lm.curate.counts import text_classes
from lm.kernels.curation.columns import COLUMNS
from lm.kernels.curation.document_counts import LineLimits
from lm.kernels.curation.text_classes import LETTER, MARK, NUMBER, TERMINAL, WHITESPACE

TITLES = ("Mr", "Mrs", "Ms", "Dr")
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
CITATIONS = r"(?:\[\d*\]|\[edit\]|\[citation needed\])"
ASCII_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


def has_class(character: str, flags: int) -> bool:
    return bool(text_classes()[ord(character)] & flags)


def is_space(character: str) -> bool:
    return has_class(character, WHITESPACE)


def starts_word(text: str, i: int) -> bool:
    return i < len(text) and has_class(text[i], LETTER | NUMBER)


def joins_numbers(text: str, i: int) -> bool:
    return i + 1 < len(text) and has_class(text[i - 1], NUMBER) and has_class(text[i + 1], NUMBER)


def word_end(text: str, start: int) -> int:
    i = start + 1
    while i < len(text):
        if has_class(text[i], LETTER | NUMBER | MARK):
            i += 1
        elif (text[i] in "'’._" and starts_word(text, i + 1)) or (text[i] in ",:" and joins_numbers(text, i)):
            i += 2
        else:
            break
    return i


def split_contraction(word: str) -> list[str]:
    match = re.search(r"(?i:(?<=.)n['’]t|(?<=.)['’](?:s|m|d|ll|re|ve))\Z", word, re.ASCII | re.DOTALL)
    return [word[: match.start()], match.group()] if match else [word]


def tokens(text: str) -> list[str]:
    found, i = [], 0
    while i < len(text):
        end = i + 1
        if is_space(text[i]):
            i += 1
            continue
        if starts_word(text, i):
            end = word_end(text, i)
            if text[i:end] in TITLES and text[end : end + 1] == "." and text[end + 1 : end + 2] != ".":
                end += 1
            found += split_contraction(text[i:end])
        else:
            while text[i] in ".-" and text[end : end + 1] == text[i]:
                end += 1
            found.append(text[i:end])
        i = end
    return found


def is_word(token: str) -> bool:
    return starts_word(token, 0) or (token[0] in "'’" and len(token) > 1)


def strip(text: str) -> str:
    while text and is_space(text[0]):
        text = text[1:]
    while text and is_space(text[-1]):
        text = text[:-1]
    return text


def split_at_space(text: str) -> list[str]:
    return "".join(" " if is_space(character) else character for character in text).split(" ")


def duplicates(items: list[str]) -> tuple[int, int]:
    """Return the number of items that an earlier one equals, and their characters."""
    repeated = [item for i, item in enumerate(items) if item in set(items[:i])]
    return len(repeated), sum(map(len, repeated))


def top_gram_characters(words: list[str], n: int) -> int:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not grams:
        return 0
    gram, count = Counter(grams).most_common(1)[0]  # of equal counts, the first in the text
    return count * len(" ".join(gram))


def duplicate_gram_characters(words: list[str], n: int) -> int:
    seen, characters, i = set(), 0, 0
    while i + n <= len(words):
        gram = tuple(words[i : i + n])
        if gram in seen:
            characters += len("".join(gram))
            i += n
        else:
            seen.add(gram)
            i += 1
    return characters


def paragraphs(lines: list[str]) -> list[str]:
    """Return the runs of lines that are not blank."""
    found: list[list[str]] = [[]]
    for line in lines:
        if strip(line):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(run) for run in found if run]


def sentences(line: str) -> int:
    found, is_after_end = tokens(line), False
    count = int(bool(found))
    for token in found:
        if is_word(token):
            count += is_after_end
            is_after_end = False
        elif len(token) == 1 and has_class(token, TERMINAL):
            is_after_end = True
    return count


def count_c4(counts: Counter[str], lines: list[str], limits: LineLimits) -> None:
    for line in map(strip, lines):
        words = [word for word in split_at_space(line) if word]
        if any(len(word) > limits.max_word_characters for word in words):
            counts["c4_long_word_lines"] += 1
            continue
        while match := re.search(CITATIONS + r"\Z", line, re.ASCII):
            line = strip(line[: match.start()])
        if limits.needs_end_mark and (not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...")):
            counts["c4_unfinished_lines"] += 1
            continue
        if len(words) < limits.min_words:
            counts["c4_few_word_lines"] += 1
            continue
        lower = line.translate(ASCII_LOWER)
        if "lorem ipsum" in lower:
            counts["c4_lorem_ipsum_lines"] += 1
        if "javascript" in lower:
            counts["c4_javascript_lines"] += 1
            continue
        if "{" in line:
            counts["c4_curly_bracket_lines"] += 1
        if any(phrase in lower for phrase in POLICIES):
            counts["c4_policy_lines"] += 1
            continue
        counts["c4_sentences"] += sentences(line)


def count_document(text: str, limits: LineLimits) -> dict[str, int]:
    """Return the counts of a document by the name of the column."""
    counts = Counter(dict.fromkeys(COLUMNS, 0))
    lines = text.removesuffix("\n").split("\n") if text else []
    filled = [line for line in lines if strip(line)]
    found = tokens(text)
    words = [token for token in found if is_word(token)]
    counts["characters"] = counts["gram_characters"] = len(text)
    counts["tokens"], counts["words"] = len(found), len(words)
    counts["word_characters"] = sum(map(len, words))
    counts["alphabetic_words"] = sum(any(has_class(c, LETTER) for c in word) for word in words)
    counts["stop_words"] = len(STOP_WORDS & set(found))
    counts["hashes"] = text.count("#")
    counts["ellipses"] = text.count("...") + text.count("…")
    counts["lines"], counts["filled_lines"], counts["line_feeds"] = len(lines), len(filled), text.count("\n")
    counts["bullet_lines"] = sum(strip(line).startswith(("•", "-")) for line in lines)
    counts["ellipsis_lines"] = sum(strip(line).endswith(("...", "…")) for line in lines)
    counts["punctuated_lines"] = sum(has_class(strip(line)[-1], TERMINAL) for line in filled)
    counts["short_lines"] = sum(len(line) <= limits.max_short_line_characters for line in filled)
    counts["duplicate_lines"], counts["duplicate_line_characters"] = duplicates(filled)
    parts = paragraphs(lines)
    counts["paragraphs"] = len(parts)
    counts["duplicate_paragraphs"], counts["duplicate_paragraph_characters"] = duplicates(parts)
    for n in (2, 3, 4):
        counts[f"top_{n}_gram_characters"] = top_gram_characters(found, n)
    for n in range(5, 11):
        counts[f"duplicate_{n}_gram_characters"] = duplicate_gram_characters(found, n)
    count_c4(counts, filled, limits)
    return dict(counts)
