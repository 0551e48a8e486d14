"""Pretoken counts by plain Python, the reference for the kernels, and tables of counts."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from lm.text.pretokenize import pretokenize, split_special_tokens
from lm.tokenizer.pretoken_counts import SCHEMA


def reference_counts(text: str, special_tokens: Sequence[str], pattern: str) -> Counter[str]:
    """Count the pretokens of a text in memory."""
    return Counter(
        pretoken
        for piece, is_special in split_special_tokens(text, special_tokens)
        if not is_special
        for pretoken in pretokenize(piece, pattern)
    )


def to_counter(tables: Iterable[pa.Table]) -> Counter[str]:
    """Add up tables of pretoken counts."""
    counter: Counter[str] = Counter()
    for table in tables:
        for pretoken, count in zip(*(column.to_pylist() for column in table.columns), strict=True):
            counter[pretoken.decode()] += count
    return counter


def counts_table(counts: Mapping[bytes, int] | Mapping[str, int]) -> pa.Table:
    """Make a table of pretoken counts."""
    pretokens = [pretoken.encode() if isinstance(pretoken, str) else pretoken for pretoken in counts]
    return pa.table([pretokens, list(counts.values())], schema=SCHEMA)


def make_text(num_pretokens: int, prefix: str = "") -> str:
    """Make a text of ``num_pretokens`` different pretokens, some of them twice."""
    source = random.Random(num_pretokens)
    pretokens: dict[str, None] = {}
    while len(pretokens) < num_pretokens:
        word = "".join(source.choices("abcdefghijklmnopqrstuvwxyzéß", k=source.randrange(3, 22)))
        pretokens[f" {prefix}{word}"] = None
    return "".join([*pretokens, *list(pretokens)[::3]])
