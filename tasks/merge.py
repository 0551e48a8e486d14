"""Stage ``merge``: learn the merges of the tokenizer from pretoken counts."""

from typing import TYPE_CHECKING

from lm.tokenizer.config import TokenizerConfig
from tasks.pages import tokenizer as pages
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt, show_progress
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    import pyarrow as pa


@stage("merge", page=pages.merge)
def merge(out: Attempt, counts: Output, config: TokenizerConfig) -> None:
    """Learn the merges and save the tokenizer in all its formats."""
    from lm.tokenizer.bpe import train_merges
    from lm.tokenizer.tokenizer import Tokenizer

    merge_count = config.vocab_size - 256 - len(config.special_tokens)
    with show_progress("merge", merge_count, "merge", out.run.label) as progress:
        vocab, merges = train_merges(
            _read_counts(out, counts, config.min_count),  # in no variable: train_merges frees its memory
            config.vocab_size,
            config.special_tokens,
            config.min_frequency,
            progress,
        )
    Tokenizer(vocab, merges, config.special_tokens, config.pattern).save(out.directory / "tokenizer")
    longest = max((left + right for left, right in merges), key=len, default=b"").decode("utf-8", "replace")
    out.figures |= {"vocab_size": len(vocab), "merges": len(merges), "longest_token": longest}


def _read_counts(out: Attempt, counts: Output, min_count: int) -> "pa.Table":
    """Read the counts, and note how many pretokens are left out because they are rare."""
    import pyarrow.compute as pc

    from lm.tokenizer.pretoken_counts import read_counts

    table, total = read_counts(counts.path("counts.parquet"), min_count), counts.manifest["figures"]
    if rare := total["unique"] - len(table):
        share = 1 - (pc.sum(table["count"]).as_py() or 0) / total["pretokens"]
        out.figures["left_out"] = {"unique": rare, "share": share}
    return table
