"""Added tokens with flags, and normalizers: equal to Hugging Face's tokenizers and to a reference on the whole text."""

import time
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.normalize import NORMALIZERS
from lm.text.patterns import PATTERNS
from lm.tokenizer.added_tokens import AddedToken, split_added_tokens
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.stream import encode_files
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer, published_parts

WHITE = " \t\n\r\v\f\x85\xa0\u2003\u3000"
CONTENTS = ["<a>", "<a><b>", " x", "x ", "ab", "ab ab", "  ", "é!", "e\u0301q", "日本", "_", "\u2126s", "\u0338z", "<"]
FRAGMENTS = [*CONTENTS, *WHITE, "\x1c", "\u200b", *"abxeé9²ﬁ>K", "\u0301", "\u0338", "\u212a"]
flags = st.booleans()
added_tokens = st.lists(
    st.builds(
        AddedToken, st.sampled_from(CONTENTS), flags, lstrip=flags, rstrip=flags, single_word=flags, normalized=flags
    ),
    max_size=5,
    unique_by=lambda token: unicodedata.normalize("NFKD", token.content),
)
normalizers = st.sampled_from([None, *NORMALIZERS])
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14)
patterns = st.sampled_from([PATTERNS["gpt2"], PATTERNS["qwen2"], CUSTOM_PATTERN])


def naive_split(text: str, tokens: list[AddedToken]) -> list[str | AddedToken]:
    """Split a text at its added tokens, one position after the other."""
    parts: list[str | AddedToken] = []
    i = begin = 0
    while i < len(text):
        here = [token for token in tokens if text.startswith(token.content, i)]
        if not here:
            i += 1
            continue
        token = max(here, key=lambda token: len(token.content))
        start, end = i, i + len(token.content)
        i = end
        around = text[start - 1 : start], text[end : end + 1]
        if token.single_word and any(c == "_" or unicodedata.category(c or " ")[0] in "LM" or c == "9" for c in around):
            continue
        while token.lstrip and start > begin and text[start - 1] in WHITE:
            start -= 1
        while token.rstrip and end < len(text) and text[end] in WHITE:
            end += 1
        if token.lstrip and begin >= end:  # the token before took all of its text, and Hugging Face drops it
            continue
        parts += [text[begin:start], token]
        begin = end
    return [part for part in [*parts, text[begin:]] if part]


@examples(300)
@given(texts, added_tokens)
@example(["<a>", "  "], [AddedToken("<a>", rstrip=True), AddedToken("  ", lstrip=True)])
def test_split_added_tokens_equals_the_naive_reference(blocks: list[str], tokens: list[AddedToken]) -> None:
    parts: list[str | AddedToken] = [""]
    for part in split_added_tokens(blocks, tokens):
        if isinstance(part, str) and isinstance(last := parts[-1], str):
            parts[-1] = last + part
        else:
            parts.append(part)
    assert [part for part in parts if part] == naive_split("".join(blocks), tokens)


def test_white_space_that_a_token_may_take_is_searched_in_linear_time() -> None:
    tokens = [AddedToken("<a>", lstrip=True), AddedToken("<b>", rstrip=True)]
    blocks = ["x<b>", *[" "] * 100_000, "y", *[" "] * 100_000, "<a>"]
    assert list(split_added_tokens(blocks, tokens)) == ["x", tokens[1], "y", tokens[0]]


def test_many_tokens_in_one_block_take_linear_time() -> None:
    tokens = [AddedToken("<a>", lstrip=True), AddedToken("<b>", rstrip=True)]
    assert list(split_added_tokens(["x <a>y<b> " * 300_000], tokens)) == ["x", tokens[0], "y", tokens[1]] * 300_000


@cache
def trained_parts() -> TokenizerParts:
    return make_tokenizer(special_tokens=[], merges=60).parts


def make(tokens: list[AddedToken], normalizer: str | None, pattern: str) -> Tokenizer:
    vocab, merges, *_ = trained_parts()
    return Tokenizer(vocab, merges, ["<s>"], pattern, normalizer=normalizer, added_tokens=tokens)


