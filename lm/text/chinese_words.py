"""Pretokens of Chinese text: the words that the library jieba finds.

Chinese has no spaces between words, so GPT-2's pattern makes a pretoken of a whole clause, and merges learn pieces that
cross words. Segmentation first keeps merges within words.
"""

import functools
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

import regex

from lm.common.errors import UserError

JIEBA = "jieba"
_MISSING = "tokenizer.pattern jieba needs an extra: pip install 'textmill[jieba]'."

_RUN = regex.compile(r"( ?)(\p{Han}+)|\P{Han}+")


def split_chinese_words(pretoken: str) -> Iterator[str]:
    """Yield the words of each run of Chinese characters in a pretoken of GPT-2's pattern, and the text between runs.

    A space before a run belongs to its first word. Raises UserError if jieba is not installed.
    """
    for run in _RUN.finditer(pretoken):
        space, characters = run.groups()
        if not characters:
            yield run.group()
            continue
        for word in _segmenter().cut(characters):
            yield space + word
            space = ""


def jieba_version() -> str:
    """Return the version of jieba, whose dictionary decides the words. Raises UserError if it is not installed."""
    try:
        return metadata.version("jieba")
    except ImportError:
        raise UserError(_MISSING) from None


@functools.cache
def _segmenter() -> Any:
    try:
        jieba = import_module("jieba")
    except ImportError:
        raise UserError(_MISSING) from None
    segmenter = jieba.Tokenizer()
    # Without this, jieba would read a file that any user of this machine may have written to the temporary directory.
    segmenter.FREQ, segmenter.total = segmenter.gen_pfdict(segmenter.get_dict_file())
    segmenter.initialized = True
    return segmenter
