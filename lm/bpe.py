"""BPE training: the merges of a tokenizer from pretoken counts.

Source: CS336 assignment 1 (section 2.4 and 2.5); Sennrich et al. 2016.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm.bounds import FORM, bounded, check_bounds
from lm.counts import columns_of, count_files
from lm.errors import UserError
from lm.kernels import compiling, merge
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN, check_special_tokens, compile_pattern

log = logging.getLogger(__name__)

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]

_REPORTED = 256  # merges between two calls of ``progress``


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
    min_frequency: int = bounded(1, ge=1)
    """Times that a pair must occur to be merged: more gives a smaller vocabulary where the text is small."""

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
    input_path: str | Path,
    vocab_size: int,
    special_tokens: list[str],
    pattern: str = GPT2_PATTERN,
    min_frequency: int = 1,
    threads: int | None = None,
) -> tuple[Vocab, Merges]:
    """Train a byte-level BPE tokenizer on a UTF-8 text file, plain or compressed.

    Returns (vocab, merges): ids 0–255 are the bytes, then the special tokens, then the merges in the order they were
    learned. The most frequent pair wins; ties go to the lexicographically greater pair of byte strings. Training stops
    early, with a warning, when no pair occurs ``min_frequency`` times. ``threads``: one a core where it is None; the
    result does not depend on it. Raises UserError for bad arguments or an unreadable file.
    """
    check_special_tokens(special_tokens)
    check_vocab_size(vocab_size, special_tokens)
    counts = count_files([str(input_path)], special_tokens, pattern, threads)
    return train_merges(counts, vocab_size, special_tokens, min_frequency)


def train_merges(
    counts: pa.Table,
    vocab_size: int,
    special_tokens: Sequence[str],
    min_frequency: int = 1,
    progress: Callable[[int], None] = lambda merges: None,
) -> tuple[Vocab, Merges]:
    """Train from a table of counts (columns ``pretoken`` and ``count``); see :func:`train_bpe`. ``progress`` is told
    the number of merges so far, now and then. Takes some 22 bytes of memory for each byte of the different pretokens.
    """
    check_vocab_size(vocab_size, special_tokens)
    if min_frequency < 1:
        raise UserError(f"min_frequency {min_frequency} is too small: a pair that is merged occurs at least once.")
    tokens = [bytes([byte]) for byte in range(256)] + [special.encode() for special in special_tokens]
    wanted = vocab_size - len(tokens)
    with compiling("merging"):
        corpus, length = _lay_out(counts)
        del counts  # the memory of millions of pretokens is wanted for their pairs
        pa.default_memory_pool().release_unused()
        merges = _learn(corpus, length, len(tokens), wanted, min_frequency, progress)
    learned: Merges = []
    for left, right in merges.tolist():
        learned.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    if len(learned) < wanted:
        log.warning(
            "The corpus gives %d tokens, fewer than the vocab_size of %d: no pair %s.",
            len(tokens),
            vocab_size,
            "is left to merge" if min_frequency == 1 else f"occurs {min_frequency} times",
        )
    return dict(enumerate(tokens)), learned


def _lay_out(counts: pa.Table) -> tuple[merge.Corpus, int]:
    """The pretokens one after another, and how long that is."""
    words, ends, frequencies = columns_of(counts)
    length = len(words) + len(ends) + 2
    if length > np.iinfo(np.int32).max // 3:
        raise UserError(
            f"The different pretokens have {len(words):,} bytes, more than merges can be learned from: "
            "leave the rarest out, or train on less text."
        )
    large = np.empty(np.count_nonzero(frequencies > merge.MOST), np.int64)
    corpus = merge.Corpus(np.empty(length, np.uint8), np.empty(length, np.int32), np.empty(length, np.int32), large)
    return corpus, merge.lay_out(words, ends, frequencies, corpus)


def _learn(
    corpus: merge.Corpus,
    length: int,
    first_id: int,
    wanted: int,
    min_frequency: int,
    progress: Callable[[int], None],
) -> npt.NDArray[np.int32]:
    """The merges as pairs of ids (merges, 2), ``first_id`` being the first merge's."""
    size = first_id + wanted + 1
    tokens = merge.Tokens(
        np.ones(size, np.int32),
        np.zeros(size, np.int32),
        np.zeros(size, np.uint64),
        np.zeros((2, size), np.int64),
        np.zeros((2, size), np.int32),
        np.zeros((2, size), np.int64),
        np.zeros((4, size), np.int32),
    )
    tokens.first[:256] = np.arange(256, dtype=np.uint64) << np.uint64(56)
    most = 3 * length + 1  # each merge leaves one token less and makes two pairs at most; memory is taken as it is used
    pairs = merge.Pairs(
        np.empty((most, 2), np.int32),
        np.empty(most, np.int64),
        np.empty(most + 1, np.int64),
        np.empty(most, np.int32),
        np.empty((most, 2), np.int64),
        np.full(1 << 18, -1, np.int32),
    )
    used = np.array([first_id, 0, 0, 0], np.int64)
    merge.first_pairs(
        corpus, length, tokens, pairs, used, np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64), min_frequency
    )
    events, kinds = np.empty((2 * length, 3), np.int32), np.zeros(4, np.int64)
    merges = np.empty((wanted, 2), np.int32)
    done = 0
    while done < wanted:
        limit = min(wanted, done + _REPORTED)
        learned = merge.learn(corpus, tokens, pairs, used, events, kinds, merges, done, limit, min_frequency)
        if learned < 0:
            done = -1 - learned
            pairs = pairs._replace(table=np.full(2 * len(pairs.table), -1, np.int32))
            merge.rebuild_table(pairs, used)
            continue
        progress(learned)
        done = learned
        if done < limit:
            break
    return merges[:done]
