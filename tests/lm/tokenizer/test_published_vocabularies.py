"""The vocabularies of GPT-4, GPT-4o, Llama 3 and Qwen 3, which the library quicktok brings, held against tiktoken."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.texts import CORPORA, documents, emoji, stories, take_bytes
from benchmarks.vocabularies import QUICKTOK, read_published
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT
from tests.helpers.examples import examples
from tests.helpers.tokenizers import stable_text
from tests.helpers.training import ROOT
from tests.lm.tokenizer.test_families import LANGUAGES

_FIRST = next(iter(QUICKTOK))


def own_code() -> Iterator[bytes]:
    return (path.read_bytes() for path in sorted((ROOT / "lm").rglob("*.py")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "corpora"),
    [
        (_FIRST, {"stories": lambda: documents(stories()), "code": own_code, "emoji": emoji}),
        *(pytest.param(name, CORPORA, marks=pytest.mark.long) for name in QUICKTOK),  # with the code of all packages
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_published_vocabulary_gives_the_ids_of_tiktoken(
    pattern: str, corpora: dict[str, Callable[[], Iterable[bytes]]]
) -> None:
    quicktok: Any = pytest.importorskip("quicktok", reason="quicktok is not installed")
    tiktoken: Any = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    textmill = read_published(QUICKTOK[pattern], pattern)
    peer = quicktok.get_encoding(QUICKTOK[pattern])
    ranks = {token: token_id for token_id, token in textmill.vocab.items() if token != END_OF_TEXT.encode()}
    encoding = tiktoken.Encoding(pattern, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={})
    words = [token for token in map(bytes.decode, filter(bytes.isascii, ranks)) if len(token) > 3]

    def check(text: str, with_peer: bool = True) -> None:
        ids = textmill.encode(text, allowed_special=())
        assert ids == encoding.encode_ordinary(text)
        if with_peer and unicodedata.is_normalized("NFC", text):  # quicktok normalizes for Qwen
            assert ids == peer.encode_ordinary(text)
        assert textmill.decode(ids) == text

    for text in LANGUAGES:
        check(text * 30)
    for parts in corpora.values():  # stories, code, CJK and emoji
        # quicktok takes a few tokens of Llama 3 inside a pretoken, which only stand for a whole one
        check(b"".join(take_bytes(parts(), 100_000)).decode(), with_peer=pattern != "llama3")

    @examples(50)
    @given(st.lists(st.sampled_from([*words, *LANGUAGES, " ", "\n"]) | stable_text, max_size=12).map("".join))
    def any_text(text: str) -> None:
        check(text, with_peer=False)

    any_text()
