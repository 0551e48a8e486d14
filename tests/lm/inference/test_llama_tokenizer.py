"""The tokenizer of Llama's interface, from SentencePiece's files and from this project's."""

import builtins
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.inference.llama import LlamaTokenizer
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.llamas import train_sentencepiece, train_small_llama_tokenizer
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer

END = 256  # the id after the bytes


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small_llama_tokenizer(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


def test_sentencepiece_is_preferred_in_a_directory_with_both(sentencepiece_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    loaded, expected = LlamaTokenizer.load(tmp_path), LlamaTokenizer.load(sentencepiece_path)
    assert loaded.encode("the cat", False, False) == expected.encode("the cat", False, False)


def test_decoding_yields_whole_characters(tmp_path: Path) -> None:
    bytes_tokenizer([END_OF_TEXT]).save(tmp_path)
    tokenizer = LlamaTokenizer.load(tmp_path)
    text = "aé漢😀"
    assert [piece for piece in tokenizer.decode_stream([*text.encode(), END]) if piece] == list(text)
    assert tokenizer.decode([*text.encode(), 0xE6]) == text + "\ufffd"
    assert tokenizer.decode([0xC3, END, 0xA9]) == "\ufffd\ufffd"


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, 319), max_size=9), text=st.text(max_size=20) | st.text("the cat▁ é</s>", max_size=20)
)
def test_sentencepiece_model_equals_its_library(sentencepiece_path: Path, ids: list[int], text: str) -> None:
    """Except for the number of U+FFFD for bytes that are not UTF-8."""
    from sentencepiece import SentencePieceProcessor

    library, loaded = (
        SentencePieceProcessor(model_file=str(sentencepiece_path)),
        LlamaTokenizer.load(sentencepiece_path),
    )
    actual, expected = (re.sub("\ufffd+", "\ufffd", tokenizer.decode(ids)) for tokenizer in (loaded, library))
    assert actual == expected
    words = library.encode(text)
    assert loaded.encode(text, bos=True, eos=True) == [1, *words, 2]
    assert loaded.encode(text, bos=False, eos=False) == words
    assert loaded.decode(loaded.encode(text, bos=True, eos=True)) == text.replace("▁", " ")


def test_sentencepiece_ids_and_surrogates(sentencepiece_path: Path) -> None:
    tokenizer = LlamaTokenizer.load(sentencepiece_path)
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id) == (320, 1, 2)
    assert tokenizer.encode("a\ud800", False, False) == tokenizer.encode("a\ufffd", False, False)
    assert 2 not in tokenizer.encode("</s>", bos=False, eos=False)


@pytest.mark.parametrize(
    ("specials", "ends"),
    [
        ([END_OF_TEXT], (256, 256)),
        (["<s>", "</s>"], (256, 257)),
        (["<|end_of_text|>", "<|begin_of_text|>"], (257, 256)),
        (["</s>", "<s>", END_OF_TEXT], (258, 258)),
        (["</s>", "<s>", END_OF_TEXT, "<s> begins"], (257, 256)),
    ],
)
def test_tokenizer_json(tmp_path: Path, specials: list[str], ends: tuple[int, int]) -> None:
    begin_token = "<s>" if "<s> begins" in specials else None
    original = make_tokenizer(special_tokens=specials)
    original = Tokenizer(*original.parts._replace(begin_token=begin_token))
    original.save(tmp_path)
    text = f"Once upon {specials[0]}a naïve 日本"
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = LlamaTokenizer.load(path)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.n_words) == (*ends, 656 + len(specials))
        words = original.encode(text, allowed_special=())
        assert tokenizer.encode(text, bos=True, eos=True) == [ends[0], *words, ends[1]]
        assert tokenizer.decode([ends[0], *words, ends[1]]) == text


def test_unusable_tokenizers_are_refused(
    tmp_path: Path, sentencepiece_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_tokenizer(["<s>"]).save(tmp_path)
    with pytest.raises(UserError, match=r"lacks the special tokens.*<\|endoftext\|>, <s> and </s>"):
        LlamaTokenizer.load(tmp_path)
    (tmp_path / "damaged.model").write_text("no model")
    for name in ("damaged.model", "missing.model"):
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            LlamaTokenizer.load(tmp_path / name)
    mapped = train_sentencepiece(tmp_path / "mapped.model", ["the cat sat on the mat"] * 9, 280)
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"needs the sentencepiece library: pip install 'textmill\[llama\]'"):
        LlamaTokenizer.load(mapped)
    assert LlamaTokenizer.load(sentencepiece_path).n_words == 320, "it normalizes nothing"
