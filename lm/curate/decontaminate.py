"""Decontamination: documents that share n-grams of words with texts that a model is later tested on.

Brown et al. 2020 (GPT-3), appendix C: 13 words. Words are normalized, see
:func:`lm.curate.normalized_words.normalize_words`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lm.common.errors import UserError
from lm.curate.document_batch import DocumentBatch, pack_documents, pad_documents
from lm.curate.minhash import hash_ngrams
from lm.curate.normalized_words import character_tables
from lm.eval.problems import Task
from lm.kernels.curation.ngram_table import NgramTable, fill_ngram_table, find_ngrams
from lm.kernels.curation.word_hashes import BLOCK_WORDS, make_word_block
from lm.kernels.jit import Int64s

_BATCH_CHARACTERS = 1 << 22
NGRAMS = 13


class Contamination(NamedTuple):
    """M spans of documents that are in a protected text, in order."""

    documents: Int64s
    """(M,): numbers of the documents in the batch. One with several spans is there several times."""
    begins: Int64s
    """(M,): first byte of the shared words, counted from the document's begin."""
    ends: Int64s
    """(M,): end of the last shared word."""
    sources: Int64s
    """(M,): number of the source that the span's first words are from."""


class ProtectedTexts:
    """The n-grams of texts that must not be in training text.

    ``sources`` are (name, texts), such as the validation text, the problems of a task, or a file. A text of fewer
    than ``ngrams`` words protects nothing. An n-gram of several sources belongs to the first. Holds at most 48 bytes
    for each n-gram, and twice that while it is made. Raises UserError if ``ngrams`` is out of bounds.
    """

    def __init__(self, sources: Iterable[tuple[str, Iterable[str]]], ngrams: int = NGRAMS) -> None:
        if not 1 <= ngrams <= BLOCK_WORDS // 2:
            raise UserError(f"The n-grams have {ngrams:,} words; choose from 1 to {BLOCK_WORDS // 2:,}.")
        self.ngrams = ngrams
        self.names: list[str] = []
        """Name of each source."""
        self.num_texts: list[int] = []
        """Number of texts of each source."""
        self.num_short: list[int] = []
        """Number of texts of each source that have too few words."""
        hashes, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
        for number, (name, texts) in enumerate(sources):
            num_texts = num_short = 0
            for batch in _batches(texts):
                found, ends = hash_ngrams(batch, ngrams, has_short=False)
                num_texts += len(ends) - 1
                num_short += int((np.diff(ends) == 0).sum())
                hashes.append(np.unique(found))
                numbers.append(np.full(len(hashes[-1]), number, np.uint32))
            self.names.append(name)
            self.num_texts.append(num_texts)
            self.num_short.append(num_short)
        unique, firsts = np.unique(np.concatenate(hashes), return_index=True)
        num_slots = 1 << (2 * len(unique) + 1).bit_length()
        self._table = NgramTable(np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.uint32))
        fill_ngram_table(unique, np.concatenate(numbers)[firsts], self._table)

    def find(self, batch: DocumentBatch) -> Contamination:
        """Return the spans of D documents that share an n-gram with a protected text. N-grams that overlap are one."""
        num_documents, num_bytes = len(batch.offsets) - 1, int(batch.offsets[-1] - batch.offsets[0])
        spans: Int64s = np.empty((num_documents + num_bytes // (2 * self.ngrams - 1), 4), np.int64)
        count = find_ngrams(*batch, character_tables(), make_word_block(), self.ngrams, self._table, spans)
        documents, begins, ends, sources = spans[:count].T
        starts = batch.offsets[documents]
        return Contamination(documents.copy(), begins - starts, ends - starts, sources.copy())


def _batches(texts: Iterable[str]) -> Iterator[DocumentBatch]:
    pending: list[str] = []
    size = 0
    for text in texts:
        pending.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield pack_documents(pending)
            pending, size = [], 0
    yield pack_documents(pending)


def cut_spans(batch: DocumentBatch, contamination: Contamination) -> DocumentBatch:
    """Return the documents of a batch without the spans that are in protected texts."""
    documents, begins, ends, _ = contamination
    starts = batch.offsets[documents] - batch.offsets[0]
    changes = np.zeros(int(batch.offsets[-1] - batch.offsets[0]) + 1, np.int8)
    changes[starts + begins] += 1
    changes[starts + ends] -= 1
    is_kept = np.cumsum(changes, dtype=np.int8)[:-1] == 0
    kept = np.concatenate([[0], np.cumsum(is_kept)])
    data = batch.data[batch.offsets[0] : batch.offsets[-1]][is_kept]
    return pad_documents(data, kept[batch.offsets - batch.offsets[0]])


def task_texts(task: Task) -> Iterator[str]:
    """Yield the text of each problem of a task, with its solution if it has one."""
    for problem in task.problems:
        yield f"{problem.prompt}\n{problem.solution or ''}"
