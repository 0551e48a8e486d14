"""Chunks and pretoken counts: where the text is cut, that no count depends on it, and the Parquet files."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.chunks import ChunkConfig, Range, cut_chunks
from lm.corpus import open_range
from lm.counts import SCHEMA, count_pretokens, merge_counts, read_counts, write_counts
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN, pretokenize, split_special
from tests.tokenizers_made import counts_table

EOT = END_OF_TEXT
SPECIALS = [EOT, EOT + EOT, "<| pad |>"]
WORDS_PATTERN = r"\p{L}+|\s+"

pieces = st.sampled_from(
    [*SPECIALS, "<|endof", "one", " two", "don't", "日本", "🙂", " ", "\n", "\n\n", "\t ", "\xa0", "x" * 30]
)
texts = st.lists(pieces, max_size=25).map("".join)
files = st.lists(texts, min_size=1, max_size=4)


def write_files(directory: Path, contents: list[str]) -> list[str]:
    paths = [directory / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.encode())
    return list(map(str, paths))


def count_of(text: str, special_tokens: list[str], pattern: str) -> Counter[str]:
    """Pretoken counts of a whole text in memory."""
    return Counter(
        pretoken
        for piece, is_special in split_special(text, special_tokens)
        if not is_special
        for pretoken in pretokenize(piece, pattern)
    )


@settings(deadline=None, max_examples=200)
@given(files, st.integers(1, 60), st.sampled_from([GPT2_PATTERN, WORDS_PATTERN]))
def test_ranges_cover_all_bytes_in_order(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], target: int, pattern: str
) -> None:
    paths = write_files(tmp_path_factory.mktemp("chunks"), contents)
    chunks = list(cut_chunks(paths, SPECIALS, target, pattern))
    assert [] not in chunks
    ranges = [part for chunk in chunks for part in chunk]
    for number, content in enumerate(contents):
        data = content.encode()
        mine = [part for part in ranges if part.text == number]
        assert b"".join(data[part.start : part.end] for part in mine) == data
        assert [part.last for part in mine] == [part.end == len(data) for part in mine]
        assert all(part.start < part.end for part in mine)
        for part in mine:
            assert part.sha256 == hashlib.sha256(data[part.start : part.end]).hexdigest()
    assert [(part.text, part.start) for part in ranges] == sorted((part.text, part.start) for part in ranges)


@settings(deadline=None, max_examples=200)
@given(files, st.integers(1, 60), st.sampled_from([GPT2_PATTERN, WORDS_PATTERN]))
def test_counts_of_the_chunks_add_up_to_the_counts_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], target: int, pattern: str
) -> None:
    paths = write_files(tmp_path_factory.mktemp("chunks"), contents)
    found: Counter[str] = Counter()
    for chunk in cut_chunks(paths, SPECIALS, target, pattern):
        for part in chunk:
            with open_range(paths[part.text], part.start, part.end) as blocks:
                found += counter_of(count_pretokens([blocks], SPECIALS, pattern))
    assert found == sum((count_of(content, SPECIALS, pattern) for content in contents), Counter())


def counter_of(tables: Iterable[pa.Table]) -> Counter[str]:
    """Tables of counts as one Counter."""
    found: Counter[str] = Counter()
    for table in tables:
        for pretoken, count in zip(*(column.to_pylist() for column in table.columns), strict=True):
            found[pretoken.decode()] += count
    return found


def chunk_texts(paths: list[str], target: int, special_tokens: list[str], pattern: str = GPT2_PATTERN) -> list[str]:
    """The text of each chunk of files."""
    data = [Path(path).read_bytes() for path in paths]
    return [
        b"".join(data[part.text][part.start : part.end] for part in chunk).decode()
        for chunk in cut_chunks(paths, special_tokens, target, pattern)
    ]


def test_a_chunk_ends_at_the_first_special_token_past_the_target(tmp_path: Path) -> None:
    document = "0123456 89" + EOT  # 23 bytes
    paths = write_files(tmp_path, [document * 10])
    assert chunk_texts(paths, 23, [EOT]) == [document] * 10
    assert chunk_texts(paths, 24, [EOT]) == [document * 2] * 5
    assert chunk_texts(paths, 69, [EOT]) == [document * 3] * 3 + [document]
    assert chunk_texts(paths, 1000, [EOT]) == [document * 10]


def test_white_space_at_the_end_stays_with_the_last_document(tmp_path: Path) -> None:
    """A chunk of white space alone would not show whether a document is open before it."""
    paths = write_files(tmp_path, [f"one{EOT}\ntwo{EOT}\n", f"three{EOT} \n \n"])
    assert chunk_texts(paths, 4, [EOT]) == [f"one{EOT}", f"\ntwo{EOT}\n", f"three{EOT} \n \n"]


def test_a_long_document_is_cut_before_white_space(tmp_path: Path) -> None:
    text = "".join(f"word{i} \n" for i in range(2000))
    chunks = chunk_texts(write_files(tmp_path, [text]), 1000, [EOT])
    assert "".join(chunks) == text
    assert len(chunks) > 4
    for chunk in chunks[1:]:
        assert chunk[0].isspace()
    for chunk in chunks[:-1]:
        assert not chunk[-1].isspace()
        assert 2000 <= len(chunk) < 4000


def test_a_document_without_white_space_is_not_cut(tmp_path: Path) -> None:
    text = "x" * 5000
    assert chunk_texts(write_files(tmp_path, [f"a b{text}{EOT}c"]), 100, [EOT]) == [f"a b{text}{EOT}", "c"]
    assert chunk_texts(write_files(tmp_path, [text]), 100, []) == [text]


def test_a_custom_pattern_never_cuts_inside_a_document(tmp_path: Path) -> None:
    document = "one two three " * 100
    paths = write_files(tmp_path, [f"{document}{EOT}{document}{EOT}\n{document}"])
    assert chunk_texts(paths, 50, [EOT], WORDS_PATTERN) == [
        *[f"{document}{EOT}", f"{document}{EOT}", f"\n{document}"],
    ]
    assert chunk_texts(paths, 50, [], WORDS_PATTERN) == [Path(paths[0]).read_text()]


def test_small_files_share_a_chunk(tmp_path: Path) -> None:
    paths = write_files(tmp_path, ["tiny"] * 100)
    chunks = list(cut_chunks(paths, [EOT], 40))
    assert [len(chunk) for chunk in chunks] == [10] * 10
    digest = hashlib.sha256(b"tiny").hexdigest()
    assert chunks[1][0] == Range(10, 0, 4, True, digest)
    assert {part.last for chunk in chunks for part in chunk} == {True}


def test_files_of_different_sizes_fill_chunks_across_their_ends(tmp_path: Path) -> None:
    document = "0123456789" + EOT
    paths = write_files(tmp_path, ["tiny\n", document * 3, "", "tiny"])
    chunks = list(cut_chunks(paths, [EOT], 40))
    assert [[(part.text, part.start, part.end, part.last) for part in chunk] for chunk in chunks] == [
        [(0, 0, 5, True), (1, 0, 46, False)],
        [(1, 46, 69, True), (3, 0, 4, True)],
    ]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 120), st.integers(200, 3000), st.booleans())
def test_appended_documents_change_the_last_chunks_only(
    tmp_path_factory: pytest.TempPathFactory, documents: int, target: int, has_separators: bool
) -> None:
    stories = list(demo_stories(150))
    if not has_separators:
        stories = [story.replace(EOT, "") for story in stories]
    directory = tmp_path_factory.mktemp("chunks")
    before = chunk_texts(write_files(directory, ["first file", "".join(stories[:documents])]), target, [EOT])
    after = chunk_texts(write_files(directory, ["first file", "".join(stories)]), target, [EOT])
    changed = 1 if has_separators else 2  # a document cut at white space: also where the last cut came
    same = max(0, len(before) - changed)
    assert after[:same] == before[:same]


def test_chunks_do_not_depend_on_how_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_files(tmp_path, ["".join(demo_stories(100))])
    expected = list(cut_chunks(paths, [EOT], 3000))
    assert len(expected) > 5
    monkeypatch.setattr("lm.corpus.BLOCK", 61)
    assert list(cut_chunks(paths, [EOT], 3000)) == expected


def test_no_files_and_empty_files_give_no_chunk(tmp_path: Path) -> None:
    assert list(cut_chunks([], [EOT], 10)) == []
    assert list(cut_chunks(write_files(tmp_path, ["", ""]), [EOT], 10)) == []


@pytest.mark.parametrize("target", [0, -1])
def test_an_unfit_target_is_a_users_mistake(target: int) -> None:
    with pytest.raises(UserError, match=r"chunk\.target_bytes"):
        ChunkConfig(target_bytes=target)


# counts


@settings(deadline=None, max_examples=200)
@given(st.lists(texts, max_size=5), st.sampled_from([GPT2_PATTERN, WORDS_PATTERN]))
def test_counting_in_blocks_equals_counting_the_whole(blocks: list[str], pattern: str) -> None:
    counts = count_pretokens([[block.encode() for block in blocks]], SPECIALS, pattern)
    assert counter_of(counts) == count_of("".join(blocks), SPECIALS, pattern)


def test_counting_past_the_size_of_a_piece() -> None:
    text = "".join(demo_stories(1500))
    data = text.encode()
    blocks = [data[i : i + 5003] for i in range(0, len(data), 5003)]
    assert len(data) > 4 * (1 << 16)
    assert counter_of(count_pretokens([blocks], [EOT])) == count_of(text, [EOT], GPT2_PATTERN)


some_counts = st.dictionaries(
    st.text(max_size=4) | st.sampled_from(["the", " the", "日本"]), st.integers(1, 9), max_size=12
)


def rows(path: Path) -> list[list[tuple[bytes, int]]]:
    """The rows of a file of counts, by its row groups."""
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(i).to_pydict() for i in range(file.num_row_groups)]
    return [list(zip(group["pretoken"], group["count"], strict=True)) for group in groups]


@settings(deadline=None, max_examples=60)
@given(st.lists(some_counts, min_size=1, max_size=4))
def test_merged_counts_are_the_sum_by_partition_in_order(
    tmp_path_factory: pytest.TempPathFactory, parts: list[dict[str, int]]
) -> None:
    directory = tmp_path_factory.mktemp("counts")
    paths = [directory / f"{i}.parquet" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_counts(path, counts_table(part))
    total = sum(map(Counter, parts), Counter())
    assert merge_counts(paths, directory / "all.parquet") == (total.total(), len(total))
    assert counter_of([read_counts(directory / "all.parquet")]) == total
    assert pq.read_schema(directory / "all.parquet").equals(SCHEMA)
    for group in rows(directory / "all.parquet"):
        assert group == sorted(group, key=lambda row: (-row[1], row[0]))
    merge_counts(paths[::-1], directory / "again.parquet")
    assert (directory / "again.parquet").read_bytes() == (directory / "all.parquet").read_bytes()
    write_counts(directory / "once.parquet", counts_table(total))
    assert rows(directory / "once.parquet") == rows(directory / "all.parquet")


def test_counts_that_cannot_be_read_are_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"pretoken": ["a"], "count": ["b"]}), tmp_path / "types.parquet")
    for name in ("none", "text", "other", "types"):
        with pytest.raises(UserError, match=rf"{name}\.parquet is not a Parquet file of pretoken counts"):
            list(read_counts(tmp_path / f"{name}.parquet"))
