"""GPT-2's files and saved tokenizers: writing, reading, malformed files."""

import re
from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.formats.vocab_merges import bytes_to_unicode, read_merges, read_vocab, unicode_to_bytes
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import SPECIALS, bytes_tokenizer


def assert_same(tokenizer: Tokenizer, expected: Tokenizer) -> None:
    assert tokenizer.vocab == expected.vocab
    assert tokenizer.merges == expected.merges
    assert tokenizer.special_tokens == expected.special_tokens
    assert tokenizer.pattern == expected.pattern


def test_a_saved_tokenizer_loads_the_same(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    for number, saved in enumerate([tokenizer, custom_tokenizer, bytes_tokenizer()]):
        saved.save(tmp_path / str(number))
        assert_same(Tokenizer.load(tmp_path / str(number)), saved)


def test_a_saved_tokenizer_reads_from_its_gpt2_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert_same(Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt", SPECIALS), tokenizer)
    with pytest.raises(UserError, match="The special tokens are one string"):
        Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt", "<s>")
    unnamed = Tokenizer.from_files(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert unnamed.special_tokens == []
    assert unnamed.encode("Once upon a time") == tokenizer.encode("Once upon a time")
    assert unnamed.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT


def test_merges_may_begin_with_a_version_line_and_end_with_crlf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_bytes(b"#version: 0.2\r\n" + merges.read_bytes().replace(b"\n", b"\r\n"))
    assert Tokenizer.from_files(tmp_path / "vocab.json", merges, SPECIALS).merges == tokenizer.merges


def test_a_readable_vocabulary_is_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    lines = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(tokenizer.vocab)
    assert lines[ord("A")].split() == ["65", "'A'"]
    left, right = tokenizer.merges[0]
    assert lines[256 + len(SPECIALS)].split("  ")[-1] == f"= {left.decode()!r} + {right.decode()!r}"


def test_merges_of_another_vocabulary_are_rejected() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    with pytest.raises(UserError, match=r"lacks the token b'ab'.*of the same tokenizer"):
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
def test_a_malformed_vocabulary_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_bytes(content)
    merges.write_text("")
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_files(vocab, merges)
    assert "lacks" in message or str(vocab) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"), [("t h\nth\n", 2), ("t h\n\nt h e\n", 3), ("a \u2603\n", 1), ("#version\nt\th\n", 2)]
)
def test_malformed_merges_are_rejected(tmp_path: Path, content: str, line: int) -> None:
    bytes_tokenizer().save(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"line {line}: ") as caught:
        Tokenizer.from_files(tmp_path / "vocab.json", merges)
    assert str(merges) in str(caught.value)


def test_merges_that_are_not_text_are_rejected(tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"merges\.txt cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"special_tokens": []}', "null", "no json"])
def test_a_malformed_config_is_rejected(tmp_path: Path, content: str) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("special", ["é", "Ġ"])
def test_a_special_token_with_the_text_of_a_byte_is_not_saved(tmp_path: Path, special: str) -> None:
    """GPT-2 writes the byte 0xE9 as ``é``; a file with both would lose one of them."""
    with pytest.raises(UserError, match="choose another special token"):
        bytes_tokenizer([special]).save(tmp_path)


def test_any_other_special_token_is_saved(tmp_path: Path) -> None:
    specials = ["�", "a", " ", "\n\n", "日本", '"<|é|>"', "Ġa"]
    tokenizer = bytes_tokenizer(specials)
    tokenizer.save(tmp_path)
    assert_same(Tokenizer.load(tmp_path), tokenizer)
    assert (tmp_path / "tokenizer.json").exists()


def test_unicode_to_bytes_inverts_bytes_to_unicode() -> None:
    assert bytes_to_unicode(b" A\n\x00\xad\xff") == "ĠAĊĀŃÿ"
    assert len(set(bytes_to_unicode(bytes(range(256))))) == 256
    assert unicode_to_bytes(bytes_to_unicode(bytes(range(256)))) == bytes(range(256))


@pytest.mark.parametrize("character", [" ", "\n", "\x7f", "\xa0", "\xad", "ń", "日", "🙂", "\ud800"])
def test_other_characters_stand_for_no_byte(character: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        unicode_to_bytes("a" + character)


def test_a_token_outside_the_alphabet_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text('{"Ġa": 0, "a b": 1, "日": 2, "é": 3, "Ġé": 4}', encoding="utf-8")
    assert read_vocab(path) == {0: b" a", 1: b"a b", 2: "日".encode(), 3: b"\xe9", 4: b" \xe9"}
    assert read_vocab(path, ["é", "Ġa"])[3] == "é".encode()
    assert read_vocab(path, ["é", "Ġa"])[0] == "Ġa".encode()


@pytest.mark.parametrize("content", ['{"a": true}', '{"a": 1.0}', '{"a": null}', '{"a": 0, "b c": 0}'])
def test_an_id_that_is_no_unique_whole_number_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"vocab\.json: the id of '(a|b c)', .* is not a whole number used once"):
        read_vocab(path)


@pytest.mark.parametrize("line", ["a ", " a", "a", "a  b", "a b ", "a b c", "a \u2003", " "])
def test_a_merge_that_is_not_two_tokens_is_rejected(tmp_path: Path, line: str) -> None:
    path = tmp_path / "merges.txt"
    path.write_text(f"#version: 0.2\n\na b\n{line}\nc d\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(f"merges.txt, line 4: {line!r} is not two tokens")):
        read_merges(path)
    path.write_text("#version: 0.2\n\na b\nĠ Ċ\n#version c", encoding="utf-8")
    assert read_merges(path) == [(b"a", b"b"), (b" ", b"\n"), (b"#version", b"c")]
