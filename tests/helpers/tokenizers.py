"""Small tokenizers, and text strategies to try them on."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from lm.text.character_tables import PUBLISHED_TABLES
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer

SPECIALS = [END_OF_TEXT, "<|endoftext|><|endoftext|>", "<|a b|>", "é!"]
CUSTOM_PATTERN = r"\p{L}{1,3}|\p{N}|[^\p{L}\p{N}\s]+"  # does not match white space


def make_tokenizer(
    pattern: str = GPT2_PATTERN, special_tokens: list[str] | None = None, merges: int = 400
) -> Tokenizer:
    """Train a tokenizer on demo stories and some text that is not ASCII."""
    special_tokens = SPECIALS if special_tokens is None else special_tokens
    blocks = [*demo_stories(100), "naïve café déjà vu 日本語の文章 日本語 🙂🙂 aaaaaaaa abababab \n\n\n\t\t" * 5]
    [counts] = count_pretokens([[block.encode() for block in blocks]], SPECIALS, pattern)
    return Tokenizer(*train_merges(counts, 256 + len(special_tokens) + merges, special_tokens), special_tokens, pattern)


def bytes_tokenizer(special_tokens: list[str] | None = None) -> Tokenizer:
    """Make a tokenizer without merges."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens)


def published_parts(tokenizer: Tokenizer) -> TokenizerParts:
    """Return the parts as a file of another library gives them, which holds no character tables."""
    return tokenizer.parts._replace(character_tables=PUBLISHED_TABLES)


def with_hugging_face(tokenizers: Sequence[Tokenizer], path: Path) -> list[tuple[Tokenizer, Any]]:
    """Return the tokenizers, each with Hugging Face's tokenizer of its tokenizer.json, which is written to ``path``."""
    library = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    pairs = []
    for tokenizer in tokenizers:
        tokenizer.save_tokenizer_json(path)
        pairs.append((tokenizer, library.Tokenizer.from_file(str(path))))
    return pairs


def has_stable_categories(text: str) -> bool:
    """Whether the characters have the same Unicode category in every library, whatever its Unicode version.

    Python also has the tables of Unicode 3.2, which is older than all of them.
    """
    return all(unicodedata.ucd_3_2_0.category(c) == unicodedata.category(c) != "Cn" for c in text)


text_fragments = st.sampled_from(
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
stable_characters = st.characters(codec="utf-8").filter(has_stable_categories)
stable_text = st.lists(text_fragments | st.text(stable_characters, max_size=10), max_size=10).map("".join)