@examples(300)
@given(texts, added_tokens, normalizers, patterns)
def test_hugging_face_encodes_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    blocks: list[str],
    tokens: list[AddedToken],
    normalizer: str | None,
    pattern: str,
) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    tokenizer, text = make(tokens, normalizer, pattern), "".join(blocks)
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    tokenizer.save_tokenizer_json(path)
    assert tokenizer.encode(text) == hf.Tokenizer.from_file(str(path)).encode(text).ids
    assert Tokenizer.from_tokenizer_json(path).parts == published_parts(tokenizer)


@examples(200)
@given(texts, added_tokens, normalizers, patterns, st.integers(1, 64), flags)
def test_blocks_of_text_are_encoded_like_the_whole(
    blocks: list[str],
    tokens: list[AddedToken],
    normalizer: str | None,
    pattern: str,
    window: int,
    has_specials: bool,
) -> None:
    tokenizer = make(tokens, normalizer, pattern)
    allowed = tokenizer.special_tokens if has_specials else []
    expected = tokenizer.encode_reference("".join(blocks), allowed)
    arrays = tokenizer.encode_blocks((block.encode() for block in blocks), allowed, window)
    assert [i for ids in arrays for i in ids.tolist()] == expected == tokenizer.encode("".join(blocks), allowed)


