"""Sources of text: everything that can be wrong with one, every way to reach and compress one, and the ingest stage."""

import bz2
import functools
import gzip
import http.server
import json
import lzma
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.corpus import (
    DataConfig,
    Source,
    Tally,
    decode_blocks,
    documents,
    expand,
    fingerprint,
    is_referable,
    open_bytes,
    open_text,
    split_suffixes,
    version,
)
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.ingest import ingest
from lm.pretokens import END_OF_TEXT

EOT = END_OF_TEXT
TEXT = "".join(f"Story {i}: naïve 日本語 🙂\n{EOT}\n" for i in range(300))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
compressed = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])


def read(url: str, config: DataConfig | None = None, tally: Tally | None = None) -> list[str]:
    """All documents of a source."""
    return list(documents(url, config or DataConfig(), tally or Tally()))


def read_text(url: str) -> str:
    with open_text(url) as blocks:
        return "".join(blocks)


# finding and opening sources


def test_a_missing_file_is_a_users_mistake(tmp_path: Path) -> None:
    url = str(tmp_path / "none.txt")
    for reader in (fingerprint, read, read_text):
        with pytest.raises(UserError, match=r"none\.txt does not exist"):
            reader(url)
    assert expand([url]) == [url]


def test_a_directory_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory; name its files, such as"):
        fingerprint(str(tmp_path))


def test_an_empty_file_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        fingerprint(str(tmp_path / "empty.txt"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be opened"):
        fingerprint(str(path))


@pytest.mark.parametrize("pattern", ["*.csv", "no-such-folder/*.txt", "file-[0-9].txt"])
def test_a_glob_without_a_match_is_a_users_mistake(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="No file matches"):
        expand([str(tmp_path / pattern)])


def test_a_glob_gives_its_files_sorted_in_the_order_of_the_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "odd[1].txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    monkeypatch.chdir(tmp_path)
    found = expand(["c.jsonl", "*.txt", str(tmp_path / "odd[1].txt"), "demo:3"])
    names = ["c.jsonl", "a.txt", "b.txt", "odd[1].txt", "odd[1].txt"]
    assert found == [*(str(tmp_path / name) for name in names), "demo:3"]
    assert expand([f"file://{tmp_path}/a.txt"]) == [str(tmp_path / "a.txt")]


def test_an_unknown_protocol_is_a_users_mistake() -> None:
    for reader in (lambda url: expand([url]), fingerprint, read, version):
        with pytest.raises(UserError, match=r"foo://bar cannot be read: .*foo"):
            reader("foo://bar")


@pytest.mark.parametrize("url", ["demo:", "demo:0", "demo:-3", "demo:many", "demo:1.5", "demo: 5", "demo:²"])
def test_a_malformed_demo_corpus_is_a_users_mistake(url: str) -> None:
    for reader in (fingerprint, read):
        with pytest.raises(UserError, match="names no demo corpus; write demo:N"):
            reader(url)


def test_the_demo_corpus_is_the_same_each_time() -> None:
    tally = Tally()
    found = read("demo:20", tally=tally)
    assert "".join(found) == "".join(demo_stories(20))
    assert tally.documents == 20
    assert fingerprint("demo:20") == fingerprint("demo:20") != fingerprint("demo:21")
    assert list(demo_stories(40))[:20] == list(demo_stories(20)) != list(demo_stories(20, seed=1))


def test_a_fingerprint_is_of_the_stored_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"abc" * 1000, mtime=0))
    assert fingerprint(str(path)).bytes == path.stat().st_size
    other = tmp_path / "b.txt"
    other.write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert fingerprint(str(other)) == Source(str(other), 3, digest)


def test_a_version_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    assert version(str(path)) is None
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    before = version(str(path))
    assert before == version(str(path))
    path.write_text("two")
    assert version(str(path)) != before
    assert version("demo:5") is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("a.txt", ("text", "")),
        ("a", ("text", "")),
        ("a.tar/b", ("text", "")),
        ("A.JSONL.GZ", ("jsonl", ".gz")),
        ("a.ndjson.zst", ("jsonl", ".zst")),
        ("a.parquet", ("parquet", "")),
        ("a.gz", ("text", ".gz")),
        ("https://host/a.jsonl.xz?download=1.parquet", ("jsonl", ".xz")),
        ("what?.jsonl", ("jsonl", "")),
    ],
)
def test_the_name_tells_kind_and_compression(url: str, expected: tuple[str, str]) -> None:
    assert split_suffixes(url) == expected


