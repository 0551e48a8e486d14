"""NFC of a stream of bytes between added tokens, against one normalization of each text between two tokens."""

import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import InvalidUtf8Error
from lm.kernels.composed import find_uncomposed
from lm.tokenizer import composed_stream
from lm.tokenizer.added_tokens import AddedToken, split_and_normalize
from lm.tokenizer.composed_stream import TextComposer, can_compose
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples

TOKENS = [AddedToken("<|end|>"), AddedToken("<s>")]
# Marks that compose and that are only reordered, what they compose with, Hangul in parts, what NFC replaces by another
# character, characters that stay, and a token.
PARTS = [*"ae>s \n;éがハ한ก語—😀", "\u0301", "\u0338", "\u0323", "\u05b0", "\u3099", "\u1100", "\u1161", "\u11a8", "가"]
PARTS += ["\u212a", "\u037e", "\u0958", "<|end|>", "<s>", "<|end", "|>", "x" * 70]


def make_tokenizer(*special_tokens: str) -> Tokenizer:
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens, normalizer="NFC")


def compose(blocks: Sequence[bytes], tokens: Sequence[AddedToken] = TOKENS) -> bytes:
    return b"".join(TextComposer(tokens).compose(blocks))


def compose_plainly(text: str, tokens: Sequence[AddedToken] = TOKENS) -> bytes:
    runs = split_and_normalize([text], tokens, "NFC")
    return b"".join((part if is_text else part.content).encode() for is_text, run in runs for part in run)


@examples(400)
@given(st.lists(st.sampled_from(PARTS), max_size=60), st.lists(st.integers(0, 400), max_size=6), st.integers(1, 40))
def test_blocks_are_normalized_as_one_text(parts: list[str], cuts: list[int], span: int) -> None:
    text = "".join(parts)
    data = text.encode()
    places = sorted(min(cut, len(data)) for cut in cuts)
    blocks = [data[i:j] for i, j in zip([0, *places], [*places, len(data)], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed_stream, "_SPAN", span)
        assert compose(blocks) == compose_plainly(text)
        assert compose(blocks, []) == compose_plainly(text, [])


def test_long_text_without_ascii_is_normalized() -> None:
    text = "\u0e19\u0e38\u0301\u0323" * 20_000  # no place to cut
    data = text.encode()
    assert compose([data[i : i + 777] for i in range(0, len(data), 777)]) == compose_plainly(text)


def test_characters_that_pass_stay_whatever_stands_before_them() -> None:
    pairs = [unicodedata.decomposition(chr(point)).split() for point in range(0x110000)]
    seconds = {pair[1] for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")}
    joining = {chr(int(second, 16)) for second in seconds} | {chr(point) for point in range(0x1161, 0x1200)}
    count = 0
    for point in (*range(0x80, 0xD800), *range(0xE000, 0x110000)):
        character = chr(point)
        data = np.frombuffer(character.encode(), np.uint8)
        if find_uncomposed(data, 0, len(data)) == len(data):
            count += 1
            assert unicodedata.is_normalized("NFC", character), hex(point)
            assert not unicodedata.combining(character), hex(point)
            assert character not in joining, hex(point)
    assert count > 45_000


@given(st.text("aé語\u0301\u0338😀", max_size=90), st.integers(0, 100))
def test_the_first_such_character_is_found(text: str, start: int) -> None:
    data = text.encode()
    start = min(start, len(text))
    found = find_uncomposed(np.frombuffer(data, np.uint8), len(text[:start].encode()), len(data))
    marks = [i for i, character in enumerate(text) if character in "\u0301\u0338" and i >= start]
    assert found == (len(text[: marks[0]].encode()) if marks else len(data))


def test_a_wrong_byte_is_named_by_its_place_in_the_text() -> None:
    tokenizer = make_tokenizer("<|end|>")
    for start in ("e\u0301" * 3 + "x" * 3000, "plain", "語" * 2000):  # the first becomes shorter
        data = start.encode()
        for wrong in (b"\xff", b"\xe8\xaa", b"\xcc", b"\x80a", b"\xed\xa0\x80"):
            with pytest.raises(InvalidUtf8Error) as caught:
                list(tokenizer.encode_blocks([data + wrong + b"abc" * 900]))
            assert caught.value.offset == len(data)
            with pytest.raises(InvalidUtf8Error) as caught:
                list(tokenizer.encode_blocks([data + wrong, b"abc" * 900]))
            assert caught.value.offset == len(data)


def test_tokens_that_normalization_may_make_or_break_are_refused() -> None:
    assert can_compose(TOKENS)
    assert can_compose([])
    for contents in (["<|é|>"], ["<KEY>"], ["<a>", "<a><b>"], ["aba"]):
        assert not can_compose([AddedToken(content) for content in contents])


def test_texts_are_encoded_as_by_plain_python() -> None:
    tokenizer = make_tokenizer("<|end|>", "<|other|>")
    text = "e\u0301<|end|>\u0338a<|other|>\u0301" + "語😀" * 600 + "\u212a\u0323\u0301<|end|>e\u0301"
    assert tokenizer.encode(text) == tokenizer.encode_reference(text)
    assert tokenizer.encode(text, ["<|end|>"]) == tokenizer.encode_reference(text, ["<|end|>"])
