"""The page of the pretoken counts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.pages.charts import embed_figure, new_figure
from tasks.pages.markdown import code, table

if TYPE_CHECKING:
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt


def count(out: "Attempt", parts: "list[Output]") -> Iterator[str]:
    """Show the most common and the longest pretokens, the counts by rank, and the memory that merge will need."""
    from lm.tokenizer.bpe import training_memory_bytes
    from lm.tokenizer.pretoken_counts import summarize_counts

    summary = summarize_counts(out.directory / "counts.parquet", (1, 2, 3, 5, 10))
    total = summary.total
    yield f"**{total:,}** pretokens, **{summary.unique:,}** different ones, from {len(parts):,} groups of chunks."
    figure, axes = new_figure("Zipf's law: the count of the pretoken of each rank", "rank", "count")
    if summary.unique:
        axes.loglog(*summary.counts_by_rank)
    yield embed_figure(figure, "Counts by rank")
    rows = [(code(pretoken), count, f"{100 * count / total:.2f} %") for pretoken, count in summary.common]
    yield "### Most common\n\n" + table(("pretoken", "count", "share"), rows)
    longest = [(code(pretoken[:80]), len(pretoken), count) for pretoken, count in summary.longest]
    yield "### Longest\n\n" + table(("pretoken", "bytes", "count"), longest)
    costs = [
        (
            min_count,
            kept.unique,
            kept.bytes,
            f"{100 * kept.total / max(1, total):.2f} %",
            training_memory_bytes(kept.unique, kept.bytes) / 1e9,
        )
        for min_count, kept in summary.kept.items()
    ]
    header = ("tokenizer.min_count", "different pretokens", "bytes", "share of all occurrences", "memory for merge, GB")
    yield "### What rare pretokens cost\n\n" + table(header, costs)
