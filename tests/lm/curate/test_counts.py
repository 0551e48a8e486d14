"""The counts of the kernel equal those of the reference in plain Python."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lm.curate import counts, pack_documents
from lm.kernels.curation.columns import COLUMNS
from lm.kernels.curation.document_counts import LineLimits
from tests.helpers.document_counts import count_document

PIECES = [
    *("the", "be", "to", "of", "and", "that", "have", "with", "The", "cat", "Mr", "Mrs", "Ms", "Dr", "don't", "n't"),
    *("'s", "it’s", "we'LL", "1n't", "90's", "o'clock", "rock'n'roll", "'re", "don’t", "x've", "3.14", "1,000:30"),
    *("a,b", "a_b", "日本語", "東京。", "Привет", "мир", "नमस्ते।", "สวัสดี", "é", "e\u0301", "\u0301", "🙂", "❤\ufe0f"),
    *("٣", "½", "ſ", "Ⅷ", " ", "  ", "\t", "\n", "\n\n", "\n \n", "\r\n", "\u3000", "\xa0", "\x85", "\x1c", "\x00"),
    *("\u2028", "\ufeff", ".", "..", "...", "....", "…", "?", "!", '"', "'", "’", "-", "--", "•", "#", "##", "{", "}"),
    *("_", ",", ":", ";", "[1]", "[]", "[edit]", "[citation needed]", "[Edit]", "]", "[12", "lorem ipsum"),
    *("Lorem Ipsum", "dolorem ipsum", "JavaScript", "javascrip", "terms of use", "Privacy Policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies", "use\xa0cookies", "a b c d e f g h i j k l.", "x" * 70),
    *("one two three four five.", "word" * 20, "One more line ends here.\n", "One more line ends here.\n\n", "- a\n"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
spaced_texts = st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join)
few_words = st.lists(st.sampled_from(["a", "b", "the", "\n", "\n\n", "…", "don't"]), max_size=80).map(" ".join)
word_lists = st.lists(st.sampled_from(["a", "bc", "the", "…", "don't", "\n"]), min_size=1, max_size=12)
repeated_words = st.builds(
    lambda block, times, rest: " ".join(block * times + rest + block), word_lists, st.integers(1, 4), word_lists
)
documents = texts | spaced_texts | few_words | repeated_words | st.text(max_size=80)
limits = st.builds(LineLimits, st.integers(0, 40), st.integers(0, 5), st.integers(0, 90), st.booleans())
C4 = LineLimits(30, 3, 1000, True)


@given(st.lists(documents, max_size=4), limits)
@example(["", "\n", " ", "a", "Mr. x\n\n"], C4)
@example(["n't", "N’T 1n't an't", "a b c d e " * 4, "a b c d e f a b c d e x b c d e f a b c d e"], C4)
@example(["a b c a b c x y x y", "x y x y a b a b a b"], C4)
@example(["a\n\nb\n\na\n \nb", "a\n\na\n", "\n\na\n\n\na"], C4)
def test_counts_equal_the_reference(texts: list[str], limits: LineLimits) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    table = counts.count_batch(pack_documents(texts), limits)
    assert [dict(zip(COLUMNS, row, strict=True)) for row in table.tolist()] == [
        count_document(text, limits) for text in texts
    ]


def test_repetitions_are_counted_in_the_first_words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "MAX_WORDS", 8)
    text = "é b c d é b c d\nb c d with\né b c d é b c d\n"
    row = dict(zip(COLUMNS, counts.count_batch(pack_documents([text]), C4)[0].tolist(), strict=True))
    whole = count_document(text, C4)
    beginning = count_document("é b c d é b c d", C4)
    names = [name for name in COLUMNS if "_gram" in name or name == "gram_characters"]
    assert {name: row[name] for name in names} == {name: beginning[name] for name in names}
    assert all(row[name] == whole[name] for name in COLUMNS if name not in names) and row["stop_words"] == 1


def test_documents_of_other_batches_and_threads_do_not_matter() -> None:
    texts = ["the cat sat.\n" * 3, "日本語。 " * 50, "", "a b c d e f g h i j k l m. " * 9]
    together = counts.count_batch(pack_documents(texts * 20), C4)
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(lambda text: counts.count_batch(pack_documents([text]), C4)[0], texts * 20))
    assert np.array_equal(together, alone)
