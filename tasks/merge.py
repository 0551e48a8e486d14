"""Stage ``merge``: learn the merges of the tokenizer from pretoken counts."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lm.tokenizer.config import TokenizerConfig
from tasks.pages import tokenizer as pages
from tasks.runtime.inputs import Ranges, open_ranges
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt, show_progress
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    import pyarrow as pa

    from lm.tokenizer.bpe import Merges, Vocab


@stage("merge", page=pages.merge)
def merge(out: Attempt, counts: Output, config: TokenizerConfig, text: Sequence[Ranges] = (), tables: str = "") -> None:
    """Learn the merges and save the tokenizer in all its formats.

    ``text``: the groups of the training text, from which superwords are learned. ``tables``: see
    :func:`lm.text.character_tables.tables_identity`. Both are given only if there are superwords.
    """
    from lm.text.character_tables import check_tables
    from lm.tokenizer.bpe import train_merges
    from lm.tokenizer.tokenizer import Tokenizer

    vocab_size = config.vocab_size - config.superwords
    merge_count = vocab_size - 256 - len(config.special_tokens)
    if config.superwords:
        check_tables(config.pattern, tables)
    with show_progress("merge", merge_count, "merge", out.run.label) as progress:
        vocab, merges = train_merges(
            _read_counts(out, counts, config.min_count),  # in no variable: train_merges frees its memory
            vocab_size,
            config.special_tokens,
            config.min_frequency,
            progress,
        )
    if config.superwords:
        vocab, merges = _learn_superwords(out, text, merges, config)
    Tokenizer(vocab, merges, config.special_tokens, config.document_pattern).save(out.directory / "tokenizer")
    longest = max((left + right for left, right in merges), key=len, default=b"").decode("utf-8", "replace")
    out.figures |= {"vocab_size": len(vocab), "merges": len(merges), "longest_token": longest}


def _learn_superwords(
    out: Attempt, text: Sequence[Ranges], merges: "Merges", config: TokenizerConfig
) -> tuple["Vocab", "Merges"]:
    """Learn merges that may cross words, and note what they were learned from."""
    from lm.tokenizer.superwords import train_superwords

    def open_text(group: Ranges) -> Iterator[Iterator[bytes]]:
        return (blocks for blocks, _, _ in open_ranges(group, out.run.stopping))

    with show_progress("superwords", config.superwords, "merge", out.run.label) as progress:
        learned = train_superwords(
            [partial(open_text, group) for group in text],
            merges,
            config.vocab_size,
            config.special_tokens,
            config.pattern,
            config.min_frequency,
            out.run.execution.workers,
            progress,
        )
    out.figures["superwords"] = {
        "merges": len(learned.merges) - learned.word_merges,
        "min_frequency": learned.min_frequency,
        "tokens": learned.tokens,
        "pieces": learned.pieces,
    }
    return learned.vocab, learned.merges


def _read_counts(out: Attempt, counts: Output, min_count: int) -> "pa.Table":
    """Read the counts, and note how many pretokens are left out because they are rare."""
    import pyarrow.compute as pc

    from lm.tokenizer.pretoken_counts import read_counts

    table, total = read_counts(counts.path("counts.parquet"), min_count), counts.manifest["figures"]
    if rare := total["unique"] - len(table):
        share = 1 - (pc.sum(table["count"]).as_py() or 0) / total["pretokens"]
        out.figures["left_out"] = {"unique": rare, "share": share}
    return table
