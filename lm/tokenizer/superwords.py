"""Training of superwords: merges that may cross words, learned after those within pretokens.

What is learned: the text is split into segments (a pretoken, or up to 16 words in a row that only single spaces or
apostrophes separate, see :data:`lm.text.patterns.SEGMENT_PATTERNS`) and encoded with the first merges. Then the most
frequent pair of neighboring tokens in a segment is merged, again and again; ties go to the greater pair of byte
strings. A pair must occur at least once in four million tokens.

This is the second stage of SuperBPE (Liu et al. 2025, "SuperBPE: Space Travel for Language Models"), with segments that
end at punctuation, digits and line breaks as in BoundlessBPE (Schmidt et al. 2025). The segments are counted like
pretokens ("Faster Superword Tokenization"). Most segments of a text are unique, so they are cut first where two
neighbors occur together too rarely to be merged. That changes no merge: each occurrence of a pair of tokens has an
occurrence of the pair of first tokens at the border inside it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lm.common.errors import UserError
from lm.hardware.cpu import available_cpus
from lm.kernels.bpe.corpus import ENTRIES_PER_PRETOKEN, MAX_ENTRIES, add_pretokens, make_corpus
from lm.kernels.bpe.frequent_pairs import find_pairs
from lm.kernels.bpe.pretoken_table import grow_arena, grow_table, make_table
from lm.kernels.bpe.pretokens import Specials, pack_specials
from lm.kernels.bpe.segments import add_pairs, copy_tokens, count_pieces, set_tokens
from lm.kernels.bpe.training_state import Training, make_training
from lm.kernels.jit import ARENA_FULL, TABLE_FULL, Ids, log_compilation
from lm.text.patterns import segment_pattern
from lm.tokenizer.bpe import Merges, Vocab, learn_pairs
from lm.tokenizer.pretoken_counts import append_counts, counts_to_arrays, is_long, sum_counts, table_from_slots
from lm.tokenizer.superword_encoder import SuperwordEncoder, crosses_words
from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Texts = Callable[[], Iterable[Iterable[bytes]]]
"""Opens a part of the corpus: texts, each in blocks of UTF-8. It is opened twice."""

_TOKENS_PER_OCCURRENCE = 1 << 22  # a pair that is rarer is not merged
_BUCKETS = 1 << 24  # for the pairs, at least 64 MB for each thread


@dataclass(frozen=True)
class SuperwordTraining:
    """What :func:`train_superwords` learned."""

    vocab: Vocab
    merges: Merges
    word_merges: int
    """The first of them, which do not cross words."""
    tokens: int
    """Tokens of the corpus by the first merges."""
    min_frequency: int
    """How often a pair must occur to be merged."""
    pieces: int
    """Different pieces of segments from which the merges are learned."""


def train_superwords(
    texts: Sequence[Texts],
    merges: Merges,
    vocab_size: int,
    special_tokens: Sequence[str],
    pattern: str,
    min_frequency: int = 1,
    threads: int | None = None,
    progress: Callable[[int], None] = lambda merges: None,
) -> SuperwordTraining:
    """Learn merges that may cross words from ``texts``, after the ``merges`` of :func:`lm.tokenizer.bpe.train_merges`.

    First merges that could join a letter with the word after it, such as of a no-break space with a space, are left
    out with those that need them. Special tokens end a segment. ``pattern``: that of the first merges. ``threads``
    (default: one per CPU core) does not affect the result. Calls ``progress`` with the number of merges learned.
    Memory: 64 MB for each thread, and the different pieces of segments, whose number grows more slowly than the text.
    Raises UserError for a pattern that has no segments, for text that is not UTF-8, and for too many pieces.
    """
    first_merges = keep_word_merges(merges)
    specials = [special.encode() for special in special_tokens]
    tokens = [bytes([byte]) for byte in range(256)] + specials + [left + right for left, right in first_merges]
    vocab = dict(enumerate(tokens))
    encoder = Tokenizer(vocab, first_merges, special_tokens, segment_pattern(pattern)).segment_encoder()
    packed = pack_specials([(token, 256 + i) for i, token in enumerate(specials)])
    workers = threads or available_cpus()
    with log_compilation("superword counting"):
        buckets, num_tokens = _count_pairs(texts, encoder, packed, workers)
        min_frequency = max(min_frequency, num_tokens // _TOKENS_PER_OCCURRENCE)
        pieces = _count_pieces(texts, encoder, packed, buckets, min_frequency, workers)
    del buckets
    max_merges, num_pieces, id_type = max(0, vocab_size - len(tokens)), len(pieces), encoder.dtype
    occurrences = pc.sum(pieces["count"]).as_py() or 0
    with log_compilation("BPE training"):
        training, length = _make_training(pieces, tokens, id_type, vocab_size, max_merges)
        del pieces
        threshold = max(min_frequency, occurrences // (64 * max(1, max_merges)))
        training = find_pairs(training, length, threshold)
        pairs = learn_pairs(training, length, max_merges, threshold, min_frequency, progress)
    learned = list(first_merges)
    for left, right in pairs.tolist():
        learned.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    if len(pairs) < max_merges:
        log.warning(
            "The corpus gives %d tokens, fewer than the vocab_size of %d: no pair across words occurs %d times.",
            *(len(tokens), vocab_size, min_frequency),
        )
    return SuperwordTraining(dict(enumerate(tokens)), learned, len(first_merges), num_tokens, min_frequency, num_pieces)


def keep_word_merges(merges: Merges) -> Merges:
    """Return the merges without those that cross words, and without those of tokens that are then not made."""
    made = {bytes([byte]) for byte in range(256)}
    kept = []
    for left, right in merges:
        if left in made and right in made and not crosses_words(left, right):
            kept.append((left, right))
            made.add(left + right)
    return kept


def _run_threads(texts: Sequence[Texts], work: Callable[[Iterator[Iterable[bytes]]], None], workers: int) -> None:
    """Call ``work`` in each thread with an iterator over texts; together they get each text once."""
    pending = deque(texts)

    def next_texts() -> Iterator[Iterable[bytes]]:
        while True:
            try:
                text = pending.popleft()  # other threads take texts too
            except IndexError:
                return
            yield from text()

    def run() -> None:
        try:
            work(next_texts())
        except BaseException:
            pending.clear()  # stops the other threads
            raise

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(run) for _ in range(workers)]:
            future.result()


def _count_pairs(
    texts: Sequence[Texts], encoder: SuperwordEncoder, specials: Specials, workers: int
) -> tuple[npt.NDArray[np.uint32], int]:
    """Return buckets of pairs of neighbors, see :func:`add_pairs`, and the number of tokens."""
    total, num_tokens, lock = np.zeros(_BUCKETS, np.uint32), 0, Lock()

    def count(own_texts: Iterator[Iterable[bytes]]) -> None:
        nonlocal num_tokens
        buckets, own_tokens = np.zeros(_BUCKETS, np.uint32), 0
        for blocks in own_texts:
            for ids, size, ends in encoder.encode_segments(blocks, specials):
                add_pairs(ids, ends, len(ends), buckets)
                own_tokens += size
        with lock:
            np.add(total, np.minimum(buckets, np.iinfo(np.uint32).max - total), out=total)
            num_tokens += own_tokens

    _run_threads(texts, count, workers)
    return total, num_tokens


def _count_pieces(
    texts: Sequence[Texts],
    encoder: SuperwordEncoder,
    specials: Specials,
    buckets: npt.NDArray[np.uint32],
    threshold: int,
    workers: int,
) -> pa.Table:
    """Return the counts of the pieces of segments, each as the bytes of its ids; see :func:`count_pieces`."""
    tables: list[pa.Table] = []
    lock = Lock()

    def count(own_texts: Iterator[Iterable[bytes]]) -> None:
        table = make_table(1 << 16, 1 << 20)
        for ids, _, ends in chain.from_iterable(encoder.encode_segments(blocks, specials) for blocks in own_texts):
            data = ids.view(np.uint8)
            segment, status = count_pieces(ids, data, ends, len(ends), 0, buckets, threshold, table)
            while status:
                if is_long(table):
                    with lock:
                        append_counts(tables, table_from_slots(table))
                    table = make_table(1 << 16, 1 << 20)
                elif status == TABLE_FULL:
                    table = grow_table(table, 2)
                elif status == ARENA_FULL:
                    table = grow_arena(table, data.nbytes)
                segment, status = count_pieces(ids, data, ends, len(ends), segment, buckets, threshold, table)
        with lock:
            append_counts(tables, table_from_slots(table))

    _run_threads(texts, count, workers)
    return sum_counts(tables)


def _make_training(
    pieces: pa.Table, tokens: Sequence[bytes], id_type: "np.dtype[np.unsignedinteger]", vocab_size: int, max_merges: int
) -> tuple[Training, int]:
    """Return a training whose corpus has the pieces as tokens, without pairs, and the number of its entries."""
    data_bytes = pc.sum(pc.binary_length(pieces["pretoken"])).as_py() or 0
    if data_bytes > np.iinfo(np.int32).max or ENTRIES_PER_PRETOKEN * len(pieces) > MAX_ENTRIES:
        raise _too_many(pieces, data_bytes // id_type.itemsize)
    data, ends, counts = counts_to_arrays(pieces)
    ids: Ids = data[: ends[-1]].view(id_type) if len(counts) else np.empty(0, id_type)
    lengths = np.array([len(token) for token in tokens], np.int64)
    byte_ends = np.concatenate([[0], np.cumsum(lengths[ids])])
    id_ends = ends.astype(np.int64) // id_type.itemsize
    entries = 1 + int(byte_ends[-1]) + ENTRIES_PER_PRETOKEN * len(counts)
    if entries > min(MAX_ENTRIES, np.iinfo(np.int32).max):
        raise _too_many(pieces, len(ids))
    text = np.empty(int(byte_ends[-1]), np.uint8)
    token_data = np.frombuffer(b"".join(tokens), np.uint8)
    copy_tokens(ids, token_data, np.concatenate([[0], np.cumsum(lengths)]), text)
    corpus, length = add_pretokens(
        make_corpus(entries, vocab_size), 1, text, byte_ends[id_ends].astype(np.int32), counts
    )
    del text, byte_ends
    training = make_training(corpus, len(tokens), max_merges)
    training.tokens.lengths[: len(tokens)] = lengths
    training.tokens.prefixes[: len(tokens)] = [int.from_bytes(token[:8].ljust(8, b"\0"), "big") for token in tokens]
    set_tokens(corpus, training.tokens, ids, id_ends, 1)
    return training, length


def _too_many(pieces: pa.Table, num_tokens: int) -> UserError:
    return UserError(
        f"{len(pieces):,} different pieces of text with {num_tokens:,} tokens are too many to learn superwords from. "
        "Raise tokenizer.min_frequency, or train on less text."
    )
