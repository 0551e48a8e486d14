"""Llama 2's chat format, token for token."""

from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.inference.llama_chat import encode_llama_dialog
from lm.inference.llama_tokenizer import LlamaTokenizer
from tests.helpers.llamas import make_dialog, train_small_llama_tokenizer


def test_llama_dialog_token_for_token(tmp_path: Path) -> None:
    path = train_small_llama_tokenizer(tmp_path / "tokenizer.model")
    from sentencepiece import SentencePieceProcessor

    encode = SentencePieceProcessor(model_file=str(path)).encode
    tokenizer = LlamaTokenizer.load(path)
    bos, eos = [1], [2]
    alone = bos + encode("[INST] the cat [/INST]")
    assert encode_llama_dialog(tokenizer, make_dialog(" the cat\n")) == alone
    folded = bos + encode("[INST] <<SYS>>\n sat \n<</SYS>>\n\n the cat [/INST]")
    assert encode_llama_dialog(tokenizer, make_dialog(" the cat ", system=" sat ")) == folded
    assert encode_llama_dialog(tokenizer, make_dialog(" the cat "), default_system=" sat ") == folded
    assert encode_llama_dialog(tokenizer, make_dialog("the cat", system=""), "sat") != alone
    long = bos + encode("[INST] <<SYS>>\nsat\n<</SYS>>\n\nthe </s> [/INST] on ") + eos
    long += bos + encode("[INST] mat [/INST] hat ") + eos + bos + encode("[INST] hello [/INST]")
    assert (
        encode_llama_dialog(tokenizer, make_dialog("the </s>", " on", "mat", "hat ", "hello", system="sat"), "other")
        == long
    )
    assert long.count(1) == 3 and long.count(2) == 2


@pytest.mark.parametrize(
    ("dialog", "message"),
    [
        ([], "Dialog 1: message 0, from the user, is missing"),
        (make_dialog(system="be brief"), "Dialog 1: message 1, from the user, is missing"),
        (make_dialog("a", "b"), "Dialog 1: message 2, from the user, is missing"),
        (make_dialog("a", "b", system="c"), "Dialog 1: message 3, from the user, is missing"),
        ([*make_dialog("a"), *make_dialog("b")], "message 1 has the role 'user', not 'assistant'"),
        (make_dialog("a", "b")[1:], "message 0 has the role 'assistant', not 'user'"),
        ([*make_dialog("a", "b"), *make_dialog(system="c")], "message 2 has the role 'system', not 'user'"),
        ([*make_dialog(system="a"), *make_dialog("b", system="c")], "message 1 has the role 'system', not 'user'"),
        ([{"role": "tool", "content": ""}], "message 0 has the role 'tool'"),
        ([{"content": "a"}], "message 0 has the role None"),
        ([*make_dialog("a", "b"), {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        (["hello"], "message 0 has no content"),
    ],
    ids=str,
)
def test_malformed_dialog_is_refused(dialog: list[Any], message: str) -> None:
    tokenizer = LlamaTokenizer(257, 256, 256, lambda text: list(text.encode()), {})
    with pytest.raises(UserError, match=message):
        encode_llama_dialog(tokenizer, dialog, name="Dialog 1")
