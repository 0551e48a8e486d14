"""The special tokens that begin and end a text."""

import pytest

from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.text_tokenizer import find_text_ends
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import bytes_tokenizer

LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>"]


@pytest.mark.parametrize(
    ("special_tokens", "begin_token", "ends"),
    [
        ([], None, (None, None)),
        ([END_OF_TEXT], None, (END_OF_TEXT, END_OF_TEXT)),
        (["<s>", "</s>"], None, ("<s>", "</s>")),
        (LLAMA3, None, (*LLAMA3,)),
        ([END_OF_TEXT, "</s>", "<s>"], "<s>", ("<s>", "</s>")),
        ([END_OF_TEXT, "<bos>", "</s>", "<s>"], "<bos>", ("<bos>", END_OF_TEXT)),
        (["<bos>", "<eos>", "</s>", "<s>"], "<bos>", ("<bos>", None)),
    ],
)
def test_the_end_belongs_to_the_begin_token(
    special_tokens: list[str], begin_token: str | None, ends: tuple[str | None, str | None]
) -> None:
    vocab = bytes_tokenizer().vocab
    assert find_text_ends(Tokenizer(vocab, [], special_tokens, begin_token=begin_token)) == ends


def test_the_begin_token_of_llama_3_is_known_by_its_name() -> None:
    assert bytes_tokenizer(LLAMA3).begin_token == LLAMA3[0]
