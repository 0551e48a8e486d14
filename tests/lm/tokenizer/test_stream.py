"""Counting, training and encoding of files: neither parts nor threads change the result."""

import gzip
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lm.common.errors import UserError
from lm.text.config import ChunkConfig
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.pretoken_counts import count_files
from lm.tokenizer.stream import encode_files
from lm.tokenizer.tokenizer import Tokenizer, token_dtype
from tests.helpers.naive_bpe import naive_merges
from tests.helpers.pretoken_counts import make_text, reference_counts, to_counter
from tests.helpers.tokenizers import CUSTOM_PATTERN, SPECIALS, bytes_tokenizer, make_tokenizer

THREADS = [1, 2, 5]


@pytest.fixture(scope="module")
def contents() -> list[str]:
    """Texts with overlapping special tokens, without any, with long pretokens, and without content."""
    stories = demo_stories(120)
    return [
        "".join(story + special for story, special in zip(stories, SPECIALS * 30, strict=True)),
        "".join(stories).replace(END_OF_TEXT, "\n\n日本　語 "),
        "x" * 5_000 + " " + "é!" * 50 + "\u2003" * 300 + "don't  \n\n",
        "",
        END_OF_TEXT * 999 + make_text(2000),
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


@pytest.fixture(params=[700, 1 << 24], ids=["parts", "whole"])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of the parts in which threads read a file."""
    config = ChunkConfig(request.param)
    monkeypatch.setattr("lm.text.chunks.ChunkConfig", lambda: config)
    return request.param


@pytest.mark.parametrize("threads", THREADS)
def test_counts_of_files_equal_the_reference(
    files: Sequence[Path], contents: list[str], part_bytes: int, threads: int
) -> None:
    expected = sum((reference_counts(text, SPECIALS, GPT2_PATTERN) for text in contents), Counter())
    table = count_files(files, SPECIALS, threads=threads)
    assert len(table) == len(expected)
    assert to_counter([table]) == expected


def test_counts_of_files_with_a_custom_pattern(files: Sequence[Path], contents: list[str], part_bytes: int) -> None:
    expected = sum((reference_counts(text, SPECIALS, CUSTOM_PATTERN) for text in contents), Counter())
    assert to_counter([count_files(list(map(str, files)), SPECIALS, CUSTOM_PATTERN, threads=2)]) == expected


@pytest.mark.parametrize("threads", THREADS)
def test_encoded_files_have_the_ids_of_the_texts(
    tokenizer: Tokenizer, files: Sequence[Path], contents: list[str], part_bytes: int, threads: int, tmp_path: Path
) -> None:
    written = encode_files(files, tokenizer, tmp_path / "ids", threads)
    has_parts = part_bytes < 1 << 20 and files[0].suffix != ".gz"
    assert len(written) > 50 if has_parts else len(written) <= len(files)
    ids = b"".join(path.read_bytes() for path in written)
    expected = [token_id for text in contents for token_id in tokenizer.encode_reference(text, SPECIALS)]
    assert np.frombuffer(ids, token_dtype(tokenizer.size)).tolist() == expected


def test_one_tokenizer_in_eight_threads(contents: list[str]) -> None:
    tokenizer = make_tokenizer()

    def encode_lazily(text: str) -> list[int]:
        return list(tokenizer.encode_iterable([text]))

    texts = [text[i:] for i in range(8) for text in contents]
    expected = [tokenizer.encode_reference(text, SPECIALS) for text in texts]
    lazy_expected = [encode_lazily(text) for text in texts[::3]]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            eager = [pool.submit(tokenizer.encode, text) for text in texts]
            lazy = [pool.submit(encode_lazily, text) for text in texts[::3]]
            assert [future.result() for future in eager] == expected
            assert [future.result() for future in lazy] == lazy_expected


def test_an_abandoned_encoding_does_not_affect_others(tokenizer: Tokenizer, contents: list[str]) -> None:
    for text in contents:
        iterator = tokenizer.encode_iterable([text])
        assert isinstance(iterator, Generator)
        first = list(islice(iterator, 10))
        expected = tokenizer.encode_reference(text, SPECIALS)
        assert tokenizer.encode(text) == expected
        assert first + list(iterator) == expected
        iterator.close()
        assert tokenizer.encode(text) == expected


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, CUSTOM_PATTERN], ids=["gpt2", "custom"])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("job", ["count", "train", "encode"])
def test_the_error_for_invalid_utf8_names_file_byte_and_offset(
    tmp_path: Path, part_bytes: int, suffix: str, pattern: str, job: str
) -> None:
    path = tmp_path / f"bad{suffix}"
    data = "".join(demo_stories(60)).encode()
    data = data[:10_000] + b"\xff" + data[10_000:]
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


@pytest.mark.parametrize("min_frequency", [1, 7])
def test_training_does_not_depend_on_the_threads(
    files: Sequence[Path], contents: list[str], part_bytes: int, min_frequency: int
) -> None:
    counts = reference_counts(contents[0], SPECIALS, GPT2_PATTERN)
    expected = naive_merges({word.encode(): count for word, count in counts.items()}, 250, min_frequency)
    for threads in (*THREADS, None):
        vocab, merges = train_bpe(
            files[0], 256 + len(SPECIALS) + 250, SPECIALS, min_frequency=min_frequency, threads=threads
        )
        assert merges == expected
        assert list(vocab.values())[256 + len(SPECIALS) :] == [left + right for left, right in expected]
