"""Chunks: where text is cut, and that pretoken counts do not depend on it."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

import lm.text.chunks
from lm.common.errors import UserError
from lm.text.chunks import Range, cut_chunks
from lm.text.config import ChunkConfig
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.text.sources import open_ranges
from lm.tokenizer.pretoken_counts import count_pretokens
from tests.helpers.examples import examples
from tests.helpers.pretoken_counts import reference_counts, to_counter

EOT = END_OF_TEXT
SPECIALS = [EOT, EOT + EOT, "<| pad |>"]
WORDS_PATTERN = r"\p{L}+|\s+"

fragments = st.sampled_from(
    [*SPECIALS, "<|endof", "one", " two", "don't", "日本", "🙂", " ", "\n", "\n\n", "\t ", "\xa0", "\u3000 ", "x" * 30]
)
texts = st.lists(fragments, max_size=25).map("".join)
files = st.lists(texts, min_size=1, max_size=4)
special_tokens = st.sampled_from([SPECIALS, [EOT], []])
window_sizes = st.sampled_from(
    [1 << 16, *range(1, 65)]
)  # bytes per read: small ones, so that cuts lie at their borders


def write_files(directory: Path, contents: list[str]) -> list[str]:
    paths = [directory / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.encode())
    return list(map(str, paths))


def cut_by_windows(
    paths: list[str], special_tokens: list[str], target: int, pattern: str, window: int
) -> list[list[Range]]:
    """Return the chunks if ``window`` bytes are read at a time in the search for a cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.text.chunks._WINDOW_BYTES", window)
        return list(cut_chunks(paths, special_tokens, target, pattern))


@examples(200)
@given(files, st.integers(1, 60), st.sampled_from([GPT2_PATTERN, WORDS_PATTERN]), special_tokens, window_sizes)
def test_ranges_cover_all_bytes_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[str],
    target: int,
    pattern: str,
    specials: list[str],
    window: int,
) -> None:
    paths = write_files(tmp_path_factory.mktemp("chunks"), contents)
    chunks = cut_by_windows(paths, specials, target, pattern, window)
    assert chunks == list(cut_chunks(paths, specials, target, pattern)), "the windows change no cut"
    assert [] not in chunks
    ranges = [part for chunk in chunks for part in chunk]
    for number, content in enumerate(contents):
        data = content.encode()
        parts = [part for part in ranges if part.text == number]
        assert b"".join(data[part.start : part.end] for part in parts) == data
        assert [part.last for part in parts] == [part.end == len(data) for part in parts]
        assert all(part.start < part.end for part in parts)
        for part in parts:
            assert part.sha256 == hashlib.sha256(data[part.start : part.end]).hexdigest()
    assert [(part.text, part.start) for part in ranges] == sorted((part.text, part.start) for part in ranges)


@examples(200)
@given(files, st.integers(1, 60), st.sampled_from([GPT2_PATTERN, WORDS_PATTERN]), special_tokens, window_sizes)
def test_counts_of_chunks_add_up_to_the_counts_of_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[str],
    target: int,
    pattern: str,
    specials: list[str],
    window: int,
) -> None:
    paths = write_files(tmp_path_factory.mktemp("chunks"), contents)
    counts: Counter[str] = Counter()
    for chunk in cut_by_windows(paths, specials, target, pattern, window):
        for part in chunk:
            with open_ranges(paths[part.text], [(part.start, part.end)]) as blocks:
                counts += to_counter(count_pretokens([blocks], specials, pattern))
    assert counts == sum((reference_counts(content, specials, pattern) for content in contents), Counter())


def chunk_texts(paths: list[str], target: int, special_tokens: list[str], pattern: str = GPT2_PATTERN) -> list[str]:
    """Return the text of each chunk."""
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
    """A chunk that is only white space would not show whether the document before it is open."""
    paths = write_files(tmp_path, [f"one{EOT}\ntwo{EOT}\n", f"three{EOT} \n \n"])
    assert chunk_texts(paths, 4, [EOT]) == [f"one{EOT}", f"\ntwo{EOT}\n", f"three{EOT} \n \n"]


@pytest.mark.parametrize("shift", range(12))
def test_white_space_at_the_border_of_a_window_is_not_cut(tmp_path: Path, shift: int) -> None:
    """The cut before " end" is the only one that changes no pretoken."""
    start = "a" * (lm.text.chunks._WINDOW_BYTES + shift)  # the search begins at byte 9
    paths = write_files(tmp_path, [f"{start}\xa0\n\nb end"])
    assert chunk_texts(paths, 10, []) == [f"{start}\xa0\n\nb", " end"]