# compression


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_every_compression_gives_the_same_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    assert "".join(read(str(path))) == TEXT == read_text(str(path))


@compressed
def test_joined_compressed_files_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    """``cat a.gz b.gz`` is a valid file of all these formats, and parallel compressors write such."""
    path = tmp_path / f"a.txt{suffix}"
    pack = COMPRESSIONS[suffix]
    path.write_bytes(pack(TEXT.encode()) + pack(b"the end"))
    assert read_text(str(path)) == TEXT + "the end"


@compressed
@pytest.mark.parametrize("left", [0.5, 0.99])
def test_a_truncated_file_is_a_users_mistake(tmp_path: Path, suffix: str, left: float) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = COMPRESSIONS[suffix](TEXT.encode())
    path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(UserError, match=rf"a\.txt\{suffix} is corrupt or truncated"):
        read(str(path))


@compressed
@pytest.mark.parametrize("damage", ["not compressed at all", "inside"])
def test_a_corrupt_file_is_a_users_mistake(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    data = bytearray(COMPRESSIONS[suffix](TEXT.encode()))
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    path.write_bytes(data if damage == "inside" else TEXT.encode())
    # zstd has no checksum by default: damage may also show as bytes that are not UTF-8
    with pytest.raises(UserError, match="is corrupt or truncated" if suffix != ".zst" else "corrupt|not UTF-8"):
        read(str(path))


def test_compressed_parquet_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match="Parquet is compressed inside"):
        read(str(path))


# UTF-8


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 1 << 20])
def test_invalid_utf8_is_named_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("lm.corpus.BLOCK", block)
    path = tmp_path / "bad.txt"
    for before in ("", "abc", "日本語", "x" * 1500 + "é"):
        for bad in (b"\xff", b"\xe6\x97!", b"\xf0\x9f\x99", b"\x80", b"\xed\xa0\x80"):
            data = before.encode()
            path.write_bytes(data + bad)
            with pytest.raises(UserError) as caught:
                read(str(path))
            assert f"bad.txt is not UTF-8: byte 0x{bad[0]:02x} at offset {len(data):,}. " in str(caught.value)


def test_invalid_utf8_past_the_first_block_is_named_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + "é".encode() + b"\xff")
    with pytest.raises(UserError, match="byte 0xff at offset 1,048,577"):
        read(str(path))


def test_invalid_utf8_in_a_range_is_named_with_its_offset_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good \xff bad")
    with open_text(str(path), 2, 5) as blocks:
        assert "".join(blocks) == "od "
    with open_text(str(path), 2, 9) as blocks, pytest.raises(UserError, match="offset 5"):
        list(blocks)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([b"a", "é".encode(), "🙂".encode(), "�".encode(), b"\xff", b"\xe6\x97", b"\xf0"])),
    st.integers(1, 5),
)
def test_decoding_in_blocks_equals_decoding_the_whole(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    tally = Tally()
    expected = data.decode("utf-8", "replace")
    assert "".join(decode_blocks(blocks, "x", "replace", tally)) == expected
    assert tally.replaced == expected.count("�") - parts.count("�".encode())
    if not tally.replaced:
        assert "".join(decode_blocks(blocks, "x")) == expected


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl", "bad.txt.gz"])
def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, name: str) -> None:
    data = b'{"text": "a\xffb\xe6\x97c \xef\xbf\xbd"}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match="not UTF-8: byte 0xff at offset 11"):
        read(str(path))
    tally = Tally()
    assert "a�b�c �" in "".join(read(str(path), DataConfig(invalid_utf8="replace"), tally))
    assert tally.replaced == 2


# documents


