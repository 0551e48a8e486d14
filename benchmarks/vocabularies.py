"""The tokenizers of the tokenizer benchmarks: GPT-2's, and one for each other pattern.

The library quicktok brings the published vocabularies of most patterns. Without it, and for the others, GPT-2's
vocabulary is used with the pattern.
"""

import importlib.util
import sys
from importlib import import_module as load
from pathlib import Path
from typing import Any

from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.merges import derive_merges
from lm.tokenizer.tokenizer import Tokenizer

QUICKTOK = {"cl100k": "cl100k_base", "o200k": "o200k_base", "llama3": "llama3", "qwen2": "qwen3"}


NUM_SPECIALS = 256  # of a chat model


def prepare(folder: Path, pattern: str, vocab: Path, merges: Path, is_chat: bool = False) -> Path:
    """Return a folder with the files of :meth:`lm.tokenizer.tokenizer.Tokenizer.save` for a pattern.

    ``vocab`` and ``merges`` are GPT-2's files. The separator is <|endoftext|> with all vocabularies. With ``is_chat``,
    the tokenizer has 256 special tokens and normalizes to NFC, as those of chat models.
    """
    if is_chat:
        plain = Tokenizer.load(prepare(folder, pattern, vocab, merges))
        specials = [END_OF_TEXT, *(f"<|reserved_{number}|>" for number in range(1, NUM_SPECIALS))]
        path = folder / f"tokenizer-{pattern}-chat"
        Tokenizer(*plain.parts._replace(special_tokens=specials, normalizer="NFC")).save(path)
        return path
    is_published = pattern in QUICKTOK and importlib.util.find_spec("quicktok") is not None
    source = QUICKTOK[pattern] if is_published else "gpt2"
    path = folder / f"tokenizer-{pattern}-{source}"
    if source == "gpt2":
        Tokenizer.from_files(vocab, merges, [END_OF_TEXT], pattern).save(path)
    elif not (path / "tokenizer_config.json").exists():
        print(f"reading the vocabulary {source} of quicktok", file=sys.stderr)
        read_published(source, pattern).save(path)
    return path


def read_published(source: str, pattern: str) -> Tokenizer:
    """Return the tokenizer of a vocabulary of quicktok."""
    encoding: Any = load("quicktok").get_encoding(source)
    ranks = {encoding.encode_single_token(token): token for token in encoding.token_byte_values()}
    vocab = {**ranks, max(ranks) + 1: END_OF_TEXT.encode()}
    return Tokenizer(vocab, derive_merges(ranks), [END_OF_TEXT], pattern, ignore_merges=True)
