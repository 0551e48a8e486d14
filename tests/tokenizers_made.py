"""Tokenizers made for the tests, and text to try them on."""

from collections.abc import Mapping

import pyarrow as pa
from hypothesis import strategies as st

from lm.bpe import train_merges
from lm.counts import SCHEMA, count_pretokens
from lm.demo_corpus import demo_stories
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer import Tokenizer

SPECIALS = [END_OF_TEXT, "<|endoftext|><|endoftext|>", "<|a b|>", "é!"]
CUSTOM_PATTERN = r"\p{L}{1,3}|\p{N}|[^\p{L}\p{N}\s]+"  # white space falls into the gaps


def make_tokenizer(
    pattern: str = GPT2_PATTERN, special_tokens: list[str] | None = None, merges: int = 400
) -> Tokenizer:
    """A tokenizer trained on demo stories and some text that is not ASCII."""
    special_tokens = SPECIALS if special_tokens is None else special_tokens
    blocks = [*demo_stories(100), "naïve café déjà vu 日本語の文章 日本語 🙂🙂 aaaaaaaa abababab \n\n\n\t\t" * 5]
    [counts] = count_pretokens([[block.encode() for block in blocks]], SPECIALS, pattern)
    vocab, learned = train_merges(counts, 256 + len(special_tokens) + merges, special_tokens)
    return Tokenizer(vocab, learned, special_tokens, pattern)


def counts_table(counts: Mapping[bytes, int] | Mapping[str, int]) -> pa.Table:
    """Pretoken counts as ``lm`` has them."""
    pretokens = [pretoken.encode() if isinstance(pretoken, str) else pretoken for pretoken in counts]
    return pa.table([pretokens, list(counts.values())], schema=SCHEMA)


def bytes_tokenizer(special_tokens: list[str] | None = None) -> Tokenizer:
    """A tokenizer without merges."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens)


pieces = st.sampled_from(
    [
        *SPECIALS,
        "<|endof",
        "<|a",
        " b|>",
        "Once upon a time",
        "there was",
        "café",
        "日本語",
        "aaaaa",
        "ababa",
        "🙂",
        " ",
        "\n",
    ]
)
