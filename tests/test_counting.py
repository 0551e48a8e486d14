"""Counting, training and encoding of files: memory, stretches and threads change no result."""

import gzip
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.bpe import Merges, TokenizerConfig, train_bpe, train_merges
from lm.chunks import ChunkConfig
from lm.counts import DEFAULT_MEMORY, count_files, count_pretokens, count_to_file, read_counts
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN
from lm.shards import encode_files
from lm.tokenizer import Tokenizer, token_dtype
from tests.test_chunks import count_of, counter_of
from tests.tokenizers_made import CUSTOM_PATTERN, SPECIALS, bytes_tokenizer, counts_table, make_tokenizer, pieces

THREADS = [1, 2, 5]
SMALL = 1 << 20  # bytes of memory: less than the smallest table takes
a_text = st.lists(pieces | st.text(max_size=8) | st.integers(1, 200).map("\x00é".__mul__), max_size=15).map("".join)


def different_words(number: int, prefix: str = "") -> str:
    """A text of ``number`` different pretokens; some are there twice."""
    source = random.Random(number)
    found: dict[str, None] = {}
    while len(found) < number:
        found[" " + prefix + "".join(source.choices("abcdefghijklmnopqrstuvwxyzéß", k=source.randrange(3, 22)))] = None
    return "".join([*found, *list(found)[::3]])


