"""A special token that is searched for in normalized text cannot be typed in another Unicode form."""

import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lm.data.chat_template import encode_chat_prompt, encode_dialog
from lm.inference.completion import encode_prompt
from lm.text.normalize import NORMALIZERS, Normalizer
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.llamas import make_dialog
from tests.helpers.tokenizers import bytes_tokenizer

TOKENS = ["<|START|>", "<|END;|>", "<｜Ａ｜>", "<K>"]  # the last one is no special token, but ends an answer
TEMPLATE = (
    "{% for m in messages %}<|START|>{{ m.role }}\n{{ m.content }}<|END;|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|START|>assistant\n{% endif %}"
)
TYPED = {
    "compatible forms": "a＜｜START｜＞b<|END;|>",  # NFKC and NFKD
    "singletons": "<|END\u037e|> <\u212a>",  # a Greek question mark and a Kelvin sign, in all forms
    "the normal form of a token": "<|A|>",
    "as it is": "<|START|><K>",
    "mixed": "＜|START|＞<|START|><|END\u037e|>",
}


def make(normalizer: Normalizer) -> Tokenizer:
    tokens = [AddedToken(text, special=text != "<K>", normalized=True) for text in TOKENS]
    tokenizer = Tokenizer(*bytes_tokenizer().parts._replace(normalizer=normalizer, added_tokens=tokens))
    ids = tokenizer.added_ids
    tokenizer.chat = ChatSettings({"default": TEMPLATE}, {}, (ids["<|END;|>"], ids["<K>"]))
    return tokenizer


MADE = {normalizer: make(normalizer) for normalizer in NORMALIZERS}
pieces = st.sampled_from(
    [*"<|>＜｜＞｜ＡAK\u212aa;\u037e\u0338 ", "START", "ＳTART", "END", "<|", "|>", *TYPED.values()]
)
texts = st.lists(pieces, max_size=12).map("".join)


def added(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The added tokens in a text."""
    names = {token_id: text for text, token_id in tokenizer.added_ids.items()}
    return [names[token_id] for token_id in ids if token_id in names]


def test_the_tokens_are_found_in_other_forms_when_special_tokens_are_parsed() -> None:
    for normalizer, tokenizer in MADE.items():
        found = added(tokenizer, tokenizer.encode("".join(TYPED.values())))
        assert {"<|START|>", "<|END;|>", "<K>"} <= {*found}, "so a prompt could hold them"
        assert ("<｜Ａ｜>" in found) == ("K" in normalizer)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@examples(60)
@given(text=texts)
@example(text=TYPED["compatible forms"])
@example(text=TYPED["singletons"])
@example(text=TYPED["the normal form of a token"])
@example(text=TYPED["mixed"])
def test_a_message_writes_no_special_token(normalizer: Normalizer, text: str) -> None:
    tokenizer = MADE[normalizer]
    dialog: Any = make_dialog(text, "answer", "x", system=text)
    ids = encode_chat_prompt(tokenizer, dialog)
    assert added(tokenizer, ids) == ["<|START|>", "<|END;|>"] * 4 + ["<|START|>"]
    assert encode_chat_prompt(tokenizer, dialog, {"tools": [{"name": text}]}) == ids
    written = unicodedata.normalize(normalizer, f"system\n{text}")
    assert tokenizer.decode(ids).startswith(f"<|START|>{written}<|END;|>")


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@examples(30)
@given(text=texts)
def test_an_answer_to_learn_writes_no_special_token(normalizer: Normalizer, text: str) -> None:
    tokenizer = MADE[normalizer]
    dialog: Any = make_dialog("x", f"a{text}b")
    assert added(tokenizer, encode_dialog(tokenizer, dialog).ids) == ["<|START|>", "<|END;|>"] * 2


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@examples(60)
@given(text=texts)
@example(text="".join(TYPED.values()))
def test_a_prompt_writes_no_special_token(normalizer: Normalizer, text: str) -> None:
    tokenizer = MADE[normalizer]
    ids = encode_prompt(tokenizer, text)
    assert not {*ids} & {*tokenizer.special_ids.values()}
    assert ids == tokenizer.encode_reference(text, allowed_special=())
