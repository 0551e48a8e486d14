"""The files of a tokenizer: saving, loading, and what users get wrong."""

from pathlib import Path

import pytest

from lm.errors import UserError
from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer
from tests.tokenizers_made import SPECIALS, bytes_tokenizer


def assert_same(one: Tokenizer, other: Tokenizer) -> None:
    """Two tokenizers hold the same, in the same order."""
    assert sorted(one.vocab.items()) == sorted(other.vocab.items())
    assert one.merges == other.merges
    assert one.special_tokens == other.special_tokens
    assert one.pattern == other.pattern


def test_a_saved_tokenizer_loads_the_same(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    for number, saved in enumerate([tokenizer, custom_tokenizer, bytes_tokenizer()]):
        saved.save(tmp_path / str(number))
        assert_same(Tokenizer.load(tmp_path / str(number)), saved)


def test_a_saved_tokenizer_reads_from_its_gpt2_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert_same(Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt", SPECIALS), tokenizer)
    unnamed = Tokenizer.from_files(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert unnamed.special_tokens == []
    assert unnamed.encode("Once upon a time") == tokenizer.encode("Once upon a time")
    assert unnamed.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT


def test_merges_may_begin_with_a_version_line_and_end_with_crlf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_bytes(b"#version: 0.2\r\n" + merges.read_bytes().replace(b"\n", b"\r\n"))
    assert Tokenizer.from_files(tmp_path / "vocab.json", merges, SPECIALS).merges == tokenizer.merges


def test_the_vocabulary_is_dumped_for_human_eyes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    lines = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(tokenizer.vocab)
    assert lines[ord("A")].split() == ["65", "'A'"]
    left, right = tokenizer.merges[0]
    assert lines[256 + len(SPECIALS)].split("  ")[-1] == f"= {left.decode()!r} + {right.decode()!r}"


def test_a_vocabulary_and_merges_of_two_tokenizers_are_a_users_mistake() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    with pytest.raises(UserError, match=r"lacks the token b'ab'.*not of one tokenizer"):
        Tokenizer(vocab, [(b"a", b"b")])
    with pytest.raises(UserError, match="lacks the token b'xy'"):
        Tokenizer(vocab, [(b"xy", b"b")])
    with pytest.raises(UserError, match="lacks the token b'A'"):
        Tokenizer({i: token for i, token in vocab.items() if i != 65}, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not a JSON file"),
        (b"\xff", "is not a JSON file"),
        (b"[]", "is not a vocabulary"),
        (b'{"a": "0"}', "the id of 'a', '0', is not a whole number used once"),
        (b'{"a": -1}', "the id of 'a', -1,"),
        (b'{"a": 0, "b": 0}', "the id of 'b', 0,"),
        (b'{"\\ud800": 0}', "lone surrogate"),
        (b'{"a": 0}', "lacks the token"),
    ],
)
def test_a_malformed_vocabulary_is_a_users_mistake(tmp_path: Path, content: bytes, message: str) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_bytes(content)
    merges.write_text("")
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_files(vocab, merges)
    assert "lacks" in message or str(vocab) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"), [("t h\nth\n", 2), ("t h\n\nt h e\n", 3), ("a \u2603\n", 1), ("#version\nt\th\n", 2)]
)
def test_malformed_merges_are_a_users_mistake(tmp_path: Path, content: str, line: int) -> None:
    bytes_tokenizer().save(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"line {line}: ") as caught:
        Tokenizer.from_files(tmp_path / "vocab.json", merges)
    assert str(merges) in str(caught.value)


def test_merges_that_are_not_text_are_a_users_mistake(tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"merges\.txt cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_missing_file_is_a_users_mistake(tmp_path: Path, name: str) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"special_tokens": []}', "null", "no json"])
def test_a_malformed_config_is_a_users_mistake(tmp_path: Path, content: str) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("special", ["é", "Ġ"])
def test_a_special_token_spelled_as_a_byte_is_not_saved(tmp_path: Path, special: str) -> None:
    """GPT-2's spelling of the byte 0xE9 is ``é``: a file with both would lose one of them."""
    with pytest.raises(UserError, match="choose another special token"):
        bytes_tokenizer([special]).save(tmp_path)


def test_any_other_special_token_is_saved(tmp_path: Path) -> None:
    specials = ["�", "a", " ", "\n\n", "日本", '"<|é|>"', "Ġa"]
    tokenizer = bytes_tokenizer(specials)
    tokenizer.save(tmp_path)
    assert_same(Tokenizer.load(tmp_path), tokenizer)
    assert (tmp_path / "tokenizer.json").exists()
