"""BPE training from pretoken counts.

Source: CS336 assignment 1 (sections 2.4 and 2.5); Sennrich et al. 2016.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm.common.errors import UserError
from lm.kernels.bpe.learn import grow_pair_table, learn_merges, make_corpus, start_training
from lm.kernels.bpe.training_state import Corpus
from lm.kernels.jit import log_compilation
from lm.kernels.status import TABLE_FULL
from lm.text.pretokenize import GPT2_PATTERN, check_special_tokens
from lm.tokenizer.config import check_vocab_size
from lm.tokenizer.pretoken_counts import count_files, counts_to_arrays

log = logging.getLogger(__name__)

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]

_MERGES_PER_PROGRESS = 256


def train_bpe(
    input_path: str | Path,
    vocab_size: int,
    special_tokens: list[str],
    pattern: str = GPT2_PATTERN,
    min_frequency: int = 1,
    threads: int | None = None,
) -> tuple[Vocab, Merges]:
    """Train a byte-level BPE tokenizer on a UTF-8 text file, plain or compressed.

    Returns (vocab, merges). Ids 0–255 are the bytes; the special tokens follow, then the merges in the order learned.
    The most frequent pair wins; ties go to the lexicographically greater pair of byte strings. Training stops early,
    with a warning, when no pair occurs ``min_frequency`` times. ``threads`` (default: one per CPU core) does not affect
    the result. Raises UserError for invalid arguments or an unreadable file.
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
    """Train on a table of counts (columns ``pretoken`` and ``count``); see :func:`train_bpe`.

    Calls ``progress`` with the number of merges learned, every 256 merges. Needs about 22 bytes of memory for each byte
    of the different pretokens.
    """
    check_vocab_size(vocab_size, special_tokens)
    if min_frequency < 1:
        raise UserError(f"min_frequency {min_frequency} is too small; it must be at least 1.")
    tokens = [bytes([byte]) for byte in range(256)] + [special.encode() for special in special_tokens]
    max_merges = vocab_size - len(tokens)
    with log_compilation("BPE training"):
        corpus, length = _make_corpus(counts)
        del counts  # frees the memory of the pretokens for their pairs
        pa.default_memory_pool().release_unused()
        pairs = _learn_merges(corpus, length, len(tokens), max_merges, min_frequency, progress)
    merges: Merges = []
    for left, right in pairs.tolist():
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    if len(merges) < max_merges:
        log.warning(
            "The corpus gives %d tokens, fewer than the vocab_size of %d: no pair %s.",
            len(tokens),
            vocab_size,
            "is left to merge" if min_frequency == 1 else f"occurs {min_frequency} times",
        )
    return dict(enumerate(tokens)), merges


def _make_corpus(counts: pa.Table) -> tuple[Corpus, int]:
    """Return the concatenated pretokens and their length."""
    words, ends, frequencies = counts_to_arrays(counts)
    if len(words) + len(ends) + 2 > np.iinfo(np.int32).max // 3:
        raise UserError(
            f"The different pretokens have {len(words):,} bytes, too many to learn merges from; train on less text."
        )
    return make_corpus(words, ends, frequencies)


def _learn_merges(
    corpus: Corpus, length: int, first_id: int, max_merges: int, min_frequency: int, progress: Callable[[int], None]
) -> npt.NDArray[np.int32]:
    """Return the merges as pairs of ids, (merges, 2). The first merge has the id ``first_id``."""
    training = start_training(corpus, length, first_id, max_merges, min_frequency)
    merges = np.empty((max_merges, 2), np.int32)
    done = 0
    while done < max_merges:
        limit = min(max_merges, done + _MERGES_PER_PROGRESS)
        done, status = learn_merges(training, merges, done, limit, min_frequency)
        if status == TABLE_FULL:
            training = grow_pair_table(training)
            continue
        progress(done)
        if done < limit:
            break
    return merges[:done]