@settings(deadline=None, max_examples=300)
@given(st.text("ab| \n", max_size=60), st.sampled_from(["|", "||", "a|", "aa", "ab|", "\n\n"]), st.integers(1, 9))
def test_documents_of_a_text_join_to_it_and_a_last_separator(text: str, separator: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.corpus.BLOCK", block)
        fsspec.filesystem("memory").pipe("/hypothesis.txt", text.encode())
        tally = Tally()
        found = read("memory://hypothesis.txt", DataConfig(separator=separator), tally)
    *whole, rest = text.split(separator)
    expected = [document + separator for document in whole]
    if rest:
        expected.append(rest if rest.isspace() else rest + separator)
    assert found == expected
    assert tally.documents == len(whole) + bool(rest.strip())


def test_a_text_without_a_separator_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("no separator")
    tally = Tally()
    assert read(str(path), tally=tally) == [f"no separator{EOT}"]
    assert tally.documents == 1


def test_white_space_after_the_last_separator_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"one{EOT}\r\ntwo{EOT}\r\n \n".encode())
    tally = Tally()
    assert read(str(path), tally=tally) == [f"one{EOT}", f"\r\ntwo{EOT}", "\r\n \n"]
    assert tally.documents == 2


def jsonl(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_jsonl_documents(tmp_path: Path) -> None:
    rows = ["one", "", "two\nlines\u2028 and \u0085", "日本"]
    lines = [json.dumps({"text": row, "more": 1}, ensure_ascii=False) for row in rows]
    tally = Tally()
    found = read(jsonl(tmp_path / "a.jsonl", *lines, "", "  "), tally=tally)
    assert found == [row + EOT for row in rows]
    assert tally.documents == 4
    assert read(jsonl(tmp_path / "b.jsonl", '{"body": "x"}'), DataConfig(text_field="body")) == [f"x{EOT}"]
    assert read(jsonl(tmp_path / "c.ndjson", r'{"text": "\ud83d\ude42 \ud83d"}')) == [f"🙂 \ufffd{EOT}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("plain text", "not JSON"),
        ('{"body": "x"}', "no text field 'text'; set data.text_field"),
        ('{"text": 5}', "no text field"),
        ('{"text": null}', "no text field"),
        ("[]", "no text field"),
        ('"text"', "no text field"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    url = jsonl(tmp_path / "a.jsonl", '{"text": "good"}', "", line, '{"text": "good"}')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: {message}"):
        read(url)


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_parquet_documents(tmp_path: Path) -> None:
    url = parquet(tmp_path / "a.parquet", text=["one", None, "", "日本"], more=[1, 2, 3, 4])
    tally = Tally()
    assert read(url, tally=tally) == [f"one{EOT}", EOT, f"日本{EOT}"]
    assert tally.documents == 3
    url = parquet(tmp_path / "b.parquet", body=pa.array(["x"] * 3000, pa.large_string()))
    assert read(url, DataConfig(text_field="body")) == [f"x{EOT}"] * 3000


def test_a_parquet_file_without_the_column_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text' among \['body'\]; set data.text_field"):
        read(parquet(tmp_path / "a.parquet", body=["x"]))
    with pytest.raises(UserError, match="column 'text' is not text"):
        read(parquet(tmp_path / "a.parquet", text=[1]))


def test_a_file_that_is_not_parquet_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"text" * 100)
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(str(path))
    whole = Path(parquet(tmp_path / "b.parquet", text=["x" * 100])).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(str(path))


def test_parquet_text_that_is_not_utf8_is_a_users_mistake(tmp_path: Path) -> None:
    offsets = pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0]))
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        read(parquet(tmp_path / "a.parquet", text=text))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_separator_inside_a_document_is_named_or_removed(tmp_path: Path, kind: str) -> None:
    rows = ["good", f"a{EOT}b{EOT}c", f"nested <|endof{EOT}text|> end"]
    if kind == "jsonl":
        url = jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": row}) for row in rows))
    else:
        url = parquet(tmp_path / "a.parquet", text=rows)
    with pytest.raises(UserError, match=r"(line|row) 2: the document contains the separator <\|endoftext\|>"):
        read(url)
    tally = Tally()
    found = read(url, DataConfig(separator_in_document="remove"), tally)
    assert found == [f"good{EOT}", f"abc{EOT}", f"nested  end{EOT}"]
    assert tally.separators_removed == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": []}, "data.train is empty"),
        ({"separator": ""}, "data.separator is empty"),
        ({"valid_fraction": 1.0}, "data.valid_fraction is 1.0"),
        ({"valid_fraction": -0.1}, "data.valid_fraction"),
        ({"valid_fraction": float("nan")}, "data.valid_fraction"),
    ],
)
def test_an_unfit_config_is_a_users_mistake(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)


