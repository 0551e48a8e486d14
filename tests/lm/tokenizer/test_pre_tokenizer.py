"""The pre_tokenizers of a tokenizer.json split like Hugging Face's, in our pattern and in its export."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.patterns import PATTERNS, resolve_patterns
from lm.text.pretokenize import Pattern, pretokenize
from lm.tokenizer.config import TokenizerConfig
from lm.tokenizer.formats.oniguruma import FOLDS, from_oniguruma, to_oniguruma
from lm.tokenizer.formats.tokenizer_json import format_pre_tokenizer, parse_pre_tokenizer
from lm.tokenizer.formats.vocab_merges import unicode_to_bytes
from tests.helpers.examples import examples
from tests.helpers.families import DEEPSEEK3, GPT4O
from tests.helpers.tokenizers import CUSTOM_PATTERN, stable_text

ODD = [*"aZ09²½Ⅷ,$+!<|' \n\r\t\x85\xa0é_٣ⓐßs\u200d‿", "'s", "'LL", "\r\n", "日本", "かな", "e\u0301", "123456"]
texts = st.lists(st.sampled_from(ODD) | stable_text, max_size=12).map("".join)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ENDING = [BYTE_LEVEL, {**BYTE_LEVEL, "use_regex": False}]


def split(pattern: str, kind: str = "Regex", **changed: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": "Isolated", "invert": False, **changed}


STEPS = [
    {"type": "Digits", "individual_digits": True},
    {"type": "Digits", "individual_digits": False},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "Punctuation", "behavior": "Contiguous"},
    split("a.", "String"),
    split("LL", "String"),
    split("a"),
    split(r"\p{N}{1,3}", invert=True),
    split(r"\d{1,2}+"),
    split(r"(?:a|\d){1,2}+ ?"),
    split(r"^\s|\s$"),
    split(r"\A.|.\z|a\Z"),
    split(r"(?m:a.)|(?i:Z)[\x61\p{Lu}]?"),
    split(r"\w+|\W"),
    split(r"[\w']+ ?|[^\w\s]+|[^\W\d_]"),
    split(r"[\W_]+|\b\w|\w\B"),
    split(r"[[:word:]]+|[[:punct:]]"),
    split(r"[[:digit:]a]+|[[:lower:]]|[[:alnum:]]+"),
    split(r"[[:alpha:][:space:]]+|[[:^upper:]]"),
    split(PATTERNS["llama3"], behavior="Removed", invert=True),
    *(split(pattern) for pattern in (*PATTERNS.values(), *DEEPSEEK3, GPT4O)),
]


def hf_pretokenize(pre_tokenizer: dict[str, Any], text: str) -> list[bytes]:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    content = {"pre_tokenizer": pre_tokenizer, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    splitter = hf.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
    return [unicode_to_bytes(piece) for piece, _ in splitter.pre_tokenize_str(text)]


def our_pretokens(text: str, pattern: Pattern) -> list[bytes]:
    return [pretoken.encode() for pretoken in pretokenize(text, pattern)]


@examples(500)
@given(st.lists(st.sampled_from(STEPS), max_size=3), st.sampled_from(ENDING), texts)
def test_sequences_split_like_hugging_face(steps: list[dict[str, Any]], ending: dict[str, Any], text: str) -> None:
    pattern = parse_pre_tokenizer([*steps, ending])
    expected = hf_pretokenize({"type": "Sequence", "pretokenizers": [*steps, ending]}, text)
    assert our_pretokens(text, pattern) == expected
    assert hf_pretokenize(format_pre_tokenizer(pattern), text) == expected


@examples(500)
@given(st.sampled_from([*PATTERNS.values(), CUSTOM_PATTERN, GPT4O, DEEPSEEK3, ()]), texts)
def test_hugging_face_splits_an_exported_pattern_alike(pattern: Pattern, text: str) -> None:
    exported = format_pre_tokenizer(pattern)
    assert hf_pretokenize(exported, text) == our_pretokens(text, pattern)
    assert resolve_patterns(parse_pre_tokenizer(exported.get("pretokenizers", [exported]))) == pattern


@pytest.mark.parametrize(
    ("oniguruma", "ours"),
    [
        ("a{2}+", "(?:a{2})+"),
        (r"[+{}]{1,3}+b", r"(?:[+{}]{1,3})+b"),
        (r"(?:(a|\)){,2}){3,}+", r"(?:(?:(a|\)){,2}){3,})+"),
        (r"\{1}+", r"\{1}+"),
        (r"^[^$^]\$$", r"(?m:^)[^$^]\$(?m:$)"),
        (r"(?mi:.)(?<!\Ax)\z|\Z", r"(?si:.)(?<!^x)\Z|$"),
        (r"[^[:digit:][:space:]]\\xe9", r"[^\d[:space:]]\\xe9"),
    ],
)
def test_the_syntax_of_oniguruma_is_translated(oniguruma: str, ours: str) -> None:
    assert from_oniguruma(oniguruma) == ours


@pytest.mark.parametrize(
    "pattern",
    [
        r"a{2}+|[\]{]{1,3}+",
        r"(?s:.)$",
        r"^a++|\Z|\A",
        r"(?m:^)[a ]|b(?m:$)|]",
        r"\b\w+\b|\W|[\w']",
        r"[^\W\d_]+|a\B|[\W_]",
        r"[[:digit:]_]+|[[:alnum:]]|[[:lower:]]",
        r"[[:word:]]+|[^[:upper:]]",
        r"[\x61-\xe9]\xE9|\\xE9?",
    ],
)
def test_a_pattern_of_ours_survives_the_translation(pattern: str) -> None:
    @examples(50)
    @given(st.text(st.sampled_from("a]{b\n '_9²½٣éⓐ\u200dA‿\\")))
    def splits_alike(text: str) -> None:
        assert our_pretokens(text, from_oniguruma(to_oniguruma(pattern))) == our_pretokens(text, pattern)
        assert hf_pretokenize(format_pre_tokenizer(pattern), text) == our_pretokens(text, pattern)

    splits_alike()


@pytest.mark.parametrize("pattern", ["(?m)^a", "(?m:a$)", "(?im:^)"])
def test_a_flag_of_another_meaning_is_not_exported(pattern: str) -> None:
    with pytest.raises(UserError, match=r"of the pretoken pattern .* cannot be exported"):
        format_pre_tokenizer(pattern)


NOT_ALIKE = [r"\h+", r"a\Gb", r"[\h]", "[a[bc]]", "[a&&b]", "a(?i)b", r"(?x-a:b)", r"(a)\1", r"\x{61}", r"[\b]"]
NOT_ALIKE += ["a{2}?", "(?P<x>a)", "[[:^digit:]]", "[[:odd:]]", "(?i:Ss)", "(?i)a|ß", "(?i:(?:x|oﬃ))"]


NOT_ALIKE += [
    r"(?i:\p{Ll}+)",
    r"(?i)\p{Lu}\p{Ll}+|\s|.",
    r"(?i:[a\p{Lt}])",
    r"(?i:\P{Lowercase})",
    "(?i:(?:[[:upper:]]))",
]


@pytest.mark.parametrize("pattern", [*NOT_ALIKE, r"\xe9", r"[\x80]"])
def test_syntax_of_another_meaning_is_rejected_by_name(pattern: str) -> None:
    with pytest.raises(UserError, match=r"of the pretoken pattern .* is not supported"):
        parse_pre_tokenizer([split(pattern), BYTE_LEVEL])


@pytest.mark.parametrize("pattern", [*NOT_ALIKE, r"\X", "[[:punct:]]", "(?f:a)", "(?V1)[a--b]"])
def test_syntax_of_another_meaning_is_not_exported(pattern: str) -> None:
    with pytest.raises(UserError, match=r"of the pretoken pattern .* cannot be exported"):
        format_pre_tokenizer(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *[r"(?<![^\W_])\p{L}+|\s|.", r"(?<=\b)a", r"(?<!(?:a|\B))b", "(?<!(?=a)b)c", "(?<=(?:(?!b)a))c", "(?<!(a))b"],
        *["^*a", r"\b?a", "(?=a)*b", "(?<=a){2}b", "(?m:^)+a"],
    ],
)
def test_a_pattern_that_oniguruma_refuses_is_refused_before_training(pattern: str) -> None:
    with pytest.raises(UserError, match=r"of the pretoken pattern .* cannot be exported"):
        TokenizerConfig(pattern=pattern)


@pytest.mark.parametrize(
    "pattern", [r"(?<![\W_])a|.", r"(?<![^\W])a|\s", "(?<=(?<=a)b)_|.", "(?<=(a))b|.", r"(?i:\p{L}\d|a)."]
)
def test_a_similar_pattern_is_exported(pattern: str) -> None:
    for text in ("ab_a b9", "_a9ab_", "Ä9é a"):
        assert hf_pretokenize(format_pre_tokenizer(pattern), text) == our_pretokens(text, pattern)


def test_the_folds_are_all_of_unicode() -> None:
    assert {fold for code in range(sys.maxunicode + 1) if len(fold := chr(code).casefold()) > 1} == FOLDS
    assert from_oniguruma("(?i:s)s|(?i:'s|t)") == "(?i:s)s|(?i:'s|t)"  # characters that do not follow one another
