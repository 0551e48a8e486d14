from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import MinHash, jaccard_similarity, pack_documents
from lm.curate.minhash import NO_WORDS, shingle_sets
from lm.kernels.curation.word_hashes import BLOCK_WORDS
from tests.helpers.shingles import MASK, hash_run, jaccard, list_shingles

few_words = st.lists(st.sampled_from(["a", "b", "The", "naïve", "don't", "日本", "-", "x" * 20]), max_size=14).map(
    " ".join
)


def splitmix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def plain_signature(text: str, minhash: MinHash) -> list[int]:
    """Return the signature of a text, by the definition."""
    numbers = [splitmix(i * 0x9E3779B97F4A7C15 & MASK) >> 32 for i in range(1, 2 * minhash.num_hashes + 1)]
    permutations = [(a | 1, b) for a, b in zip(numbers, numbers[minhash.num_hashes :], strict=False)]
    values = [hash_run([*shingle]) >> 32 for shingle in list_shingles(text, minhash.ngrams)]
    return [min((a * x + b & 0xFFFFFFFF for x in values), default=NO_WORDS) for a, b in permutations]


@given(st.lists(few_words, max_size=5), st.integers(1, 7))
def test_signatures_equal_the_plain_form(texts: list[str], ngrams: int) -> None:
    minhash = MinHash(6, 3, ngrams)
    assert minhash.sign(pack_documents(texts)).tolist() == [plain_signature(text, minhash) for text in texts]


@pytest.mark.parametrize("num_words", [BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS + 2])
def test_shingles_cross_the_blocks_of_a_long_document(num_words: int) -> None:
    minhash = MinHash(4, 2)
    text = " ".join(f"w{i % 997}" for i in range(num_words))
    assert minhash.sign(pack_documents(["x y", text])).tolist()[1] == plain_signature(text, minhash)
    shingles, ends = shingle_sets(pack_documents([text]), 5)
    assert set(shingles.tolist()) == {hash_run([*shingle]) for shingle in list_shingles(text, 5)}
    assert len(shingles) == ends[1]


@given(few_words, few_words, st.integers(1, 6))
def test_the_similarity_is_that_of_the_sets(first: str, second: str, ngrams: int) -> None:
    assert jaccard_similarity(first, second, ngrams) == jaccard(first, second, ngrams)


def test_similarity_ignores_case_accents_punctuation_and_space() -> None:
    assert jaccard_similarity("Où est le café, s'il vous plaît ?", "ou EST le cafe\n sil vous plait") == 1.0


def test_a_document_without_words_is_like_no_other() -> None:
    assert MinHash(4, 2).sign(pack_documents(["", "...", "a"]))[:2].tolist() == [[NO_WORDS] * 4] * 2
    assert jaccard_similarity("", "") == jaccard_similarity("?", "a") == 0.0


def test_a_band_key_depends_on_the_bands_number_and_values() -> None:
    minhash = MinHash(6, 3)
    signatures = np.array([[1, 2, 1, 2, 3, 4], [1, 2, 9, 2, 3, 4]], np.uint32)
    keys = minhash.band_keys(signatures)
    assert (keys[0] == keys[1]).tolist() == [True, False, True]
    assert len(set(keys.ravel().tolist())) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hashes": 0}, "num_hashes is 0; it must be between 1 and 65,536"),
        ({"num_bands": 200}, "num_bands is 200; it must be between 1 and 112"),
        ({"ngrams": 0}, "ngrams is 0"),
        ({"num_bands": 15}, "112 hashes cannot be divided into 15 bands"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MinHash(**fields)


def test_threads_sign_batches_at_the_same_time() -> None:
    minhash = MinHash()
    batches = [
        pack_documents(" ".join(f"w{(i * k) % 9973}" for i in range(3000)) for k in range(b, b + 20)) for b in range(8)
    ]
    with ThreadPoolExecutor(4) as pool:
        for batch, signatures in zip(batches, pool.map(minhash.sign, batches), strict=True):
            assert np.array_equal(signatures, minhash.sign(batch))
