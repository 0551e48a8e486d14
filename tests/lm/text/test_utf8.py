"""UTF-8 decoding and encoding in blocks, invalid bytes and surrogates."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.documents import TextStatistics
from lm.text.utf8 import decode_utf8_blocks, encode_utf8, encode_utf8_blocks
from tests.helpers.corpora import read_documents
from tests.helpers.examples import examples


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 1 << 20])
def test_invalid_utf8_is_reported_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("lm.files.compression.BLOCK_BYTES", block)
    path = tmp_path / "bad.txt"
    for before in ("", "abc", "日本語", "x" * 1500 + "é"):
        for bad in (b"\xff", b"\xe6\x97!", b"\xf0\x9f\x99", b"\x80", b"\xed\xa0\x80"):
            data = before.encode()
            path.write_bytes(data + bad)
            with pytest.raises(UserError) as caught:
                read_documents(str(path))
            assert f"bad.txt is not UTF-8: byte 0x{bad[0]:02x} at offset {len(data):,}. " in str(caught.value)


def test_the_offset_counts_all_blocks(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + "é".encode() + b"\xff")
    with pytest.raises(UserError, match="byte 0xff at offset 1,048,577"):
        read_documents(str(path))


@examples(300)
@given(
    st.lists(st.sampled_from([b"a", "é".encode(), "🙂".encode(), "�".encode(), b"\xff", b"\xe6\x97", b"\xf0"])),
    st.integers(1, 5),
)
def test_decoding_does_not_depend_on_the_blocks(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    statistics = TextStatistics()
    expected = data.decode("utf-8", "replace")
    assert "".join(decode_utf8_blocks(blocks, "x", "replace", statistics.add_replaced)) == expected
    assert statistics.replaced == expected.count("�") - parts.count("�".encode())
    if not statistics.replaced:
        assert "".join(decode_utf8_blocks(blocks, "x")) == expected


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl", "bad.txt.gz"])
def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, name: str) -> None:
    data = b'{"text": "a\xffb\xe6\x97c \xef\xbf\xbd"}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match="not UTF-8: byte 0xff at offset 11"):
        read_documents(str(path))
    statistics = TextStatistics()
    assert "a�b�c �" in "".join(read_documents(str(path), DataConfig(invalid_utf8="replace"), statistics))
    assert statistics.replaced == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("naïve 🙂", "naïve 🙂"), ("\ud83d\ude42", "🙂"), ("a\ud83d", "a\ufffd"), ("\ude42\ud83d", "\ufffd\ufffd")],
)
def test_surrogate_pairs_are_joined_and_lone_surrogates_replaced(text: str, expected: str) -> None:
    assert encode_utf8(text) == expected.encode()
    assert b"".join(encode_utf8_blocks(text)) == expected.encode(), "a pair that spans two blocks"
