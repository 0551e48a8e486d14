"""Batches of documents for the curation kernels: their UTF-8 in one array, with offsets."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from lm.kernels.jit import Bytes, Int64s
from lm.text.utf8 import encode_utf8

PADDING_BYTES = 64  # after the last document, because kernels read 64 bytes at a time


class DocumentBatch(NamedTuple):
    """D documents in one array. Document d is ``data[offsets[d]:offsets[d + 1]]``."""

    data: Bytes
    """Valid UTF-8 of the documents, one after the other, and 64 bytes of padding: uint8 (offsets[D] + 64,)."""
    offsets: Int64s
    """Where the documents begin in ``data``, in bytes, and where the last one ends: int64 (D + 1,)."""


def pack_documents(texts: Iterable[str]) -> DocumentBatch:
    """Copy D texts into a batch. Lone surrogates, which UTF-8 lacks, become U+FFFD."""
    return pack_utf8([encode_utf8(text) for text in texts])


def pack_utf8(encoded: Sequence[bytes]) -> DocumentBatch:
    """Copy D encoded texts into a batch."""
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int64, len(encoded) + 1)
    data = np.frombuffer(b"".join([*encoded, bytes(PADDING_BYTES)]), np.uint8)
    return DocumentBatch(data, offsets)


def pad_documents(data: Bytes, offsets: Int64s) -> DocumentBatch:
    """Return a batch of documents whose UTF-8 is in one array without padding, which is copied."""
    padded = np.concatenate([data, np.zeros(PADDING_BYTES, np.uint8)])
    padded.flags.writeable = False  # as in other batches: kernels are compiled for one type of array
    return DocumentBatch(padded, offsets)
