"""Compressed sources: every format, several streams, damage."""

import gzip
from pathlib import Path

import pytest

from lm.common.errors import UserError
from tests.helpers.corpora import COMPRESSIONS, TEXT, read_documents, read_text

compressed = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_all_compressions_decompress_to_the_same_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    assert "".join(read_documents(str(path))) == TEXT == read_text(str(path))


@compressed
def test_concatenated_compressed_files_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    """The output of ``cat a.gz b.gz`` is valid in each format; parallel compressors write such files."""
    path = tmp_path / f"a.txt{suffix}"
    compress = COMPRESSIONS[suffix]
    path.write_bytes(compress(TEXT.encode()) + compress(b"the end"))
    assert read_text(str(path)) == TEXT + "the end"


@compressed
@pytest.mark.parametrize("damaged_byte", [0, 2, -2], ids=["first", "header", "near the end"])
def test_damage_of_a_later_stream_raises_a_user_error(tmp_path: Path, suffix: str, damaged_byte: int) -> None:
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix]
    later = bytearray(compress(TEXT.encode()))
    later[damaged_byte] ^= 0x55
    path.write_bytes(compress(b"one") + later + compress(b"three"))
    with pytest.raises(UserError, match="is corrupt or truncated"):
        read_text(str(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("zeros", [4, 1 << 17])
def test_zeros_may_follow_a_compressed_stream(tmp_path: Path, suffix: str, zeros: int) -> None:
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix]
    path.write_bytes((compress(TEXT.encode()) + bytes(zeros)) * 2)
    assert read_text(str(path)) == TEXT * 2


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
@pytest.mark.parametrize("read_bytes", [1, 7, 100])
def test_streams_do_not_depend_on_the_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, read_bytes: int
) -> None:
    monkeypatch.setattr("lm.files.compression._STREAM_READ_BYTES", read_bytes)
    monkeypatch.setattr("lm.files.compression.BLOCK_BYTES", 3)
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix]
    path.write_bytes(compress(b"one") + compress(b"") + bytes(8) + compress(b"two and three"))
    assert read_text(str(path)) == "onetwo and three"


@compressed
@pytest.mark.parametrize("left", [0.5, 0.99])
def test_a_truncated_file_raises_a_user_error(tmp_path: Path, suffix: str, left: float) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = COMPRESSIONS[suffix](TEXT.encode())
    path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(UserError, match=rf"a\.txt\{suffix} is corrupt or truncated"):
        read_documents(str(path))


@compressed
@pytest.mark.parametrize("damage", ["not compressed at all", "inside"])
def test_a_corrupt_file_raises_a_user_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = bytearray(COMPRESSIONS[suffix](TEXT.encode()))
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    path.write_bytes(data if damage == "inside" else TEXT.encode())
    # zstd has no checksum by default: damage may also appear as invalid UTF-8
    with pytest.raises(UserError, match="is corrupt or truncated" if suffix != ".zst" else "corrupt|not UTF-8"):
        read_documents(str(path))


def test_compressed_parquet_raises_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match="Parquet is compressed inside"):
        read_documents(str(path))


@compressed
def test_an_empty_file_is_not_a_compressed_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"a\.txt\{suffix} is corrupt or truncated"):
        read_text(str(path))
    path.write_bytes(COMPRESSIONS[suffix](b""))
    assert read_text(str(path)) == ""


def test_a_zstd_frame_with_a_long_window_says_how_to_compress_it_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(bytes.fromhex("28b52ffd 00 a8 010000"))  # a window of 2^31 bytes, and an empty last block
    with pytest.raises(UserError, match=r"needs a window of more than 128 MiB .* zstd -dc --long=31"):
        read_text(str(path))
