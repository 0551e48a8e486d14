"""Pretokens of the GPT-2 pattern, special tokens, and safe cuts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.pretokenize import (
    GPT2_PATTERN,
    check_special_tokens,
    compile_pattern,
    find_safe_cut,
    pretokenize,
    split_at_safe_cuts,
    split_special_tokens,
)
from tests.helpers.examples import examples

WORDS_PATTERN = r"\p{L}+"  # all other characters are between matches

# All kinds of white space that \s matches, and characters that only look like it (U+001C, U+200B).
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u200b"]
SPECIALS = ["<|a|>", "<|a|><|a|>", "<|a|> <|b|>", " <s>", "<s> ", "aa", "a a", "\n\n", " ", "🙂"]
PIECES = [*SPACES, *SPECIALS, "<|", "a|>", "<", "a", "don't", "'ll", "'", "12", "é", "é", "日本", "🙂", "!?", "\x00"]

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)
special_lists = st.lists(st.sampled_from(SPECIALS), max_size=4, unique=True)
patterns = st.sampled_from([GPT2_PATTERN, WORDS_PATTERN, r"\s+", r"[^\s]+ ?"])


def all_tokens(text: str, special_tokens: Sequence[str], pattern: str) -> list[tuple[str, bool]]:
    """Return (token, is_special) for all pretokens and special tokens of a text."""
    return [
        (pretoken, is_special)
        for piece, is_special in split_special_tokens(text, special_tokens)
        for pretoken in ([piece] if is_special else pretokenize(piece, pattern))
    ]


@examples(400)
@given(texts, st.integers(0, 40), special_lists, patterns)
def test_find_safe_cut_changes_no_pretoken_for_any_continuation(
    whole: str, held_back: int, special_tokens: list[str], pattern: str
) -> None:
    """The known part of the text may end anywhere, also inside a special token."""
    text = whole[: max(0, len(whole) - held_back)]
    cut = find_safe_cut(text, special_tokens, pattern)
    assert 0 <= cut <= len(text)
    tokens = all_tokens(whole[:cut], special_tokens, pattern) + all_tokens(whole[cut:], special_tokens, pattern)
    assert tokens == all_tokens(whole, special_tokens, pattern)


@examples(400)
@given(st.lists(texts, max_size=6), special_lists, patterns, st.integers(1, 40))
def test_split_at_safe_cuts_changes_no_pretoken(
    blocks: list[str], special_tokens: list[str], pattern: str, size: int
) -> None:
    pieces = list(split_at_safe_cuts(blocks, special_tokens, pattern, size))
    whole = "".join(blocks)
    assert "".join(pieces) == whole
    assert "" not in pieces
    tokens = [pretoken for piece in pieces for pretoken in all_tokens(piece, special_tokens, pattern)]
    assert tokens == all_tokens(whole, special_tokens, pattern)


def test_find_safe_cut_is_before_the_last_space_after_text() -> None:
    assert find_safe_cut("one two  ", []) == len("one two")
    assert find_safe_cut("one two", []) == len("one")
    assert find_safe_cut("one", []) == 0
    assert find_safe_cut("   ", []) == 0


def test_find_safe_cut_keeps_a_special_token_that_may_become_longer() -> None:
    """More text may turn ``<|a|>`` into ``<|a|><|b|>``."""
    special_tokens = ["<|a|>", "<|a|><|b|>"]
    assert find_safe_cut("x<|a|>", special_tokens) == 0
    assert find_safe_cut("x<|a|>123456789", special_tokens) == len("x<|a|>")


def test_find_safe_cut_never_cuts_at_a_space_inside_a_special_token() -> None:
    text = "word <| end of text |>" + "x" * 30
    assert find_safe_cut(text, ["<| end of text |>"]) == len("word <| end of text |>")
    assert find_safe_cut("some words, then a word<| end of", ["<| end of text |>"]) == len("some words,")


@examples(100)
@given(st.lists(texts, max_size=6), special_lists)
def test_a_custom_pattern_is_cut_only_after_special_tokens(blocks: list[str], special_tokens: list[str]) -> None:
    pieces = list(split_at_safe_cuts(blocks, special_tokens, WORDS_PATTERN, 1))
    for piece in pieces[:-1]:
        *_, (_, is_special) = split_special_tokens(piece, special_tokens)
        assert is_special


def test_split_at_safe_cuts_yields_pieces_of_about_the_requested_size() -> None:
    pieces = list(split_at_safe_cuts(["word " * 10_000], [], size=100))
    assert len(pieces) == 2  # each block is searched once
    pieces = list(split_at_safe_cuts(["word "] * 10_000, [], size=100))
    assert max(map(len, pieces)) <= 105
    assert min(map(len, pieces[:-1])) >= 90


def test_split_at_safe_cuts_keeps_a_text_without_a_cut_whole() -> None:
    assert list(split_at_safe_cuts(["a" * 50] * 1000, [], size=100)) == ["a" * 50_000]


def test_pretokens_of_the_gpt2_pattern() -> None:
    assert list(pretokenize("I'll  say: don't 42\n\n go")) == [
        *("I", "'ll", " ", " say", ":", " don", "'t", " 42", "\n\n", " go"),
    ]


@examples(200)
@given(texts, patterns | st.sampled_from([r"", r"x*", r"(?=a)", r"b|"]))
def test_pretokens_join_to_the_text(text: str, pattern: str) -> None:
    """Also for patterns that skip characters or match the empty string."""
    pretokens = list(pretokenize(text, pattern))
    assert "".join(pretokens) == text
    assert "" not in pretokens


@examples(200)
@given(texts, special_lists)
def test_split_special_tokens_finds_the_leftmost_longest_match(text: str, special_tokens: list[str]) -> None:
    expected: list[tuple[str, bool]] = []
    plain = ""
    i = 0
    while i < len(text):
        longest = max((token for token in special_tokens if text.startswith(token, i)), key=len, default=None)
        if longest is None:
            plain += text[i]
            i += 1
            continue
        expected += [(plain, False)] * bool(plain) + [(longest, True)]
        plain = ""
        i += len(longest)
    expected += [(plain, False)] * bool(plain)
    assert list(split_special_tokens(text, special_tokens)) == expected


def test_special_tokens_are_not_regular_expressions() -> None:
    assert list(split_special_tokens("a.b axb [|]", ["a.b", "[|]"])) == [("a.b", True), (" axb ", False), ("[|]", True)]


@pytest.mark.parametrize(
    "pattern", ["a{1000000000}", r"\p{L}a{,999999999999}+|\s", "(((x{99}){99}){9}){9}", "(x{9,}){99999}"]
)
def test_a_pattern_with_too_many_repetitions_is_rejected(pattern: str) -> None:
    with pytest.raises(UserError, match="more than 100,000 times"):
        compile_pattern(pattern)
    assert compile_pattern("((x{99}){99}){9}").fullmatch("x" * 99 * 99 * 9)


@pytest.mark.parametrize("pattern", ["(", "[a", r"\p{Nonsense}", "a**b("])
def test_a_malformed_pattern_raises_a_user_error(pattern: str) -> None:
    with pytest.raises(UserError, match="is not a regular expression"):
        compile_pattern(pattern)
    with pytest.raises(UserError, match="is not a regular expression"):
        list(pretokenize("text", pattern))


@pytest.mark.parametrize(
    ("special_tokens", "message"),
    [
        (["<s>", ""], "number 2 is empty"),
        (["<s>", "<t>", "<s>"], "'<s>' is given twice"),
        (["\ud800"], "lone surrogate"),
        ("<s>", r"give a list, such as \['<s>'\]"),
    ],
)
def test_invalid_special_tokens_raise_a_user_error(special_tokens: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_special_tokens(special_tokens)
