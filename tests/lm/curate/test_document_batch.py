from hypothesis import given
from hypothesis import strategies as st

from lm.curate import pack_documents


@given(st.lists(st.text()))
def test_a_batch_has_the_bytes_of_each_document(texts: list[str]) -> None:
    data, offsets = pack_documents(texts)
    encoded = data.tobytes()
    parts = [encoded[begin:end] for begin, end in zip(offsets, offsets[1:], strict=False)]
    assert parts == [text.encode() for text in texts]
    assert encoded[offsets[-1] :] == bytes(64)


def test_a_lone_surrogate_is_replaced() -> None:
    data, offsets = pack_documents(["a\ud800b"])
    assert data[: offsets[1]].tobytes().decode() == "a\ufffdb"