@examples(200)
@given(
    st.lists(st.sampled_from(["<s>", "<a>", "<m>", "é", "e\u0301", "\u0301", *"abcde fg>"]), max_size=60),
    st.integers(1, 6),
    st.integers(1, 9),
    normalizers,
    patterns,
)
@example(["e\u0301bcdefg" * 4, "<s>", "ab", "<s>", "e\u0301", "<m>", "é"], 1, 3, "NFC", "gpt2")  # a long first document
def test_long_documents_in_small_windows_equal_the_reference(
    parts: list[str], window: int, size: int, normalizer: str | None, pattern: str
) -> None:
    text = "".join(parts)
    tokenizer = make([AddedToken("<a>"), AddedToken("<m>", lstrip=True)], normalizer, pattern)
    data = text.encode()
    arrays = tokenizer.encode_blocks((data[i : i + size] for i in range(0, len(data), size)), window=window)
    assert [i for ids in arrays for i in ids.tolist()] == tokenizer.encode_reference(text)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_token_that_normalization_would_make_or_hide_is_found_as_in_the_reference(normalizer: str) -> None:
    tokenizer = make([AddedToken("<é>"), AddedToken("<e\u0301>"), AddedToken("ﬁ")], normalizer, PATTERNS["gpt2"])
    for text in ("ab <é> e\u0301<s>", "<e\u0301> ²<s>é", "ﬁn e\u0301 ﬁ<s>²", "fin e\u0301<s>a <\u0301>"):
        assert tokenizer.encode(text) == tokenizer.encode_reference(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("special_tokens", "normalizer", "tokens", "some", "limit"),
    [
        ([], "NFC", [], "a", 5),
        ([], None, [AddedToken("<m>", lstrip=True)], "a", 5),
        ([], "NFC", [], "e\u0301", 20),
        ([f"<|{i}|>" for i in range(1000)], None, [], "a", 4),
        ([chr(192 + i // 26) + chr(192 + i % 26) for i in range(676)], None, [], "a", 4),
    ],
    ids=["normalizer", "flag", "some_not_normalized", "many_special_tokens", "many_first_bytes"],
)
def test_short_documents_are_encoded_nearly_as_fast_as_without_options(
    special_tokens: list[str], normalizer: str | None, tokens: list[AddedToken], some: str, limit: float
) -> None:
    """Each of these took 10 to 100 times as long."""
    vocab, merges, *_ = trained_parts()
    plain = Tokenizer(vocab, merges, ["<s>"])
    other = Tokenizer(vocab, merges, ["<s>", *special_tokens], normalizer=normalizer, added_tokens=tokens)
    story = "Once upon a time there was a little dog who liked to run in the park with his friends. " * 4
    texts = [("".join(f"{story}{end if i % 40 == 0 else 'a'}<s>" for i in range(6000))).encode() for end in ("a", some)]

    def seconds(tokenizer: Tokenizer, text: bytes) -> float:
        started = time.thread_time()
        list(tokenizer.encode_blocks([text]))
        return time.thread_time() - started

    expected, taken = (
        min(seconds(one, text) for _ in range(4)) for one, text in zip((plain, other), texts, strict=True)
    )
    assert taken < limit * expected


TOKENS = [
    AddedToken("<think>", special=False),
    AddedToken("<mask>", lstrip=True),
    AddedToken("  ", special=False, normalized=True, id=300),
]


def spaces_tokenizer() -> Tokenizer:
    """Make a tokenizer in which two spaces are an added and a merged token, as in GPT-NeoX's."""
    vocab = {**bytes_tokenizer().vocab, 256: b"  "}
    return Tokenizer(vocab, [(b" ", b" ")], ["<s>"], normalizer="NFC", added_tokens=TOKENS)


def test_tokens_that_are_not_special_are_always_found() -> None:
    tokenizer = spaces_tokenizer()
    assert tokenizer.special_tokens == ["<s>", "<mask>"]
    ids = {token.content: tokenizer.encode(token.content)[0] for token in tokenizer.added_tokens}
    assert ids == {"<s>": 257, "<mask>": 258, "<think>": 259, "  ": 300}
    assert tokenizer.encode("<s><think>", allowed_special=()) == [*b"<s>", 259]
    assert tokenizer.encode("a <mask>b", allowed_special=["<mask>"]) == [ord("a"), 258, ord("b")]
    assert tokenizer.decode([300, 256, 259]) == "    <think>"
    with pytest.raises(UserError, match="'<think>' is not a special token"):
        tokenizer.encode("", allowed_special=["<think>"])


def test_all_files_keep_flags_ids_and_normalizer(tmp_path: Path) -> None:
    for tokenizer in (spaces_tokenizer(), Tokenizer(bytes_tokenizer().vocab, [], pattern=("a+", r"\s"))):
        tokenizer.save(tmp_path)
        for again in (Tokenizer.load(tmp_path), Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")):
            assert published_parts(again) == published_parts(tokenizer)
            assert again.encode("a  <mask>e\u0301  ") == tokenizer.encode("a  <mask>e\u0301  ")


def test_tiktoken_cannot_hold_flags_and_normalizers(tmp_path: Path) -> None:
    for options in ({"normalizer": "NFC"}, {"added_tokens": TOKENS[1:2]}):
        tokenizer = Tokenizer(bytes_tokenizer().vocab, [], **options)
        with pytest.raises(UserError, match="tiktoken has no normalizer and no flags"):
            tokenizer.save_tiktoken(tmp_path / "ranks.tiktoken")


def test_files_are_encoded_like_their_text(tmp_path: Path) -> None:
    text = "e\u0301 <s>  <mask> 日本 <think>\n" * 500
    (tmp_path / "text.txt").write_text(text, "utf-8")
    tokenizer = spaces_tokenizer()
    paths = encode_files([tmp_path / "text.txt"], tokenizer, tmp_path / "ids")
    assert np.concatenate([np.fromfile(path, "<u2") for path in paths]).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "NFX"}, "The normalizer 'NFX' is unknown; use NFC, NFD, NFKC, NFKD or none"),
        ({"added_tokens": [AddedToken("a", id=5)]}, "The id 5 of the added token 'a' is that of b'\\\\x05'"),
        ({"added_tokens": [AddedToken("<a>"), AddedToken("<a>", lstrip=True)]}, "'<a>' is given twice"),
        ({"added_tokens": [AddedToken("")]}, "is empty"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer(bytes_tokenizer().vocab, [], **options)
