"""BPE training from pretoken counts.

Source: CS336 assignment 1 (sections 2.4 and 2.5); Sennrich et al. 2016.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lm.common.errors import UserError
from lm.kernels.bpe.corpus import ENTRIES_PER_PRETOKEN, MAX_ENTRIES, Corpus, add_pretokens, corpus_dtype, make_corpus
from lm.kernels.bpe.frequent_pairs import find_pairs, grow_pairs
from lm.kernels.bpe.learn import learn_merges, make_room_for_places
from lm.kernels.bpe.training_state import Training, make_training
from lm.kernels.jit import PLACES_FULL, TABLE_FULL, log_compilation
from lm.text.pretokenize import GPT2_PATTERN, check_special_tokens
from lm.tokenizer.config import check_vocab_size
from lm.tokenizer.pretoken_counts import count_files, counts_to_arrays

log = logging.getLogger(__name__)

Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]

_MAX_MERGES_PER_CALL = 256  # of the kernel; a signal is handled between two calls
_MAX_SECONDS_PER_CALL = 0.5
_SECONDS_BETWEEN_LOG_LINES = 30
_THRESHOLD_DIVISOR = 64  # of the mean number of pretokens per merge


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

    Calls ``progress`` with the number of merges learned, about once a second or more often. For the memory see
    :func:`training_memory_bytes`. Raises UserError for invalid arguments and for too many pretokens.
    """
    check_vocab_size(vocab_size, special_tokens)
    if min_frequency < 1:
        raise UserError(f"min_frequency {min_frequency} is too small; it must be at least 1.")
    tokens = [bytes([byte]) for byte in range(256)] + [special.encode() for special in special_tokens]
    max_merges = vocab_size - len(tokens)
    with log_compilation("BPE training"):
        corpus, length = _make_corpus(counts, vocab_size)
        total = pc.sum(counts["count"]).as_py() or 0
        # Pairs that are probably rarer than the last merge take no memory. Another pass finds them if they are needed.
        threshold = max(min_frequency, total // (_THRESHOLD_DIVISOR * max(1, max_merges)))
        del counts  # frees the memory of the pretokens for their pairs
        pa.default_memory_pool().release_unused()
        training = find_pairs(make_training(corpus, len(tokens), max_merges), length, threshold)
        pairs = learn_pairs(training, length, max_merges, threshold, min_frequency, progress)
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


def training_memory_bytes(pretokens: int, text_bytes: int, vocab_size: int = 65_000) -> int:
    """Estimate the peak memory of :func:`train_merges` for so many different pretokens of so many bytes in all."""
    entries = text_bytes + ENTRIES_PER_PRETOKEN * pretokens
    bytes_per_entry = 1 + corpus_dtype(vocab_size).itemsize
    places = 4 * (text_bytes - pretokens) * 9 // 8
    return bytes_per_entry * entries + places


def _make_corpus(counts: pa.Table, vocab_size: int) -> tuple[Corpus, int]:
    """Return the corpus of all pretokens and the number of its entries."""
    text_bytes = pc.sum(pc.binary_length(counts["pretoken"])).as_py() or 0
    entries = 1 + text_bytes + ENTRIES_PER_PRETOKEN * len(counts)
    if entries > MAX_ENTRIES:
        raise UserError(
            f"{len(counts):,} different pretokens of {text_bytes:,} bytes are too many to learn merges from: "
            f"the bytes and {ENTRIES_PER_PRETOKEN} times the number may add up to {MAX_ENTRIES:,}. "
            "Raise tokenizer.min_count, or train on less text."
        )
    corpus, length = make_corpus(entries, vocab_size), 1
    for batch in counts.to_batches():
        corpus, length = add_pretokens(corpus, length, *counts_to_arrays(pa.Table.from_batches([batch])))
    return corpus, length


def learn_pairs(
    training: Training,
    length: int,
    max_merges: int,
    threshold: int,
    min_frequency: int,
    progress: Callable[[int], None],
) -> npt.NDArray[np.int32]:
    """Return the merges as pairs of ids, (merges, 2). ``training`` has the pairs with a count of ``threshold``."""
    merges = np.empty((max_merges, 2), np.int32)
    done, merges_per_call = 0, 1  # the first merges take the longest
    logged = time.monotonic()
    while done < max_merges:
        limit, started = min(max_merges, done + merges_per_call), time.monotonic()
        done, status = learn_merges(training, merges, done, limit, threshold)
        if status == TABLE_FULL:
            training = grow_pairs(training)
        elif status == PLACES_FULL:
            training = make_room_for_places(training, threshold)
        elif done < limit and threshold > min_frequency:
            threshold = max(min_frequency, threshold // 4)
            training = find_pairs(training, length, threshold)
        else:
            progress(done)
            if done < limit:
                break
            now = time.monotonic()
            if now - logged >= _SECONDS_BETWEEN_LOG_LINES:
                log.info("Learned %s of %s merges.", f"{done:,}", f"{max_merges:,}")
                logged = now
            is_slow = now - started > _MAX_SECONDS_PER_CALL
            merges_per_call = (
                max(1, merges_per_call // 2) if is_slow else min(_MAX_MERGES_PER_CALL, 2 * merges_per_call)
            )
    return merges[:done]
