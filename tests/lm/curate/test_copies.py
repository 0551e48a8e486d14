"""Copies in groups of texts: those of plain comparisons, however documents are divided into groups."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lm.curate import DeduplicateConfig, jaccard_similarity
from lm.curate.copies import PLACES, Copies, SignedGroup, find_copies, make_minhash, sign_texts, write_without
from lm.curate.text_parts import TextPart

TEXTS = [
    "a b c d e f g h",
    "a b c d e f g h i",
    "A b c d e f g h i j!",
    "x y z",
    " x y z\n",
    "",
    "  ",
    "?",
    "k l m n o p q",
]
CONFIG = DeduplicateConfig(equal=True, jaccard_threshold=0.5, num_hashes=64, num_bands=64, ngrams=2)


def find(groups: list[list[str]], config: DeduplicateConfig = CONFIG) -> Copies:
    with TemporaryDirectory() as name:
        signed = []
        for number, texts in enumerate(groups):
            folder = Path(name) / str(number)
            folder.mkdir()
            data = "".join(text + "|" for text in texts).encode()
            (folder / "in.txt").write_bytes(data)
            part = TextPart(str(folder / "in.txt"), [(0, len(data))] if data else [], [], "")
            sign_texts([part], "|", config.equal, make_minhash(config), f"group{number}", folder)
            files = [sorted(folder.glob(f"*.{kind}")) for kind in ("documents", "bands")]
            signed.append(SignedGroup([part.url], np.load(folder / PLACES), *files))
        return find_copies(signed, config)


@given(st.lists(st.sampled_from(TEXTS), max_size=8), st.lists(st.integers(0, 8), max_size=3))
def test_each_removed_document_has_a_chain_of_copies_to_one_that_stays(texts: list[str], cuts: list[int]) -> None:
    ends = [*sorted(cuts), len(texts)]
    groups = [texts[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    copies, whole = find(groups), find([texts])
    assert copies.survivors.tolist() == whole.survivors.tolist()
    parents = [*range(len(texts))]  # the first of each connected component of a graph
    for later, text in enumerate(texts):
        for earlier in range(later):
            if text.strip() == texts[earlier].strip() or jaccard_similarity(text, texts[earlier], 2) >= 0.5:
                old, new = sorted((parents[later], parents[earlier]), reverse=True)
                parents = [new if parent == old else parent for parent in parents]
    assert copies.survivors.tolist() == parents
    removed = [copies.removed(number).tolist() for number in range(len(groups))]
    kept = [text for group, gone in zip(groups, removed, strict=True) for n, text in enumerate(group) if n not in gone]
    assert kept == [text for number, text in enumerate(texts) if parents[number] == number]


def test_documents_past_the_limit_are_no_copies() -> None:
    long = "word " * (4 << 20)
    assert find([[long], [long, long], ["x y z"]]).survivors.tolist() == [0, 1, 2, 3]


def test_the_other_documents_are_written_as_they_are(tmp_path: Path) -> None:
    texts = ["a", "é" * (9 << 20), "", "b"]
    data = "|".join(texts).encode()  # the last one lacks its separator
    (tmp_path / "in.txt").write_bytes(data)
    part = TextPart(str(tmp_path / "in.txt"), [(0, len(data))], [], "")
    result = write_without([part], "|", np.array([0, 2]), tmp_path)
    assert (tmp_path / "text.txt").read_bytes().decode() == f"{texts[1]}|b|"
    statistics = result.kept_statistics
    assert statistics.documents == 2 and statistics.lengths[0] == 1 and sum(statistics.lengths[90:]) == 1
    assert result.kept[0].bytes == (18 << 20) + 3