def test_white_space_with_a_character_across_two_blocks_stays_with_the_last_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.files.compression.BLOCK_BYTES", 4)
    for blanks in ("\n\n\n\u3000", "\u3000\u3000\u3000"):
        paths = write_files(tmp_path, [f"one two{EOT}{blanks}"])
        assert chunk_texts(paths, 4, [EOT]) == [f"one two{EOT}{blanks}"]


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


@examples(50)
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
    changed = 1 if has_separators else 2  # a document cut at white space also moves the cut before it
    same = max(0, len(before) - changed)
    assert after[:same] == before[:same]


def test_chunks_do_not_depend_on_how_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_files(tmp_path, ["".join(demo_stories(100))])
    expected = list(cut_chunks(paths, [EOT], 3000))
    assert len(expected) > 5
    monkeypatch.setattr("lm.files.compression.BLOCK_BYTES", 61)
    assert list(cut_chunks(paths, [EOT], 3000)) == expected


@examples(100)
@given(files, st.integers(1, 60), st.data())
def test_chunks_of_ranges_omit_the_text_between_them(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], target: int, data: st.DataObject
) -> None:
    """Each document is selected or not, at random."""
    selected_ranges, selected_bytes = [], []
    for content in contents:
        ends = [0, *accumulate(len(part.encode()) for part in content.split(EOT)[:-1] for part in (part + EOT,))]
        documents = [*zip(ends, [*ends[1:], len(content.encode())], strict=True)]
        selected = [part for part in documents if part[0] < part[1] and data.draw(st.booleans())]
        selected_ranges.append(selected)
        selected_bytes.append(b"".join(content.encode()[start:end] for start, end in selected))
    paths = write_files(tmp_path_factory.mktemp("chunks"), contents)
    chunks = list(cut_chunks(paths, [EOT], target, ranges=selected_ranges))
    ranges = [part for chunk in chunks for part in chunk]
    for number, content in enumerate(contents):
        parts = [part for part in ranges if part.text == number]
        pieces = [content.encode()[part.start : part.end] for part in parts]
        assert b"".join(pieces) == selected_bytes[number]
        assert [part.sha256 for part in parts] == [hashlib.sha256(piece).hexdigest() for piece in pieces]
        assert [part.last for part in parts] == [part is parts[-1] for part in parts]
    for chunk in chunks[:-1]:
        assert sum(part.end - part.start for part in chunk) >= target


def test_a_file_shorter_than_its_ranges_raises_a_user_error(tmp_path: Path) -> None:
    paths = write_files(tmp_path, ["tiny"])
    with pytest.raises(UserError, match=r"0\.txt is shorter than it was when it was read; run the pipeline again"):
        list(cut_chunks(paths, [EOT], 10, ranges=[[(0, 5)]]))


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_file_truncated_while_it_is_read_raises_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    """Without this error the search for a cut would not end."""
    path = f"memory:/{tmp_path}/0.txt" if is_remote else write_files(tmp_path, ["x" * 100_000])[0]
    if is_remote:
        MemoryFileSystem().pipe(path, b"x" * 100_000)
    original = lm.text.chunks._overlap

    def truncate_and_call(specials: Sequence[bytes]) -> bool:
        if is_remote:
            MemoryFileSystem.store[f"{tmp_path}/0.txt"].truncate(20_000)
        else:
            os.truncate(path, 20_000)
        return original(specials)

    monkeypatch.setattr("lm.text.chunks._overlap", truncate_and_call)
    with pytest.raises(UserError, match=r"0\.txt was cut short while it was read"):
        list(cut_chunks([path], [EOT], 50_000))


def test_no_files_and_empty_files_have_no_chunks(tmp_path: Path) -> None:
    assert list(cut_chunks([], [EOT], 10)) == []
    assert list(cut_chunks(write_files(tmp_path, ["", ""]), [EOT], 10)) == []


@pytest.mark.parametrize("target", [0, -1])
def test_a_target_below_one_raises_a_user_error(target: int) -> None:
    with pytest.raises(UserError, match=r"chunk\.target_bytes"):
        ChunkConfig(target_bytes=target)
