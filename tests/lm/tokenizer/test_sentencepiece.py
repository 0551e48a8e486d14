"""SentencePiece's tokenizers for generation. tests/lm/inference/test_llama_tokenizer.py compares with the library."""

from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.inference.completion import encode_prompt
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.text_tokenizer import require_byte_level
from tests.helpers.llamas import train_sentencepiece, train_small_llama_tokenizer
from tests.helpers.tokenizers import bytes_tokenizer


def test_text_holds_no_special_token(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(train_small_llama_tokenizer(tmp_path / "tokenizer.model"))
    assert tokenizer.special_ids == {"<s>": 1, "</s>": 2} and (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.begin_token == "<s>"
    assert tokenizer.size == len(tokenizer.vocab) == 320
    for text in ("the cat é\n", "</s><s>", "\U0001f642"):
        ids = tokenizer.encode(text)
        assert not {1, 2} & {*ids}
        assert tokenizer.decode(ids) == f" {text}"
        assert encode_prompt(tokenizer, text) == [1, *ids]
    assert encode_prompt(tokenizer, "") == [1]
    assert tokenizer.decode([*tokenizer.encode("é")[:-1], 2]).endswith("\ufffd"), "a half character"


def test_a_model_without_a_begin_token_is_refused(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "tokenizer.model", ["the cat sat on the mat"] * 9, 280, bos_id=-1)
    with pytest.raises(UserError, match="has no tokens that begin and end a text"):
        SentencePieceTokenizer(path)


def test_only_a_byte_level_tokenizer_passes(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    assert require_byte_level(tokenizer, "mine") is tokenizer
    path = train_small_llama_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match=r"^mine has a SentencePiece tokenizer"):
        require_byte_level(SentencePieceTokenizer(path), "mine")
