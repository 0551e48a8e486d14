"""A tokenizer that is read from the user's cache is the one that was read from its files."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.files.cache_dir import cache_directory
from lm.tokenizer import array_cache
from lm.tokenizer import tokenizer as module
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.formats import tiktoken, vocab_merges
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.families import family_json
from tests.helpers.tokenizers import SPECIALS, make_tokenizer, published_parts, stable_text


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, for tokenizers of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_MIN_CACHED_SIZE", 0)
    return cache_directory() / "tokenizers"


def is_from_cache(tokenizer: Tokenizer) -> bool:
    return "vocab" not in vars(tokenizer)


def read_twice(read: Callable[[], Tokenizer]) -> tuple[Tokenizer, Tokenizer]:
    first, second = read(), read()
    assert not is_from_cache(first) and is_from_cache(second)
    return first, second


def check_equal(first: Tokenizer, second: Tokenizer, text: str) -> None:
    ids = second.encode(text)  # before any table is made of the arrays
    assert ids == first.encode(text) == first.encode_reference(text) == second.encode_reference(text)
    assert second.decode(ids) == first.decode(ids)
    assert second.parts == first.parts
    assert list(second.vocab.items()) == list(first.vocab.items())
    for name in ("size", "special_ids", "added_tokens", "added_ids"):
        assert getattr(second, name) == getattr(first, name), name
    for name in ("_merge_table", "_whole_tokens"):
        pairs = zip(getattr(first._fast_encoder, name), getattr(second._fast_encoder, name), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours, theirs)
            if isinstance(ours, np.ndarray):  # else the kernels are compiled for another type
                assert (ours.dtype, ours.flags.writeable, ours.flags.c_contiguous) == (
                    theirs.dtype,
                    theirs.flags.writeable,
                    theirs.flags.c_contiguous,
                )


TEXT = "Once upon a time<|endoftext|>  there was café 日本語 ababa 1234\n\n <think> é!\r\n" + "x" * 40


@pytest.mark.parametrize("name", ["gpt2", "gpt4", "gpt-oss", "llama3", "qwen3", "olmo", "roberta", "words"])
def test_tokenizer_json_of_each_family(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(family_json(name), encoding="utf-8")
    check_equal(*read_twice(lambda: Tokenizer.from_tokenizer_json(path)), TEXT)


@pytest.mark.parametrize("pattern", ["gpt2", "llama3"])
def test_all_other_formats(pattern: str, tmp_path: Path) -> None:
    trained = make_tokenizer(pattern)
    trained.save(tmp_path)
    check_equal(*read_twice(lambda: Tokenizer.load(tmp_path)), TEXT)
    plain = Tokenizer({i: t for i, t in trained.vocab.items() if i not in trained.special_ids.values()}, trained.merges)
    plain.save_tiktoken(tmp_path / "ranks.tiktoken")
    specials = {"<|endoftext|>": 5000}
    check_equal(*read_twice(lambda: Tokenizer.from_tiktoken(tmp_path / "ranks.tiktoken", specials, pattern)), TEXT)
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    check_equal(*read_twice(lambda: Tokenizer.from_files(*files, SPECIALS)), TEXT)
    assert not is_from_cache(Tokenizer.from_files(*files, SPECIALS[:1])), "other special tokens"


def test_gpt2(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files = shared_data / "gpt2_vocab.json", shared_data / "gpt2_merges.txt"
    Tokenizer.from_files(*files)
    monkeypatch.setattr(vocab_merges, "read_vocab", None)  # is not called
    assert Tokenizer.from_files(*files).encode("a café") == [64, 40304]


@examples(100)
@given(st.sets(st.binary(max_size=3), max_size=20), st.booleans(), st.integers(300, 70_000), stable_text)
def test_any_vocabulary(others: set[bytes], ignore_merges: bool, start: int, text: str) -> None:
    base = TRAINED
    vocab = {**base.vocab, **{start + 1000 + i: token for i, token in enumerate(others - set(base.vocab.values()))}}
    flagged = [AddedToken("é!", special=False, lstrip=True), AddedToken("ababa", id=start + 2000)]
    first = Tokenizer(vocab, base.merges, SPECIALS[:2], "gpt2", ignore_merges, None, flagged)
    arrays = first._to_arrays([])
    check_equal(first, Tokenizer._from_arrays(arrays._replace(options=json.loads(json.dumps(arrays.options)))), text)


TRAINED = make_tokenizer(special_tokens=SPECIALS[:2])


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    make_tokenizer().save(tmp_path)
    read_twice(lambda: Tokenizer.load(tmp_path))
    make_tokenizer("llama3").save(tmp_path)
    assert Tokenizer.load(tmp_path).parts == make_tokenizer("llama3").parts
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match="cannot be read as merges"):
        Tokenizer.load(tmp_path)


def test_files_that_change_while_they_are_read_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer().save(tmp_path / "tokenizer")
    read_merges = vocab_merges.read_merges

    def read_and_replace(path: Path) -> list[tuple[bytes, bytes]]:
        merges = read_merges(path)
        make_tokenizer("llama3").save(tmp_path / "tokenizer")
        return merges

    with monkeypatch.context() as patched:
        patched.setattr(vocab_merges, "read_merges", read_and_replace)
        Tokenizer.load(tmp_path / "tokenizer")
    make_tokenizer().save(tmp_path / "tokenizer")
    read_twice(lambda: Tokenizer.load(tmp_path / "tokenizer"))


def test_a_damaged_file_of_the_cache_is_replaced(tmp_path: Path, own_cache: Path) -> None:
    trained = make_tokenizer()
    trained.save(tmp_path)
    for damage in (lambda data: data[:-1], lambda data: data[:100] + b"\x01" + data[101:], lambda data: b""):
        read_twice(lambda: Tokenizer.load(tmp_path))
        [path] = own_cache.iterdir()
        path.write_bytes(damage(path.read_bytes()))
        read_twice(lambda: Tokenizer.load(tmp_path))
        [path] = own_cache.iterdir()
        path.unlink()


def test_a_cache_that_is_not_writable_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = make_tokenizer()
    trained.save(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert Tokenizer.load(tmp_path).parts == trained.parts


def test_small_tokenizers_and_slow_patterns_are_not_cached(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(r"\w+").save(tmp_path)
    Tokenizer.load(tmp_path)
    monkeypatch.undo()
    make_tokenizer().save(tmp_path)
    Tokenizer.load(tmp_path)
    assert not own_cache.exists()


def test_the_least_recently_used_are_removed(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_cache, "_MAX_FILES", 2)
    folders = [tmp_path / name for name in "abc"]
    for number, folder in enumerate(folders):
        make_tokenizer(special_tokens=[f"<{number}>"]).save(folder)
    Tokenizer.load(folders[0])
    Tokenizer.load(folders[1])
    for path in own_cache.iterdir():
        os.utime(path, (1, 1))
    assert is_from_cache(Tokenizer.load(folders[0]))  # used
    Tokenizer.load(folders[2])
    assert len(list(own_cache.iterdir())) == 2
    assert [is_from_cache(Tokenizer.load(folders[i])) for i in (0, 2, 1)] == [True, True, False]


def test_what_is_ignored_is_logged_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads(family_json("llama3"))
    content["truncation"] = {"max_length": 512}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "lm.tokenizer"):
        read_twice(lambda: Tokenizer.from_tokenizer_json(path))
    assert [message for message in caplog.messages if "ignored" in message] == [f"{path}: truncation is ignored."] * 2


def test_rank_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_tokenizer(special_tokens=[])
    plain.save_tiktoken(tmp_path / "ranks")
    Tokenizer.from_tiktoken(tmp_path / "ranks")
    monkeypatch.setattr(tiktoken, "read_tiktoken", None)  # is not called
    assert Tokenizer.from_tiktoken(tmp_path / "ranks").parts == published_parts(plain)
