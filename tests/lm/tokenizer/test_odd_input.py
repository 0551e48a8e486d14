"""Tokenizers and trainings that a user got wrong, or that are rare: a clear error, or the ids of the reference."""

from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.config import TokenizerConfig
from lm.tokenizer.pretoken_counts import count_files
from lm.tokenizer.tokenizer import Tokenizer

BYTES = {i: bytes([i]) for i in range(256)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, []), "empty or has a negative token id"),
        (({**BYTES, -5: b"ab"}, [(b"a", b"b")]), "empty or has a negative token id"),
        (({**BYTES, 256: b"", 257: b"ab"}, [(b"", b"a")]), "merge has an empty part"),
        ((BYTES, [], None, "cl100k_base"), "no pattern 'cl100k_base'.*did you mean 'cl100k'"),
    ],
)
def test_impossible_tokenizers_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer(*arguments)


def test_a_training_knows_the_names_of_patterns(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc abc abd ab 1234 12345\n" * 10)
    named = train_bpe(path, 270, [], pattern="cl100k")
    assert all(b" " not in token[1:] for token in named[0].values()), "no merge crosses a word"
    with pytest.raises(UserError, match="no pattern 'cl100'"):
        train_bpe(path, 270, [], pattern="cl100")
    with pytest.raises(UserError, match="threads is -1"):
        count_files([path], [], threads=-1)
    with pytest.raises(UserError, match=r"vocab_size 10000000000 is too large"):
        train_bpe(path, 10**10, [])
    with pytest.raises(UserError, match="vocab_size is 10000000000; it must be between"):
        TokenizerConfig(vocab_size=10**10)


def test_text_does_not_become_a_special_token_with_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc abc abd\nab ab. hello hello\n" * 10)
    vocab, merges = train_bpe(path, 262, ["\n"])
    trained = Tokenizer(vocab, merges, ["\n"])
    trained.save(tmp_path / "saved")
    read = [Tokenizer.load(tmp_path / "saved"), Tokenizer.from_tokenizer_json(tmp_path / "saved" / "tokenizer.json")]
    for tokenizer in (trained, *read):
        assert tokenizer.encode("a\n", ()) == [97, 10] == tokenizer.encode_reference("a\n", ())
        assert tokenizer.encode("a\n") == [97, 256] == tokenizer.encode_reference("a\n")


def test_a_token_whose_text_another_took_is_not_found() -> None:
    """White space that a token takes may be another token."""
    wide = AddedToken("  ", lstrip=True, rstrip=True, single_word=True)
    tokenizer = Tokenizer(BYTES, [], added_tokens=[wide])
    text = "\xa0abé<    \xa0ab"
    assert tokenizer.encode(text).count(256) == 1
    assert tokenizer.encode(text) == tokenizer.encode_reference(text)


def test_pairs_of_surrogates_are_joined_before_they_are_normalized() -> None:
    tokenizer = Tokenizer(BYTES, [], normalizer="NFC")
    assert tokenizer.encode("\ud834\udd5e") == tokenizer.encode("\U0001d15e")