def blocks_of(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


# counts


@settings(deadline=None, max_examples=300)
@given(st.lists(a_text, max_size=3), st.integers(1, 50), st.integers(1, 200))
def test_counts_in_blocks_and_windows_equal_the_reference(contents: list[str], size: int, window: int) -> None:
    specials = [*SPECIALS, "<|endof", "<"]  # they begin like one another
    expected = sum((count_of(text, specials, GPT2_PATTERN) for text in contents), Counter())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.buffers.windows.__defaults__", (window,))
        [table] = count_pretokens([blocks_of(text.encode(), size) for text in contents], specials)
    assert len(table) == len(expected)  # each once
    assert counter_of([table]) == expected


@pytest.mark.parametrize("prefix", ["", "x" * 20, "\x00" * 15], ids=["short", "long", "nul"])
def test_counts_of_more_pretokens_than_the_table_begins_with(prefix: str) -> None:
    text = different_words(60_000, prefix)
    tables = list(count_pretokens([[text.encode()]], []))
    assert len(tables) == 1
    assert counter_of(tables) == count_of(text, [], GPT2_PATTERN)


@pytest.mark.parametrize("prefix", ["", "x" * 1500], ids=["short", "long"])
def test_a_small_memory_gives_more_tables_with_the_same_sum(tmp_path: Path, prefix: str) -> None:
    text = different_words(70_000 if not prefix else 3_000, prefix)
    contents = [text, text[: len(text) // 2], ""]
    blocks = [list(blocks_of(content.encode(), 100_003)) for content in contents]
    expected = sum((count_of(content, [], GPT2_PATTERN) for content in contents), Counter())
    tables = list(count_pretokens(blocks, [], memory=SMALL))
    assert len(tables) > 2
    assert counter_of(tables) == expected
    assert len(list(count_pretokens(blocks, []))) == 1
    totals = expected.total(), len(expected)
    assert count_to_file(tmp_path / "spilled.parquet", blocks, [], GPT2_PATTERN, SMALL) == totals
    assert count_to_file(tmp_path / "whole.parquet", blocks, [], GPT2_PATTERN, DEFAULT_MEMORY) == totals
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spilled.parquet", "whole.parquet"]
    assert (tmp_path / "spilled.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert counter_of([read_counts(tmp_path / "whole.parquet")]) == expected


def test_a_pretoken_that_is_larger_than_the_memory() -> None:
    text = f"one {'y' * 3_000_000} two {'z' * 3_000_000}"
    assert counter_of(count_pretokens([[text.encode()]], [], memory=SMALL)) == count_of(text, [], GPT2_PATTERN)


# files


@pytest.fixture(scope="module")
def contents() -> list[str]:
    """Documents with special tokens that overlap, without any, and with one that is never white space."""
    stories = demo_stories(120)
    return [
        "".join(story + special for story, special in zip(stories, SPECIALS * 30, strict=True)),
        "".join(stories).replace(END_OF_TEXT, "\n\n日本　語 "),
        "x" * 5_000 + " " + "é!" * 50 + "\u2003" * 300 + "don't  \n\n",
        "",
        END_OF_TEXT * 999 + different_words(2000),
    ]


@pytest.fixture(scope="module", params=["plain", "gz"])
def files(
    request: pytest.FixtureRequest, contents: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Sequence[Path]:
    directory = tmp_path_factory.mktemp("texts")
    pack: Callable[[bytes], bytes] = gzip.compress if request.param == "gz" else bytes
    suffix = ".gz" if request.param == "gz" else ""
    paths = [directory / f"{i}.txt{suffix}" for i in range(len(contents))]
    for path, text in zip(paths, contents, strict=True):
        path.write_bytes(pack(text.encode()))
    return paths


@pytest.fixture(params=[700, 1 << 24], ids=["stretches", "whole"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of a stretch of a file."""
    config = ChunkConfig(request.param)
    monkeypatch.setattr("lm.chunks.ChunkConfig", lambda: config)
    return request.param


@pytest.mark.parametrize("threads", THREADS)
def test_counts_of_files_equal_the_reference(
    files: Sequence[Path], contents: list[str], target: int, threads: int
) -> None:
    expected = sum((count_of(text, SPECIALS, GPT2_PATTERN) for text in contents), Counter())
    table = count_files(files, SPECIALS, threads=threads)
    assert len(table) == len(expected)
    assert counter_of([table]) == expected


def test_counts_of_files_by_another_pattern(files: Sequence[Path], contents: list[str], target: int) -> None:
    expected = sum((count_of(text, SPECIALS, CUSTOM_PATTERN) for text in contents), Counter())
    assert counter_of([count_files(map(str, files), SPECIALS, CUSTOM_PATTERN, threads=2)]) == expected


@pytest.mark.parametrize("threads", THREADS)
def test_encoded_files_join_to_the_ids_of_the_texts(
    tokenizer: Tokenizer, files: Sequence[Path], contents: list[str], target: int, threads: int, tmp_path: Path
) -> None:
    written = encode_files(files, tokenizer, tmp_path / "ids", threads)
    is_cut = target < 1 << 20 and files[0].suffix != ".gz"
    assert len(written) > 50 if is_cut else len(written) <= len(files)
    ids = b"".join(path.read_bytes() for path in written)
    expected = [token_id for text in contents for token_id in tokenizer.encode_reference(text, SPECIALS)]
    assert np.frombuffer(ids, token_dtype(tokenizer.size)).tolist() == expected


def test_one_tokenizer_in_eight_threads(contents: list[str]) -> None:
    tokenizer = make_tokenizer()
    texts = [text[i:] for i in range(8) for text in contents]
    expected = [tokenizer.encode_reference(text, SPECIALS) for text in texts]
    alone = [list(tokenizer.encode_iterable([text])) for text in texts[::3]]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            jobs = [pool.submit(tokenizer.encode, text) for text in texts]
            lazy = [pool.submit(lambda text=text: list(tokenizer.encode_iterable([text]))) for text in texts[::3]]
            assert [job.result() for job in jobs] == expected
            assert [job.result() for job in lazy] == alone


def test_an_encoding_that_is_left_early_harms_no_other(tokenizer: Tokenizer, contents: list[str]) -> None:
    for text in contents:
        begun = tokenizer.encode_iterable([text])
        first = [token_id for token_id, _ in zip(begun, range(10), strict=False)]
        expected = tokenizer.encode_reference(text, SPECIALS)
        assert tokenizer.encode(text) == expected
        assert first + list(begun) == expected or len(first) == 10
        begun.close()
        assert tokenizer.encode(text) == expected


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, CUSTOM_PATTERN], ids=["gpt2", "custom"])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("job", ["count", "train", "encode"])
def test_a_file_that_is_not_utf8_is_named_with_byte_and_place(
    tmp_path: Path, target: int, suffix: str, pattern: str, job: str
) -> None:
    path = tmp_path / f"bad{suffix}"
    data = "".join(demo_stories(60)).encode()
    place = 10_000
    data = data[:place] + b"\xff" + data[place:]
    path.write_bytes(gzip.compress(data) if suffix == ".txt.gz" else data)
    good = tmp_path / "good.txt"
    good.write_text("good")
    tokenizer = Tokenizer(bytes_tokenizer().vocab, [], [END_OF_TEXT], pattern)
    jobs: dict[str, Callable[[], object]] = {
        "count": lambda: count_files([good, path], [END_OF_TEXT], pattern, threads=2),
        "train": lambda: train_bpe(path, 300, [END_OF_TEXT], pattern, threads=2),
        "encode": lambda: encode_files([good, path], tokenizer, tmp_path / "ids", threads=2),
    }
    with pytest.raises(UserError, match=r"not UTF-8: byte 0xff at offset 10,000") as caught:
        jobs[job]()
    assert str(path) in str(caught.value)


# training


def frequent_merges(counts: dict[bytes, int], merges: int, min_frequency: int) -> Merges:
    """As the textbook has it, but no pair that occurs less often than ``min_frequency`` is merged."""
    words = [([bytes([byte]) for byte in pretoken], count) for pretoken, count in counts.items()]
    learned: Merges = []
    while len(learned) < merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words:
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None or pairs[best] < min_frequency:
            break
        learned.append(best)
        for word, _ in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [word[i] + word[i + 1]]
                i += 1
    return learned


some_counts = st.dictionaries(
    st.text("ab", max_size=15).map(str.encode) | st.text("abcé", max_size=8).map(str.encode), st.integers(1, 6)
)


@settings(deadline=None, max_examples=300)
@given(some_counts, st.integers(0, 40), st.integers(1, 15))
def test_pairs_below_the_minimum_are_not_merged(counts: dict[bytes, int], merges: int, least: int) -> None:
    assert train_merges(counts_table(counts), 256 + merges, [], least)[1] == frequent_merges(counts, merges, least)


@pytest.mark.parametrize("least", [0, -1])
def test_a_minimum_below_one_is_a_users_mistake(tmp_path: Path, least: int) -> None:
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(UserError, match="min_frequency"):
        train_bpe(tmp_path / "text.txt", 300, [], min_frequency=least)
    with pytest.raises(UserError, match="min_frequency"):
        train_merges(counts_table({b"ab": 1}), 300, [], least)
    with pytest.raises(UserError, match="min_frequency"):
        TokenizerConfig(min_frequency=least)


@pytest.mark.parametrize("least", [1, 7])
def test_training_does_not_depend_on_the_threads(
    files: Sequence[Path], contents: list[str], target: int, least: int
) -> None:
    expected = frequent_merges(
        {word.encode(): count for word, count in count_of(contents[0], SPECIALS, GPT2_PATTERN).items()}, 250, least
    )
    for threads in (*THREADS, None):
        vocab, merges = train_bpe(files[0], 256 + len(SPECIALS) + 250, SPECIALS, min_frequency=least, threads=threads)
        assert merges == expected
        assert list(vocab.values())[256 + len(SPECIALS) :] == [left + right for left, right in expected]
