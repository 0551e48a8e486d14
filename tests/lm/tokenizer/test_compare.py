"""Comparison of tokenizers against figures that are counted token by token."""

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.tokenizer.compare import compare_tokenizers
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tensors import FEW_EXAMPLES

BYTES = {number: bytes([number]) for number in range(256)}
MERGES = [(b"a", b"b"), (b" ", b"ab"), ("é".encode()[:1], "é".encode()[1:]), (b"ab", b"ab")]
TOKENIZER = Tokenizer(BYTES | {256 + n: left + right for n, (left, right) in enumerate(MERGES)}, MERGES)


def split_share(text: str, tokens: list[bytes]) -> float | None:
    """Return the share of words that are several tokens, word by word."""
    ends = {len(b"".join(tokens[:count])) for count in range(1, len(tokens) + 1)}
    spans = [[len(text[:place].encode()) for place in match.span()] for match in regex.finditer(r"[\p{L}\p{M}]+", text)]
    split = [any(end in ends for end in range(start + 1, stop)) for start, stop in spans]
    return sum(split) / len(split) if split else None


@FEW_EXAMPLES
@given(st.text(st.sampled_from("ab é中𝒳.\n"), min_size=1, max_size=40))
def test_figures_equal_those_counted_token_by_token(text: str) -> None:
    compared = compare_tokenizers({"t": TOKENIZER}, {"x": text})
    tokens = [TOKENIZER.vocab[token_id] for token_id in TOKENIZER.encode(text, ())]
    encoding = compared.tokenizers["t"].encodings["x"]
    assert compared.texts == {"x": (len(text.encode()), len(text))}
    assert encoding.tokens == len(tokens) and encoding.used == len(set(tokens))
    assert encoding.split_words == split_share(text, tokens)
    assert compared.bytes_per_token("x", "t") == len(text.encode()) / len(tokens)
    with_letters = {len(token) for token in tokens if regex.search(r"[\p{L}\p{M}]", token.decode("utf-8", "replace"))}
    longest = [token.decode("utf-8", "replace") for token in tokens if {len(token)} == set(sorted(with_letters)[-1:])]
    assert set(compared.tokenizers["t"].longest[:1]) <= set(longest) and bool(longest) == bool(with_letters)


def test_vocabulary_is_used_over_all_texts() -> None:
    compared = compare_tokenizers({"t": TOKENIZER, "u": TOKENIZER}, {"x": "abab", "y": "c c"})
    assert compared.tokenizers["t"].used == compared.tokenizers["u"].used == 3
    assert compared.tokenizers["t"].longest == ["abab", "c"]


class Normalizing:
    """Encodes no space around a text."""

    size, vocab, special_ids, begin_token = TOKENIZER.size, TOKENIZER.vocab, TOKENIZER.special_ids, None
    stop_ids, decode = TOKENIZER.stop_ids, TOKENIZER.decode

    def encode(self, text: str, allowed_special: tuple[()]) -> list[int]:
        return TOKENIZER.encode(text.strip(), allowed_special)


def test_normalized_text_has_no_split_words() -> None:
    compared = compare_tokenizers({"t": Normalizing()}, {"x": " ab", "nothing is left": " "})
    assert compared.tokenizers["t"].encodings["x"].split_words is None
    compared.figures()


def test_mistakes() -> None:
    with pytest.raises(UserError, match="The text y is empty"):
        compare_tokenizers({"t": TOKENIZER}, {"x": "a", "y": ""})
    with pytest.raises(UserError, match="at least one"):
        compare_tokenizers({}, {"x": "a"})
