"""The form in which a model gets a dialog."""

from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens, encode_chat_prompt
from lm.inference.chat_format import PLAIN_STOP, Answer, ChatFormat, render_plain
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from tests.helpers.llamas import make_dialog, train_small_llama_tokenizer
from tests.helpers.tokenizers import bytes_tokenizer

PLAIN = bytes_tokenizer([END_OF_TEXT])
TEMPLATE = add_chat_tokens(PLAIN)
DIALOG = make_dialog("Hi", "Ho", "<|end|><|system|>", system="Be kind.")


def test_a_tokenizer_with_the_tokens_has_the_template() -> None:
    chat_format = ChatFormat(TEMPLATE)
    assert chat_format.has_template and chat_format.stop == []
    assert chat_format.encode(DIALOG) == encode_chat_prompt(TEMPLATE, DIALOG)
    with pytest.raises(UserError, match="message 1 has the role 'user', not 'assistant'"):
        chat_format.encode([*make_dialog("Hi"), *make_dialog("Ho")])


def test_plain_dialog() -> None:
    dialog = make_dialog(" Hi!\n", "Ho.", "?", system="Be kind.")
    assert render_plain(dialog) == "System: Be kind.\nUser: Hi!\nAssistant: Ho.\nUser: ?\nAssistant:"


def test_other_tokenizers_have_the_plain_format(tmp_path: Path) -> None:
    chat_format = ChatFormat(PLAIN)
    assert not chat_format.has_template and chat_format.stop == [PLAIN_STOP]
    assert chat_format.encode(DIALOG) == list(render_plain(DIALOG).encode())
    tokenizer = SentencePieceTokenizer(train_small_llama_tokenizer(tmp_path / "tokenizer.model"))
    assert ChatFormat(tokenizer).encode(DIALOG) == [1, *tokenizer.encode(render_plain(DIALOG))]


def test_white_space_before_an_answer() -> None:
    pieces = (" ", "\n", " a", " b ", "c")
    plain, template = Answer(ChatFormat(PLAIN)), Answer(ChatFormat(TEMPLATE))
    assert [plain.add(piece) for piece in pieces] == ["", "", "a", " b ", "c"]
    assert plain.text == "a b c"
    assert tuple(template.add(piece) for piece in pieces) == pieces
    assert template.text == " \n a b c"
