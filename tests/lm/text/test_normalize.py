"""Normalization of text in blocks."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.text.normalize import _SAFE_CUT, NORMALIZERS, normalize_blocks
from tests.helpers.examples import examples

JOINING = st.sampled_from([*"eaA日本 \nﬁ각가각\u1100\u1161\u11a8", "\u0301", "\u0323", "\u0338", "\uff76", "\uff9e"])


@examples(300)
@given(st.lists(st.text(JOINING | st.characters(codec="utf-8"), max_size=6), max_size=8))
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_blocks_are_normalized_like_the_whole(normalizer: str, blocks: list[str]) -> None:
    expected = unicodedata.normalize(normalizer, "".join(blocks))  # type: ignore[arg-type]
    assert "".join(normalize_blocks(blocks, normalizer)) == expected


def test_no_character_of_a_safe_cut_joins_the_text_before_it() -> None:
    """By the definition of composition: the character is a starter, and not the second of a composed pair."""
    characters = list(map(chr, range(0x110000)))
    joined = {last for c in characters for last in unicodedata.normalize("NFD", c)[1:]}
    safe = _SAFE_CUT.findall("".join(characters))
    assert len(safe) > 20_000
    for character in safe:
        first = unicodedata.normalize("NFKD", character)[0]
        assert unicodedata.combining(first) == 0 and first not in joined


def test_a_long_text_without_a_cut_is_normalized_in_linear_time() -> None:
    blocks = ["é"] * 100_000
    assert "".join(normalize_blocks(blocks, "NFD")) == "e\u0301" * 100_000
