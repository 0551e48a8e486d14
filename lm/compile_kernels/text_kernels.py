"""Calls that compile the kernels for text and tokens. None of these modules imports torch."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from lm.curate.decontaminate import ProtectedTexts
from lm.curate.document_batch import pack_documents
from lm.curate.duplicate_documents import deduplicate_documents, digest_documents_to_runs
from lm.curate.duplicate_lines import deduplicate_lines
from lm.curate.language import identify_language
from lm.curate.masks import mask_emails
from lm.curate.rules import gopher_quality_filter
from lm.kernels.curation.language_features import walk_features
from lm.text.patterns import PATTERNS, SEGMENT_PATTERNS
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.piece_encoder import PieceEncoder
from lm.tokenizer.pretoken_counts import DEFAULT_MEMORY_BYTES, SCHEMA, count_to_file
from lm.tokenizer.sentencepiece_model import UNKNOWN, Piece, SentencePieceModel
from lm.tokenizer.superwords import train_superwords
from lm.tokenizer.tokenizer import Tokenizer

_NUM_WORDS = 40_000  # different pretokens: more than the first hash tables of counting and encoding hold
_NUM_RANDOM_BYTES = 200_000  # their merges make more pairs than the first hash table of training holds
_NUM_MERGES = 9_000


def _text() -> bytes:
    words = b"".join(b" %x" % (number * 0x9E3779B1) for number in range(_NUM_WORDS))
    return words + b" a" * 40 + b"\xe2\x82\xac" * 40


def count(pattern: str) -> None:
    """Count pretokens. ``pattern`` is a name in PATTERNS, here and below."""
    with tempfile.TemporaryDirectory() as folder:
        count_to_file(Path(folder) / "counts.parquet", [[_text()]], [], PATTERNS[pattern], DEFAULT_MEMORY_BYTES)


def train(id_bits: int) -> None:
    """Train merges whose ids have 16 or 32 bits."""
    data = random.Random(0).randbytes(_NUM_RANDOM_BYTES)
    parts = [data[i : i + 100] for i in range(0, len(data), 100)]
    table = pa.table([parts, [1] * len(parts)], schema=SCHEMA)
    train_merges(table, 256 + _NUM_MERGES if id_bits == 16 else 1 << 17, [])


def encode(pattern: str, id_bits: int) -> None:
    """Encode to ids of 16 or 32 bits."""
    merges = [(bytes([i // 256]), bytes([i % 256])) for i in range(_NUM_MERGES)]  # not trained: another group does that
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: left + right for i, (left, right) in enumerate(merges)}
    if id_bits == 32:
        vocab[1 << 17] = b"a token with an id of 18 bits"
    tokenizer = Tokenizer(vocab, merges, pattern=PATTERNS[pattern], ignore_merges=id_bits == 32)
    for _ in tokenizer.encode_blocks([_text()]):
        pass


def learn_superwords(pattern: str) -> None:
    """Train superwords for ids of 16 and of 32 bits, if the pattern has segments."""
    if pattern in SEGMENT_PATTERNS:
        for size in (1 << 9, 1 << 17):
            train_superwords([lambda: [[_text()]]], [(b" ", b"a")], size, [], PATTERNS[pattern])


def encode_pieces() -> None:
    """Encode with both algorithms of SentencePiece."""
    for is_bpe in (True, False):
        PieceEncoder(SentencePieceModel([Piece("<unk>", 0.0, UNKNOWN), Piece("aa", -1.0)], is_bpe)).encode("aa")


def curate() -> None:
    """Filter, mask, compare and classify texts."""
    gopher_quality_filter("")
    mask_emails("")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "first", Path(folder) / "second"]
        for path in paths:
            path.write_text("one text")
        deduplicate_documents(paths, Path(folder) / "documents", 2, 1, 1, 1.0)
        digest_documents_to_runs([pack_documents(["one text"])], Path(folder))
        deduplicate_lines(paths, Path(folder) / "lines")
    ProtectedTexts([("one", ["one text"])], 1).find(pack_documents(["one text"]))
    identify_language("")
    walk_features(np.frombuffer(bytes(1), np.uint8), *(np.zeros(256, np.int32) for _ in range(5)))
