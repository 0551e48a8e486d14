"""Prompts to fill in the middle of a text, in the forms of several models."""

import pytest

from lm.common.errors import UserError
from lm.inference.infill import encode_infill, find_infill_ends
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import bytes_tokenizer

FAMILIES = {
    "Qwen2.5-Coder": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    "StarCoder": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    "DeepSeek-Coder": ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    "CodeLlama": ["▁<PRE>", "▁<SUF>", "▁<MID>"],
}


def make(marks: list[str], begin: str | None = None, is_special: bool = True) -> Tokenizer:
    others = ["<|endoftext|>", *([begin] if begin else [])]
    tokens = [AddedToken(text, special=is_special) for text in [*reversed(marks), "<think>", "<|fim_pad|>"]]
    parts = bytes_tokenizer(others).parts
    return Tokenizer(*parts._replace(added_tokens=[*tokens], begin_token=begin))


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_come_in_the_order_prefix_suffix_middle(family: str, is_special: bool) -> None:
    tokenizer = make(FAMILIES[family], is_special=is_special)
    before, between, after = (tokenizer.added_ids[mark] for mark in FAMILIES[family])
    assert encode_infill(tokenizer, "ab", "cé") == [before, *b"ab", between, *"cé".encode(), after]
    assert encode_infill(tokenizer, [97, 256], "c") == [before, 97, 256, between, 99, after]
    assert encode_infill(tokenizer, "", "c") == [before, between, 99, after], "no token of an empty prompt"
    assert tokenizer.decode([before, between, after]) == "".join(FAMILIES[family])


def test_a_begin_token_comes_first() -> None:
    tokenizer = make(FAMILIES["DeepSeek-Coder"], "<s>")
    begin, without = tokenizer.special_ids["<s>"], encode_infill(tokenizer, "a", "b", has_begin=False)
    assert encode_infill(tokenizer, "a", "b") == [begin, *without]


def test_special_tokens_in_the_parts_are_plain_text_unless_parsed() -> None:
    tokenizer = make(FAMILIES["StarCoder"])
    text = "<fim_middle>"
    ids = encode_infill(tokenizer, text, text)
    assert bytes(ids[1:13]) == bytes(ids[14:-1]) == text.encode()
    middle = tokenizer.added_ids[text]
    assert encode_infill(tokenizer, text, text, parses_special=True)[1::2] == [middle, middle]


def test_the_middle_ends_at_special_tokens_and_those_of_its_prompt() -> None:
    tokenizer = make(FAMILIES["Qwen2.5-Coder"], is_special=False)
    names = {name for name, token_id in tokenizer.added_ids.items() if token_id in find_infill_ends(tokenizer)}
    assert names == {"<|endoftext|>", "<|fim_pad|>", *FAMILIES["Qwen2.5-Coder"]}


@pytest.mark.parametrize("marks", [[], ["<|fim_prefix|>", "<|fim_suffix|>"], ["<fim_prefix>", "<|fim_suffix|>"]])
def test_a_model_without_such_tokens_is_refused(marks: list[str]) -> None:
    with pytest.raises(UserError, match="no tokens to fill in the middle"):
        encode_infill(make(marks), "a", "b")
