"""Stage ``merge``: pretoken counts in, the tokenizer out."""

from lm.bpe import TokenizerConfig, train_merges
from lm.counts import read_counts
from lm.tokenizer import Tokenizer
from tasks import pages
from tasks.output import Output
from tasks.progress import show_progress
from tasks.stage import Draft, stage


@stage("merge", page=pages.merge)
def merge(out: Draft, counts: Output, config: TokenizerConfig) -> None:
    """Learn the merges and save the tokenizer in all its formats."""
    wanted = config.vocab_size - 256 - len(config.special_tokens)
    with show_progress("merge", wanted, "merge") as progress:
        vocab, merges = train_merges(
            read_counts(counts.path("counts.parquet")),
            config.vocab_size,
            config.special_tokens,
            config.min_frequency,
            progress,
        )
    Tokenizer(vocab, merges, config.special_tokens, config.pattern).save(out.directory / "tokenizer")
    longest = max((left + right for left, right in merges), key=len, default=b"").decode("utf-8", "replace")
    out.figures = {"vocab_size": len(vocab), "merges": len(merges), "longest_token": longest}
