"""Documents of a text in blocks: those of the reader of plain text, whatever the blocks are."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lm.curate.document_reader import batch_documents, read_documents
from lm.text.documents import split_documents

SEPARATORS = ("<|e|>", "aa", "\n")


@st.composite
def blocks(draw: st.DrawFn, separator: str) -> list[bytes]:
    pieces = st.sampled_from([separator, separator[:1], "a", " ", "\n", "é", "日", "word "])
    data = "".join(draw(st.lists(pieces, max_size=30))).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return [data[start:end] for start, end in pairwise([0, *cuts, len(data)])]


@given(st.sampled_from(SEPARATORS).flatmap(lambda separator: st.tuples(st.just(separator), blocks(separator))))
def test_documents_are_those_of_plain_text(case: tuple[str, list[bytes]]) -> None:
    separator, parts = case
    text = b"".join(parts).decode()
    expected = "".join(split_documents([text], separator))
    documents = [*read_documents(parts, separator)]
    written = "".join(document.data.decode() + separator for document in documents)
    blank = expected[len(written) :]
    assert expected == written + blank and (not blank or blank.isspace())
    for document in documents:
        assert document.is_whole and document.size == len(document.data)
        assert text.encode()[document.start : document.start + document.size] == document.data


@given(st.sampled_from(SEPARATORS).flatmap(lambda separator: st.tuples(st.just(separator), blocks(separator))))
def test_a_long_document_is_not_held_as_a_whole(case: tuple[str, list[bytes]]) -> None:
    separator, parts = case
    whole, cut = [*read_documents(parts, separator)], [*read_documents(parts, separator, 4)]
    assert [(document.data[:4], document.size, document.start) for document in whole] == cut
    assert [document.is_whole for document in cut] == [document.size <= 4 for document in whole]


def test_batches_hold_all_documents_in_order() -> None:
    documents = [*read_documents([b"x" * (3 << 20) + b"|", b"y" * (6 << 20) + b"|", b"z|"], "|")]
    assert [[document.size for document in batch] for batch in batch_documents(documents)] == [[3 << 20, 6 << 20], [1]]
