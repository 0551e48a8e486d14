from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import (
    DocumentBatch,
    MinHash,
    NearDuplicates,
    find_near_duplicates,
    jaccard_similarity,
    near_duplicates,
    pack_documents,
    sign_documents_to_runs,
    sorted_runs,
)
from lm.curate.minhash import NO_WORDS
from lm.kernels.jit import Int64s
from tests.helpers.shingles import jaccard

MINHASH = MinHash(12, 6, 2)
LEVELS = {0.5: (60, 30), 0.6: (60, 20), 0.7: (70, 15), 0.8: (80, 10), 0.9: (90, 5), 0.95: (95, 2.5)}


class Texts:
    """Documents in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.sizes = np.array([len(text.encode()) for text in texts], np.int64)

    def read(self, documents: Int64s) -> DocumentBatch:
        assert (np.diff(documents) > 0).all()
        return pack_documents([self.texts[number] for number in documents])


def find(
    texts: Sequence[str], folder: Path, minhash: MinHash, threshold: float, cuts: Sequence[int] = ()
) -> NearDuplicates:
    """Sign the texts in groups that end at ``cuts``, in the opposite order, and find the near-duplicates."""
    bounds = [0, *cuts, len(texts)]
    groups = []
    for number, (begin, end) in reversed([*enumerate(zip(bounds, bounds[1:], strict=False))]):
        (folder / f"{number}").mkdir(exist_ok=True)
        batches = [pack_documents(texts[i : min(i + 3, end)]) for i in range(begin, end, 3)]
        groups.append(sign_documents_to_runs(batches, folder / f"{number}", minhash))
    runs = [path for group in reversed(groups) for path in group]
    return find_near_duplicates(runs, Texts(texts), minhash, threshold)


def plain_survivors(texts: Sequence[str], minhash: MinHash, threshold: float) -> list[int]:
    """Return the first document of each document's cluster: a search through all pairs that share a band."""
    signatures = minhash.sign(pack_documents(texts))
    bands = signatures.reshape(len(texts), minhash.num_bands, minhash.num_hashes // minhash.num_bands)
    similar: list[set[int]] = [{i} for i in range(len(texts))]
    for i, j in combinations(range(len(texts)), 2):
        is_candidate = (bands[i] == bands[j]).all(axis=1).any() and (signatures[i] != NO_WORDS).any()
        if is_candidate and jaccard(texts[i], texts[j], minhash.ngrams) >= threshold:
            similar[i].add(j)
            similar[j].add(i)
    survivors = []
    for i in range(len(texts)):
        cluster = {i}
        while (grown := set().union(*(similar[member] for member in cluster))) != cluster:
            cluster = grown
        survivors.append(min(cluster))
    return survivors


def check_links(found: NearDuplicates, texts: Sequence[str], ngrams: int, threshold: float) -> None:
    """Check that verified pairs lead from each removed document to its survivor, and no pair joins two clusters."""
    removed = np.flatnonzero(found.survivors != np.arange(len(texts)))
    assert len(found.links) == len(found.similarities) == len(removed)
    neighbors: dict[int, set[int]] = {}
    for (first, second), similarity in zip(found.links.tolist(), found.similarities.tolist(), strict=True):
        assert similarity == jaccard(texts[first], texts[second], ngrams) >= threshold
        neighbors.setdefault(first, set()).add(second)
        neighbors.setdefault(second, set()).add(first)
    for document in removed.tolist():
        reached = {document}
        while (grown := reached.union(*(neighbors.get(member, set()) for member in reached))) != reached:
            reached = grown
        assert found.survivors[document] == min(reached)


@given(
    texts=st.lists(st.lists(st.sampled_from("abcdef"), max_size=8).map(" ".join), max_size=14),
    threshold=st.sampled_from([0.2, 0.5, 0.8, 1.0]),
    cuts=st.sets(st.integers(0, 14)),
)
def test_clusters_equal_the_plain_form_in_any_groups(
    texts: list[str], threshold: float, cuts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = find(texts, tmp_path_factory.mktemp("whole"), MINHASH, threshold)
    assert whole.survivors.tolist() == plain_survivors(texts, MINHASH, threshold)
    check_links(whole, texts, MINHASH.ngrams, threshold)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_RANGE_RECORDS", 7), ("_MAX_RUN_RECORDS", 9)):
            patch.setattr(sorted_runs, name, value)
        for name, value in (("_SLICE_RECORDS", 2), ("_MAX_TEXT_BYTES", 30)):
            patch.setattr(near_duplicates, name, value)
        cut = find(
            texts, tmp_path_factory.mktemp("cut"), MINHASH, threshold, sorted(c for c in cuts if c <= len(texts))
        )
    for column, other in zip(vars(whole).values(), vars(cut).values(), strict=True):
        assert np.array_equal(column, other)


def plant(level: float, count: int, rng: np.random.Generator) -> list[str]:
    """Return pairs of texts whose sets of 5-grams have a Jaccard similarity of ``level``: shared words, then others."""
    shared, different = LEVELS[level]
    half = int(2 * different)  # an odd number of different shingles is divided unevenly
    texts = []
    for _ in range(count):
        words = rng.integers(0, 1 << 40, int(shared) + 4 + half).astype(str).tolist()
        first, rest = words[: int(shared) + 4], words[int(shared) + 4 :]
        texts += [" ".join(first + rest[: half // 2]), " ".join(first + rest[half // 2 :])]
    return texts


def test_planted_pairs_are_found_as_the_curve_says(tmp_path: Path) -> None:
    """At least 2,000 pairs of each similarity, by the default settings; any found pair is verified."""
    minhash, count = MinHash(), 2500
    rng = np.random.default_rng(1)
    texts = [text for level in LEVELS for text in plant(level, count, rng)]
    batches = [pack_documents(texts[i : i + 4096]) for i in range(0, len(texts), 4096)]
    found = find_near_duplicates(sign_documents_to_runs(batches, tmp_path, minhash), Texts(texts), minhash, 0.4)
    is_found = (found.survivors[1::2] == np.arange(0, len(texts), 2)).reshape(len(LEVELS), count)
    assert (found.survivors[::2] == np.arange(0, len(texts), 2)).all()  # no pair joins another
    for level, share in zip(LEVELS, is_found.mean(axis=1), strict=True):
        number = 2 * count * [*LEVELS].index(level)
        assert jaccard_similarity(texts[number], texts[number + 1]) == pytest.approx(level, abs=1e-9)
        assert share == pytest.approx(minhash.match_probability(level), abs=0.02), level


def test_pairs_below_the_threshold_stay(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    texts = [*plant(0.9, 50, rng), *plant(0.7, 50, rng)]
    survivors = find(texts, tmp_path, MinHash(), 0.8).survivors
    assert survivors.tolist() == [number - number % 2 if number < 100 else number for number in range(200)]


def test_documents_without_words_all_stay_and_short_ones_are_compared_whole(tmp_path: Path) -> None:
    texts = ["", "...", "Yes!", "yes", "yes no", "", "No: yes", "-"]
    assert find(texts, tmp_path, MinHash(), 0.8).survivors.tolist() == [0, 1, 2, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("cuts", [[], [40, 41, 90]])
def test_a_band_of_many_documents_is_compared_with_its_first_ones(cuts: list[int], tmp_path: Path) -> None:
    """100 documents share a band, for its values are those of shared words. Each is like its neighbours only."""
    minhash = MinHash(2, 2, 1)
    texts = [
        " ".join([*map(str, range(number, number + 40)), *(f"shared{i}" for i in range(60))]) for number in range(100)
    ]
    keys = minhash.band_keys(minhash.sign(pack_documents(texts)))
    assert max(np.unique(keys[:, band], return_counts=True)[1].max() for band in (0, 1)) > 50
    found = find(texts, tmp_path, minhash, 0.9, cuts)
    check_links(found, texts, 1, 0.9)
    assert found.survivors.tolist() == plain_survivors(texts, minhash, 0.9)


@given(keys=st.lists(st.integers(0, 3), max_size=20), joined=st.sets(st.integers(0, 19)))
def test_a_document_is_compared_with_the_first_ones_of_a_band_and_the_one_before(
    keys: list[int], joined: set[int]
) -> None:
    order = np.argsort(np.array(keys, np.int64), kind="stable")
    parents = np.array([min(joined) if item in joined else item for item in range(len(keys))], np.int64)
    expected = []
    for key in sorted(set(keys)):
        members = [item for item, other in enumerate(keys) if other == key]
        for rank, later in enumerate(members):
            others = [*members[: min(rank, 2)], *(members[rank - 1 : rank] if rank > 2 else [])]
            expected += [[earlier, later] for earlier in others if parents[earlier] != parents[later]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "_MAX_COMPARED", 2)
        patch.setattr(near_duplicates, "_SLICE_RECORDS", 4)
        records = sorted_runs.Records(np.array(keys, np.uint64)[order], None, order)
        pairs = [pair for part in near_duplicates._candidate_pairs(records, parents) for pair in part.tolist()]
    assert pairs == expected


def test_runs_of_other_documents_are_refused(tmp_path: Path) -> None:
    runs = sign_documents_to_runs([pack_documents(["a", "b"])], tmp_path, MINHASH)
    with pytest.raises(UserError, match="The runs have the bands of 2 documents, not of 1; sign the documents again"):
        find_near_duplicates(runs, Texts(["a"]), MINHASH, 0.8)
