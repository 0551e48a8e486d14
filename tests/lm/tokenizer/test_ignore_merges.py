"""Tokens that a whole pretoken becomes, whatever the merges: ``ignore_merges`` of Hugging Face, as Llama 3 has it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.demo_corpus import demo_stories
from lm.text.patterns import PATTERNS
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.naive_bpe import naive_encode
from tests.helpers.tokenizers import (
    CUSTOM_PATTERN,
    SPECIALS,
    bytes_tokenizer,
    make_tokenizer,
    stable_text,
    with_hugging_face,
)

# Tokens that no merge makes: of 2, 8, 15, 16, 62 and 1,100 bytes, and with more than a byte a character.
WHOLE = ["qz", " kwyjibo", "kwyjibokwyjibok", " kwyjibokwyjibok", "日本日", " café", "!" * 62, "=" * 1100]


def with_whole_tokens(pattern: str) -> Tokenizer:
    """Make a tokenizer with tokens that are reachable as whole pretokens only."""
    trained = make_tokenizer(pattern)
    vocab = {**trained.vocab, **{trained.size + i: token.encode() for i, token in enumerate(WHOLE)}}
    return Tokenizer(vocab, trained.merges, trained.special_tokens, pattern, ignore_merges=True)


@pytest.fixture(scope="module")
def whole_tokenizers() -> list[Tokenizer]:
    return [with_whole_tokens(pattern) for pattern in (PATTERNS["gpt2"], PATTERNS["llama3"], CUSTOM_PATTERN)]


texts = st.lists(stable_text | st.sampled_from(WHOLE) | st.sampled_from([" ", "=", "k"]), max_size=8).map("".join)


@examples(100)
@given(texts)
def test_encode_equals_the_naive_reference(whole_tokenizers: list[Tokenizer], text: str) -> None:
    for tokenizer in whole_tokenizers:
        assert tokenizer.encode(text) == naive_encode(tokenizer, text, SPECIALS)
        assert tokenizer.encode(text, allowed_special=()) == naive_encode(tokenizer, text, [])


@pytest.fixture(scope="module")
def tokenizer_pairs(
    whole_tokenizers: list[Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Tokenizer, Any]]:
    return with_hugging_face(whole_tokenizers, tmp_path_factory.mktemp("pairs") / "tokenizer.json")


@examples(100)
@given(texts)
def test_hugging_face_encodes_the_same(tokenizer_pairs: list[tuple[Tokenizer, Any]], text: str) -> None:
    for tokenizer, hf_tokenizer in tokenizer_pairs:
        assert hf_tokenizer.encode(text).ids == tokenizer.encode(text)


def test_a_whole_token_is_one_id_in_a_long_text(whole_tokenizers: list[Tokenizer]) -> None:
    """The cache of pretokens is filled and cleared on the way."""
    for tokenizer in whole_tokenizers[:2]:
        stories = "".join(demo_stories(50))
        for token in WHOLE:
            [token_id] = [i for i, data in tokenizer.vocab.items() if data == token.encode()]
            ids = tokenizer.encode(f"{stories}\n\n{token}")
            assert ids[-1] == token_id
            assert ids == tokenizer.encode_reference(f"{stories}\n\n{token}", SPECIALS)


def test_text_does_not_become_a_special_token() -> None:
    tokenizer = bytes_tokenizer(["!!"])
    tokenizer = Tokenizer(tokenizer.vocab, [], ["!!"], ignore_merges=True)
    assert tokenizer.encode("!!") == [256]
    assert tokenizer.encode("!!", allowed_special=()) == [ord("!")] * 2
    assert tokenizer.encode_reference("!!", []) == [ord("!")] * 2


@pytest.mark.parametrize("min_cached_size", [1, 1 << 30], ids=["from the cache", "from the file"])
def test_a_normalized_text_does_not_become_an_added_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_cached_size: int
) -> None:
    """The added token is searched for in the text before it is normalized."""
    monkeypatch.setattr("lm.tokenizer.tokenizer._MIN_CACHED_SIZE", min_cached_size)
    vocab, added = bytes_tokenizer([]).vocab, [AddedToken("\uac00", special=False)]
    Tokenizer(vocab, [], ignore_merges=True, normalizer="NFC", added_tokens=added).save(tmp_path)
    decomposed = "\u1100\u1161"
    for _ in range(2):  # the second is from the cache, if any is
        [(tokenizer, hf_tokenizer)] = with_hugging_face([Tokenizer.load(tmp_path)], tmp_path / "hf.json")
        for text, ids in (("\uac00", [256]), (decomposed, list("\uac00".encode()))):
            assert tokenizer.encode(text) == tokenizer.encode_reference(text) == hf_tokenizer.encode(text).ids == ids


def test_save_and_load_keep_ignore_merges(whole_tokenizers: list[Tokenizer], tmp_path: Path) -> None:
    for tokenizer in whole_tokenizers:
        tokenizer.save(tmp_path)
        imported = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
        for again in (Tokenizer.load(tmp_path), imported):
            assert again.ignore_merges
            assert again.encode("".join(WHOLE[1:6])) == tokenizer.encode("".join(WHOLE[1:6]))


def test_a_config_with_another_value_is_rejected(whole_tokenizers: list[Tokenizer], tmp_path: Path) -> None:
    whole_tokenizers[0].save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "ignore_merges": "yes"}), "utf-8")
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_a_token_that_is_not_of_bytes_is_rejected(whole_tokenizers: list[Tokenizer], tmp_path: Path) -> None:
    """Hugging Face never finds it; our table of bytes would."""
    path = tmp_path / "tokenizer.json"
    whole_tokenizers[0].save_tokenizer_json(path)
    content = json.loads(path.read_text("utf-8"))
    content["model"]["vocab"]["日本人"] = 5000
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json: ignore_merges with the token '日本人'"):
        Tokenizer.from_tokenizer_json(path)
