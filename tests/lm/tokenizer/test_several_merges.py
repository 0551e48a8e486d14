"""Vocabularies in which several merges make one token, as in the tokenizer.json of Llama 3 and gpt-oss.

Such a file is converted from ranks of tokens: each token has a merge for each two tokens that it consists of, so that
a merge may make a merge of an earlier rank possible.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.text.demo_corpus import demo_stories
from lm.text.patterns import PATTERNS
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.naive_bpe import naive_encode
from tests.helpers.tokenizers import make_tokenizer, stable_text, with_hugging_face

WORDS = "".join(demo_stories(40)).split()


def make_with_all_merges(pattern: str, ignore_merges: bool) -> Tokenizer:
    """Return a tokenizer with all merges that make its tokens, in the order of the tokens: first those of a trained
    tokenizer, then parts of words in any order."""
    trained = make_tokenizer(pattern, [], 400)
    parts = sorted({word[i:j].encode() for word in WORDS for i in range(len(word)) for j in range(i + 2, i + 6)})
    tokens = dict.fromkeys([*trained.vocab.values(), *random.Random(0).sample(parts, 400)])
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    merges: list[tuple[bytes, bytes]] = []
    for token in ids:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return Tokenizer(dict(enumerate(tokens)), merges, pattern=pattern, ignore_merges=ignore_merges)


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    patterns = PATTERNS["gpt2"], PATTERNS["llama3"]
    return [make_with_all_merges(pattern, ignore) for pattern in patterns for ignore in (True, False)]


@pytest.fixture(scope="module")
def tokenizer_pairs(
    tokenizers: list[Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Tokenizer, Any]]:
    return with_hugging_face(tokenizers, tmp_path_factory.mktemp("pairs") / "tokenizer.json")


long_pretokens = st.lists(st.sampled_from([*WORDS, "a", "aa", "日本", "🙂"]), min_size=1, max_size=30).map("".join)
texts = st.lists(stable_text | long_pretokens, max_size=6).map("".join)


def test_the_kernels_encode_them(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        assert len(tokenizer.merges) > 1.2 * len({left + right for left, right in tokenizer.merges})
        assert tokenizer._fast_encoder is not None


@examples(80)
@given(texts)
def test_encode_equals_the_naive_reference(tokenizers: list[Tokenizer], text: str) -> None:
    for tokenizer in tokenizers:
        assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])


@examples(200)
@given(texts, st.integers(1, 40))
def test_hugging_face_encodes_the_same(tokenizer_pairs: list[tuple[Tokenizer, Any]], text: str, repeats: int) -> None:
    """Pretokens of up to some thousand bytes."""
    for tokenizer, hf_tokenizer in tokenizer_pairs:
        assert tokenizer.encode(text * repeats) == hf_tokenizer.encode(text * repeats).ids


def test_ids_of_a_long_pretoken_equal_the_reference(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        for text in ("".join(WORDS * 20), "a" * 30_000, "ab" * 20_000, "日本" * 5_000):
            assert tokenizer.encode(text) == tokenizer.encode_reference(text, [])


def test_files_keep_all_merges(tokenizers: list[Tokenizer], tmp_path: Path) -> None:
    tokenizers[1].save(tmp_path)
    assert Tokenizer.load(tmp_path).parts == tokenizers[1].parts
