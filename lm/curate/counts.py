"""Counts of documents, from which the rules of curation compute their figures."""

import os
from functools import cache

import numpy as np

from lm.curate.document_batch import DocumentBatch
from lm.kernels.bpe.scanners import character_classes
from lm.kernels.curation import text_classes as flags
from lm.kernels.curation.document_counts import (
    NUM_COLUMNS,
    NUM_USED,
    CountWorkspace,
    LineLimits,
    TextTables,
    count_documents,
)
from lm.kernels.curation.item_table import make_item_table
from lm.kernels.curation.repeated_grams import MAX_WORDS, make_gram_workspace
from lm.kernels.jit import Bytes, Int64s, log_compilation
from lm.text.character_tables import PUBLISHED_TABLES, unpack_tables

# Sentence_Terminal in Unicode 16, as ranges of code points.
_SENTENCE_TERMINALS = """
    21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 17D4-17D5 1803
    1809 1944-1945 1AA8-1AAB 1B4E-1B4F 1B5A-1B5B 1B5E-1B5F 1B7D-1B7F 1C3B-1C3C 1C7E-1C7F 2024 203C-203D 2047-2049
    2CF9-2CFB 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1
    ABEB FE12 FE15-FE16 FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1
    11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 113D4-113D5 1144B-1144C 115C2-115C3
    115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44
    16A6E-16A6F 16AF5 16B37-16B38 16B44 16D6E-16D6F 16E98 1BC9F 1DA88
"""
_PHRASES = (
    *("lorem ipsum", "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies"),
    *("use of cookies", "use cookies"),
)
_SEED = np.uint64(int.from_bytes(os.urandom(8), "little"))  # with a known one, a text could be made that takes long


@cache
def text_classes() -> Bytes:
    """Return the classes of each code point in Unicode 16 as bits, uint8 (0x110000,)."""
    by_class = np.zeros(8, np.uint8)
    by_class[[character_classes.LOWER, character_classes.UPPER, character_classes.UNCASED]] = flags.LETTER
    by_class[character_classes.DIGIT], by_class[character_classes.MARK] = flags.NUMBER, flags.MARK
    by_class[character_classes.WHITESPACE] = flags.WHITESPACE
    classes = by_class[unpack_tables(PUBLISHED_TABLES)]
    for run in _SENTENCE_TERMINALS.split():
        first, _, last = run.partition("-")
        classes[int(first, 16) : int(last or first, 16) + 1] |= flags.TERMINAL
    classes.flags.writeable = False
    return classes


@cache
def _tables() -> TextTables:
    encoded = [phrase.encode() for phrase in _PHRASES]
    phrases = np.frombuffer(b"".join(encoded) + bytes(64), np.uint8)
    return TextTables(text_classes(), phrases, np.cumsum([len(phrase) for phrase in encoded]), _SEED)


def count_batch(batch: DocumentBatch, limits: LineLimits) -> Int64s:
    """Return the counts of D documents, int64 (D, columns), in the order of
    :data:`lm.kernels.curation.columns.COLUMNS`.

    Releases the GIL. Repeated lines, paragraphs and n-grams are counted among the first 2¹⁸ of a document.
    """
    num_documents = len(batch.offsets) - 1
    items = max(1, min(int(np.max(np.diff(batch.offsets), initial=0)), MAX_WORDS))
    words, lines, paragraphs = (make_item_table(items) for _ in range(3))
    work = CountWorkspace(words, lines, paragraphs, make_gram_workspace(items), np.empty(NUM_USED, np.int64))
    counts = np.zeros(num_documents * NUM_COLUMNS, np.int64)
    with log_compilation("curation"):
        count_documents(batch.data, batch.offsets, _tables(), limits, work, counts)
    return counts.reshape(num_documents, NUM_COLUMNS)
