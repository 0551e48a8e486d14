"""MinHash: signatures of documents, whose bands are keys of likely near-duplicates, and their true Jaccard similarity.

Broder 1997, "On the resemblance and containment of documents"; bands: Leskovec, Rajaraman and Ullman, "Mining of
Massive Datasets", section 3.4. Shingles are runs of n normalized words, see
:func:`lm.curate.normalized_words.normalize_words`.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lm.common.errors import UserError
from lm.curate.document_batch import DocumentBatch, pack_documents
from lm.curate.normalized_words import character_tables, words_identity
from lm.kernels.curation.signatures import list_shingles, sign_documents
from lm.kernels.curation.word_hashes import BLOCK_WORDS, make_word_block
from lm.kernels.jit import Int64s, UInt32s, UInt64s

NO_WORDS = 0xFFFFFFFF  # all values of the signature of a document without words
_BAND_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class MinHash:
    """Number of permutations, number of bands, and words of a shingle. Raises UserError for impossible ones."""

    num_hashes: int = 112
    """Values of a signature, K."""
    num_bands: int = 14
    """Bands of K / num_bands values each. Documents are compared if any band is equal."""
    ngrams: int = 5
    """Words of a shingle. A document of fewer words has one shingle: all its words."""

    def __post_init__(self) -> None:
        for name, largest in (("num_hashes", 1 << 16), ("num_bands", self.num_hashes), ("ngrams", BLOCK_WORDS // 2)):
            if not 1 <= getattr(self, name) <= largest:
                raise UserError(f"{name} is {getattr(self, name):,}; it must be between 1 and {largest:,}.")
        if self.num_hashes % self.num_bands:
            raise UserError(
                f"{self.num_hashes:,} hashes cannot be divided into {self.num_bands:,} bands of one size; "
                "choose num_hashes as a multiple of num_bands."
            )

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the keys of a document's bands, as plain data."""
        return {**asdict(self), "words": words_identity()}

    @cached_property
    def _permutations(self) -> tuple[UInt32s, UInt32s]:
        """Odd multipliers and addends of the permutations, uint32 (K,) each: numbers of splitmix64."""
        state = np.arange(1, 2 * self.num_hashes + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        numbers = (_mix(state) >> _HALF).astype(np.uint32).reshape(2, -1)
        return numbers[0] | np.uint32(1), numbers[1]

    def sign(self, batch: DocumentBatch) -> UInt32s:
        """Return the signatures of D documents: uint32 (D, num_hashes)."""
        signatures: UInt32s = np.empty((len(batch.offsets) - 1, self.num_hashes), np.uint32)
        workspace = np.empty(BLOCK_WORDS, np.uint32)
        tables, block = character_tables(), make_word_block()
        sign_documents(*batch, tables, block, workspace, self.ngrams, *self._permutations, signatures)
        return signatures

    def band_keys(self, signatures: UInt32s) -> UInt64s:
        """Return a key of each band of D signatures, uint64 (D, num_bands): a hash of the band's number and values."""
        num_rows = self.num_hashes // self.num_bands
        bands = signatures.reshape(len(signatures), self.num_bands, num_rows).astype(np.uint64)
        keys = np.broadcast_to(np.arange(1, self.num_bands + 1, dtype=np.uint64), bands.shape[:2])
        for row in range(num_rows):
            keys = (keys ^ bands[:, :, row]) * _BAND_MULTIPLIER
            keys ^= keys >> _HALF
        return _mix(keys)

    def match_probability(self, jaccard: float) -> float:
        """Return the probability that two documents of a Jaccard similarity share a band: 1 - (1 - s^r)^b."""
        rows = self.num_hashes // self.num_bands
        return float(1 - (1 - jaccard**rows) ** self.num_bands)


def _mix(numbers: UInt64s) -> UInt64s:
    """Return the output function of splitmix64 (Steele et al. 2014), a bijection."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def hash_ngrams(batch: DocumentBatch, ngrams: int, has_short: bool) -> tuple[UInt64s, Int64s]:
    """Return the hashes of all runs of n words of D documents, uint64, and where those of each end: int64 (D + 1,).

    ``has_short``: a document of fewer words has one run, else none.
    """
    sizes = np.diff(batch.offsets)
    hashes: UInt64s = np.empty(int(sizes.sum()) // 2 + len(sizes), np.uint64)
    ends: Int64s = np.zeros(len(sizes) + 1, np.int64)
    list_shingles(*batch, character_tables(), make_word_block(), ngrams, has_short, hashes, ends[1:])
    return hashes[: ends[-1]], ends


def shingle_sets(batch: DocumentBatch, ngrams: int) -> tuple[UInt64s, Int64s]:
    """Return the sets of shingles of D documents: their sorted hashes, uint64, and where each set ends: int64 (D + 1,).

    Two different shingles have one hash with probability 2^-64.
    """
    shingles, ends = hash_ngrams(batch, ngrams, has_short=True)
    for begin, end in zip(ends.tolist(), ends[1:].tolist(), strict=False):
        shingles[begin:end].sort()
    is_first = np.ones(len(shingles) + 1, np.bool_)
    np.not_equal(shingles[1:], shingles[:-1], out=is_first[1:-1])
    is_first[ends] = True
    is_first = is_first[:-1]
    return shingles[is_first], np.concatenate([[0], np.cumsum(is_first)])[ends]


def jaccard_similarity(first: str, second: str, ngrams: int = 5) -> float:
    """Return the Jaccard similarity of the sets of shingles of two texts; 0 if one has no words."""
    shingles, ends = shingle_sets(pack_documents([first, second]), ngrams)
    shared = len(np.intersect1d(shingles[: ends[1]], shingles[ends[1] :], assume_unique=True))
    either = len(shingles) - shared
    return shared / either if shared else 0.0
