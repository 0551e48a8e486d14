from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import (
    DocumentFiles,
    deduplicate_documents,
    digest_documents_to_runs,
    find_equal_documents,
    pack_documents,
    sorted_runs,
)
from lm.kernels.curation.digests import (
    HIGH_MULTIPLIER,
    HIGH_SEED,
    LOW_MULTIPLIER,
    LOW_SEED,
    digest_spans,
)
from tests.helpers.shingles import MASK, fold

LICENCE = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies"""


def plain_digest(data: bytes) -> tuple[int, int]:
    high, low = HIGH_SEED ^ len(data), LOW_SEED + len(data)
    for start in range(0, len(data), 8):
        word = int.from_bytes(data[start : start + 8], "little")
        high, low = fold(high ^ word, HIGH_MULTIPLIER), fold((low & MASK) ^ word, LOW_MULTIPLIER)
    return fold(high, LOW_MULTIPLIER), fold(low, HIGH_MULTIPLIER)


@given(st.lists(st.text(st.sampled_from(" \t\n\v\f\rax\x1cé\xa0"), max_size=20), max_size=6), st.booleans())
def test_digests_equal_the_plain_form(texts: list[str], is_stripped: bool) -> None:
    data, offsets = pack_documents(texts)
    highs, lows = np.empty((2, len(texts)), np.uint64)
    digest_spans(data, offsets[:-1], offsets[1:], is_stripped, highs, lows)
    encoded = [text.encode().strip() if is_stripped else text.encode() for text in texts]
    assert [*zip(highs.tolist(), lows.tolist(), strict=True)] == [plain_digest(text) for text in encoded]


def test_digests_of_many_short_texts_differ() -> None:
    texts = [*map(str, range(100_000)), *("\0" * i for i in range(100)), *("a" * i for i in range(1, 100))]
    data, offsets = pack_documents(texts)
    halves = np.empty((2, len(texts)), np.uint64)
    digest_spans(data, offsets[:-1], offsets[1:], False, *halves)
    assert [len(np.unique(half)) for half in halves] == [len(texts)] * 2
    ones = np.unpackbits(halves.view(np.uint8).reshape(2 * len(texts), 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.01


@given(texts=st.lists(st.sampled_from(["a", " a\n", "b", "", " ", "A"]), max_size=12), cuts=st.sets(st.integers(0, 12)))
def test_the_first_of_equal_documents_is_found_in_any_groups(
    texts: list[str], cuts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(texts)), len(texts)]
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_runs, "_MAX_RUN_RECORDS", 3)
        patch.setattr(sorted_runs, "_RANGE_RECORDS", 2)
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            (folder / f"{number}").mkdir()
            batches = [pack_documents([text]) for text in texts[begin:end]]
            runs += digest_documents_to_runs(batches, folder / f"{number}")
        firsts = find_equal_documents(runs)
    stripped = [text.strip() for text in texts]
    assert firsts.tolist() == [stripped.index(text) for text in stripped]


def write_files(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_the_first_of_similar_files_is_copied(tmp_path: Path) -> None:
    changed = LICENCE.upper().replace("SOFTWARE", "Söftware", 1).replace(",", ";")
    paths = write_files(tmp_path, LICENCE, "Another text, of a few words.", changed, "")
    deduplicate_documents(paths, tmp_path / "out", num_hashes=100, num_bands=10, ngrams=5, jaccard_threshold=0.8)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["0.txt", "1.txt", "3.txt"]
    assert (tmp_path / "out" / "0.txt").read_text() == LICENCE


def test_no_files_make_an_empty_directory(tmp_path: Path) -> None:
    deduplicate_documents([], tmp_path / "out", 100, 10, 5, 0.8)
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.mark.parametrize("threshold", [0, 1.1, float("nan")])
def test_an_impossible_threshold_is_refused(tmp_path: Path, threshold: float) -> None:
    with pytest.raises(UserError, match=r"jaccard_threshold is .*; it must be above 0 and at most 1"):
        deduplicate_documents([], tmp_path, 100, 10, 5, threshold)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    [path] = write_files(tmp_path, "some text")
    documents = DocumentFiles.whole_files([path])
    path.write_text("some")
    with pytest.raises(UserError, match=f"{path} changed while it was read; run the command again"):
        documents.read(np.array([0]))