# other places than this machine's disk


def test_sources_in_memory() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/corpus/b.txt", TEXT.encode())
    fs.pipe("/corpus/a.txt.gz", gzip.compress(TEXT.encode()))
    urls = expand(["memory://corpus/*"])
    assert urls == ["memory:///corpus/a.txt.gz", "memory:///corpus/b.txt"]
    for url in urls:
        assert "".join(read(url)) == TEXT
        assert not is_referable(url)
    assert fingerprint(urls[1]).bytes == len(TEXT.encode())
    with pytest.raises(UserError, match="does not exist"):
        fingerprint("memory://corpus/none")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; knows no byte ranges, like many a web server."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def web(web_folder: Path) -> Iterator[str]:
    """URL of a local web server that serves ``web_folder``."""
    handler = functools.partial(QuietHandler, directory=str(web_folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_sources_on_the_web(web: str, web_folder: Path, suffix: str) -> None:
    (web_folder / f"a.txt{suffix}").write_bytes(COMPRESSIONS[suffix](TEXT.encode()))
    url = f"{web}/a.txt{suffix}?download=true"
    assert expand([url]) == [url]
    assert "".join(read(url)) == TEXT
    assert fingerprint(url).bytes == (web_folder / f"a.txt{suffix}").stat().st_size
    assert not is_referable(url)


def test_a_long_source_on_a_web_server_without_byte_ranges(web: str, web_folder: Path) -> None:
    """Longer than the five megabytes that are fetched at once where there are ranges."""
    (web_folder / "long.txt").write_bytes(b"0123456789abcde\n" * 500_000)
    assert fingerprint(f"{web}/long.txt") == Source(
        f"{web}/long.txt", 8_000_000, fingerprint(str(web_folder / "long.txt")).sha256
    )


def test_parquet_on_the_web(web: str, web_folder: Path) -> None:
    parquet(web_folder / "a.parquet", text=["one", "two"])
    assert read(f"{web}/a.parquet") == [f"one{EOT}", f"two{EOT}"]


def test_a_source_missing_on_the_web_is_a_users_mistake(web: str) -> None:
    for reader in (fingerprint, read):
        with pytest.raises(UserError, match=r"none\.txt does not exist"):
            reader(f"{web}/none.txt")


def test_sources_on_s3(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe("corpus/a.txt", TEXT.encode())
    bucket.pipe("corpus/b.txt.gz", gzip.compress(TEXT.encode()))
    bucket.put(parquet(tmp_path / "c.parquet", text=["one"]), "corpus/c.parquet")
    urls = expand(["s3://corpus/*.parquet", "s3://corpus/*txt*"])
    assert urls == ["s3://corpus/c.parquet", "s3://corpus/a.txt", "s3://corpus/b.txt.gz"]
    assert "".join(read(urls[1])) == "".join(read(urls[2])) == TEXT
    assert read(urls[0]) == [f"one{EOT}"]
    assert fingerprint(urls[1]).bytes == len(TEXT.encode())
    assert not is_referable(urls[1])
    before = version(urls[1])
    assert before
    bucket.pipe("corpus/a.txt", TEXT.upper().encode())
    bucket.invalidate_cache()
    assert version(urls[1]) != before
    for url in ("s3://corpus/none.txt", "s3://no-such-bucket/a.txt"):
        with pytest.raises(UserError, match=r"does not exist|cannot be opened"):
            fingerprint(url)
    with pytest.raises(UserError, match="No file matches"):
        expand(["s3://corpus/*.csv"])


# ingest


def sources(*urls: str | Path) -> list[Source]:
    return [fingerprint(url) for url in expand(map(str, urls))]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def run(
    out: Path, train: list[Source], valid: list[Source] | None = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ingest into a new folder: (texts.json, the text of train and of valid)."""
    out.mkdir()
    found = ingest(train, valid or [], DataConfig(**fields), out)
    everything = [*train, *(valid or [])]
    texts = {}
    for name in ("train", "valid"):
        data = []
        for text in found[name]:
            path = out / text["file"] if text["file"] else Path(everything[text["source"]].url)
            assert path.stat().st_size == text["bytes"]
            data.append(path.read_bytes())
        texts[name] = b"".join(data).decode()
        assert found["statistics"][name]["bytes"] == len(b"".join(data))
    return found, texts


def test_ingest_refers_to_plain_local_files(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / f"{name}.txt", f"{name}{EOT}") for name in "abc")
    found, texts = run(tmp_path / "out", sources(a, b), sources(c))
    assert [text["source"] for text in found["train"]] == [0, 1]
    assert [text["source"] for text in found["valid"]] == [2]
    assert [text["file"] for text in found["train"] + found["valid"]] == [None] * 3
    assert list((tmp_path / "out").iterdir()) == []
    assert texts == {"train": f"a{EOT}b{EOT}", "valid": f"c{EOT}"}
    assert [found["statistics"][name]["documents"] for name in ("train", "valid")] == [2, 1]


def test_ingest_keeps_the_order_of_mixed_sources(tmp_path: Path) -> None:
    urls = [
        jsonl(tmp_path / "1.jsonl", '{"text": "1"}'),
        write(tmp_path / "2.txt", f"2{EOT}\n"),
        tmp_path / "3.txt.gz",
        parquet(tmp_path / "4.parquet", text=["4"]),
        write(tmp_path / "5.txt", "5"),
        jsonl(tmp_path / "6.jsonl", '{"text": "6"}'),
    ]
    Path(urls[2]).write_bytes(gzip.compress(b"3"))
    found, texts = run(tmp_path / "out", sources(*urls), valid_fraction=0)
    assert texts["train"] == f"1{EOT}2{EOT}\n3{EOT}4{EOT}56{EOT}"
    assert [(text["file"], text["source"]) for text in found["train"]] == [
        *[("train.txt", None), (None, 1), ("train-2.txt", None), (None, 4), ("train-3.txt", None)],
    ]
    assert found["valid"] == []
    assert found["statistics"]["train"]["documents"] == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train-2.txt", "train-3.txt", "train.txt"]


def test_ingest_copies_a_plain_file_with_bytes_to_replace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.txt").write_bytes(b"a\xffb")
    bad, good = sources(tmp_path / "bad.txt", write(tmp_path / "good.txt", "good"))
    found, texts = run(tmp_path / "out", [bad, good], valid_fraction=0, invalid_utf8="replace")
    assert [text["source"] for text in found["train"]] == [None, 1]
    assert texts["train"] == f"a\ufffdb{EOT}good"
    assert found["statistics"]["train"]["replaced"] == 1
    assert found["statistics"]["train"]["documents"] == 2
    assert "1 replaced" in caplog.text
    with pytest.raises(UserError, match="offset 1"):
        run(tmp_path / "again", [bad], valid_fraction=0)


def stories(count: int) -> list[str]:
    return [story.removesuffix(f"{EOT}\n") for story in demo_stories(count)]


def split_of(tmp_path: Path, name: str, rows: list[str], **fields: Any) -> tuple[list[str], list[str]]:
    """The stories that become (training, validation) text when these are the documents of one text file."""
    path = write(tmp_path / f"{name}.txt", "".join(f"{row}{EOT}\n" for row in rows))
    _, texts = run(tmp_path / name, sources(path), **fields)
    train, valid = ([part.strip() for part in texts[key].split(EOT) if part.strip()] for key in ("train", "valid"))
    return train, valid


def test_a_fraction_of_the_documents_is_set_aside(tmp_path: Path) -> None:
    rows = stories(1000)
    path = write(tmp_path / "a.txt", "".join(f"{row}{EOT}\n" for row in rows))
    found, texts = run(tmp_path / "out", sources(path), valid_fraction=0.1)
    train, valid = ([part.strip() for part in texts[key].split(EOT)[:-1]] for key in ("train", "valid"))
    assert sorted(train + valid) == sorted(row.strip() for row in rows)
    assert 60 < len(valid) < 140
    assert [found["statistics"][name]["documents"] for name in ("train", "valid")] == [len(train), len(valid)]
    assert [text["file"] for text in found["train"] + found["valid"]] == ["train.txt", "valid.txt"]


def test_the_fraction_does_not_depend_on_order_number_or_format(tmp_path: Path) -> None:
    rows = [row.strip() for row in stories(120)]
    train, valid = split_of(tmp_path, "one", rows, valid_fraction=0.2)
    assert valid
    more_train, more_valid = split_of(
        tmp_path, "more", rows + [row.strip() for row in stories(200)[120:]], valid_fraction=0.2
    )
    assert more_train[: len(train)] == train
    assert more_valid[: len(valid)] == valid
    # Each document leads once; the first of a file stands without the newline that the others begin with.
    for first in range(0, 120, 10):
        turned = rows[first:] + rows[:first]
        assert set(split_of(tmp_path, f"turned-{first}", turned, valid_fraction=0.2)[1]) == set(valid)
    url = jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": row}) for row in rows))
    _, texts = run(tmp_path / "jsonl", sources(url), valid_fraction=0.2)
    assert texts["valid"].split(EOT)[:-1] == valid


@pytest.mark.parametrize("ending", ["", "\n", EOT, f"{EOT}\n"])
@pytest.mark.parametrize("word", ["alpha", "beta", "gamma"])
@pytest.mark.parametrize("fraction", [0.1, 0.9])
def test_a_single_document_is_split_at_its_tail(tmp_path: Path, ending: str, word: str, fraction: float) -> None:
    """Whichever side the document's own hash would put it on."""
    text = f"{word} " * 400 + "end" + ending
    found, texts = run(tmp_path / "out", sources(write(tmp_path / "a.txt", text)), valid_fraction=fraction)
    train, valid = texts["train"], texts["valid"]
    assert train.endswith(EOT)
    assert train.removesuffix(EOT) + valid in (text, text + EOT)
    assert abs(len(valid) / len(text) - fraction) < 0.03
    assert found["statistics"]["valid"]["documents"] == 1


def test_a_text_too_short_to_split_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"too short .* set data.valid_fraction to 0"):
        run(tmp_path / "out", sources(write(tmp_path / "a.txt", "word")))


def test_sources_without_a_document_are_a_users_mistake(tmp_path: Path) -> None:
    url = jsonl(tmp_path / "a.jsonl", "", "")
    with pytest.raises(UserError, match="no text"):
        run(tmp_path / "out", sources(url), valid_fraction=0)


def test_ingest_counts_removed_separators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": f"{row}{EOT}{row}"}) for row in "abcdefgh" * 5))
    for name, fraction in (("split", 0.4), ("whole", 0)):
        found, _ = run(tmp_path / name, sources(url), valid_fraction=fraction, separator_in_document="remove")
        assert found["statistics"]["train"]["separators_removed"] == 40
    assert "40 separators removed" in caplog.text


def test_bad_input_stops_ingest(tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", f"a{EOT}b{EOT}")
    bad = jsonl(tmp_path / "bad.jsonl", "{")
    for fraction in (0, 0.5):
        with pytest.raises(UserError, match="line 1: not JSON"):
            run(tmp_path / f"out-{fraction}", sources(good, bad), valid_fraction=fraction)


def test_blocks_of_open_bytes_join_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.corpus.BLOCK", 7)
    path = write(tmp_path / "a.txt", TEXT)
    with open_bytes(str(path)) as blocks:
        found = list(blocks)
    assert b"".join(found) == TEXT.encode()
    assert max(map(len, found)) == 7
