"""BPE training: the merges of a tokenizer from pretoken counts.

Source: CS336 assignment 1 (section 2.4 and 2.5); Sennrich et al. 2016.
"""

import heapq
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lm.bounds import FORM, bounded, check_bounds
from lm.corpus import open_text
from lm.counts import count_pretokens
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN, check_special_tokens, compile_pattern

log = logging.getLogger(__name__)

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class TokenizerConfig:
    """What the tokenizer is trained to be."""

    __pydantic_config__ = FORM

    vocab_size: int = bounded(10_000, ge=256)
    """Number of token ids: 256 bytes, the special tokens and the merges."""
    special_tokens: list[str] = field(default_factory=lambda: [END_OF_TEXT])
    """Texts that are one token each and end a pretoken; the separator of the documents must be among them."""
    pattern: str = GPT2_PATTERN
    """Regular expression (the regex module's) whose matches are the pretokens. Default: GPT-2's."""

    def __post_init__(self) -> None:
        check_bounds(self, "tokenizer")
        check_special_tokens(self.special_tokens)
        check_vocab_size(self.vocab_size, self.special_tokens)
        compile_pattern(self.pattern)


def check_vocab_size(vocab_size: int, special_tokens: Sequence[str]) -> None:
    """Raise UserError when ``vocab_size`` has no room for the bytes and the special tokens."""
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens need {least}."
        )


def train_bpe(
    input_path: str | Path, vocab_size: int, special_tokens: list[str], pattern: str = GPT2_PATTERN
) -> tuple[Vocab, Merges]:
    """Train a byte-level BPE tokenizer on a UTF-8 text file, plain or compressed.

    Returns (vocab, merges): ids 0–255 are the bytes, then the special tokens, then the merges in the order they were
    learned. The most frequent pair wins; ties go to the lexicographically greater pair of byte strings. Training stops
    early, with a warning, when no pair is left. Raises UserError for bad arguments or an unreadable file.
    """
    check_special_tokens(special_tokens)
    check_vocab_size(vocab_size, special_tokens)
    with open_text(str(input_path)) as blocks:
        counts = count_pretokens(blocks, special_tokens, pattern)
    pairs = ((pretoken.encode(), count) for pretoken, count in counts.items())
    return train_merges(pairs, vocab_size, special_tokens)


def train_merges(
    counts: Iterable[tuple[bytes, int]],
    vocab_size: int,
    special_tokens: Sequence[str],
    progress: Callable[[int], None] = lambda merges: None,
) -> tuple[Vocab, Merges]:
    """Train from (pretoken, count) pairs; see :func:`train_bpe`. ``progress`` is told the number of merges so far.

    The pair counts are kept up to date merge by merge: for each pair the words it stands in are known, so a merge
    touches only those. A heap with lazy deletion gives the next pair.
    """
    check_vocab_size(vocab_size, special_tokens)
    tokens = [bytes([byte]) for byte in range(256)] + [special.encode() for special in special_tokens]
    words: list[list[int]] = []
    frequencies: list[int] = []
    pair_counts: Counter[tuple[int, int]] = Counter()
    words_with: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for pretoken, count in counts:
        if len(pretoken) > 1:
            word = list(pretoken)
            for pair in zip(word, word[1:], strict=False):
                pair_counts[pair] += count
                words_with[pair].add(len(words))
            words.append(word)
            frequencies.append(count)

    queue = [_Candidate(count, tokens, pair) for pair, count in pair_counts.items()]
    heapq.heapify(queue)
    merges: Merges = []
    while len(tokens) < vocab_size and queue:
        best = heapq.heappop(queue)
        pair = best.pair
        if best.count != pair_counts[pair]:
            continue  # the count has changed since; a newer candidate is in the queue
        left, right = pair
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
        changes: Counter[tuple[int, int]] = Counter()
        for index in words_with.pop(pair):
            old = words[index]
            new = words[index] = _merge_pair(old, pair, len(tokens) - 1)
            for before in zip(old, old[1:], strict=False):
                changes[before] -= frequencies[index]
            for after in zip(new, new[1:], strict=False):
                changes[after] += frequencies[index]
                words_with[after].add(index)
        for changed, change in changes.items():
            if change:
                pair_counts[changed] += change
                if pair_counts[changed] > 0 and changed != pair:
                    heapq.heappush(queue, _Candidate(pair_counts[changed], tokens, changed))
                elif pair_counts[changed] <= 0:
                    del pair_counts[changed]
        progress(len(merges))
    if len(tokens) < vocab_size:
        log.warning(
            "The corpus gives %d tokens, fewer than the vocab_size of %d: no pair is left to merge.",
            len(tokens),
            vocab_size,
        )
    return dict(enumerate(tokens)), merges


class _Candidate:
    """A pair with its count; orders a heap so that the greatest count, then the greater pair of bytes, comes first."""

    __slots__ = ("count", "key", "pair")

    def __init__(self, count: int, tokens: list[bytes], pair: tuple[int, int]) -> None:
        self.count = count
        self.pair = pair
        self.key = (tokens[pair[0]], tokens[pair[1]])

    def __lt__(self, other: "_Candidate") -> bool:
        return self.count > other.count if self.count != other.count else self.key > other.key


def _merge_pair(word: list[int], pair: tuple[int, int], merged: int) -> list[int]:
    out: list[int] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and word[i] == pair[0] and word[i + 1] == pair[1]:
            out.append(merged)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out
