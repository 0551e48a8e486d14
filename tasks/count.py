"""Stage ``count``: chunks in, one table of pretoken counts out; mapped over the chunks, then added up."""

from collections import Counter

from lm.counts import count_pretokens, merge_counts, write_counts
from tasks import pages
from tasks.stage import Draft, Output, stage
from tasks.texts import Chunk, open_ranges


@stage("count-chunk", libraries=("regex",), run_name="count {chunk}")
def count_chunk(out: Draft, chunk: Chunk, special_tokens: list[str], pattern: str) -> None:
    """Count the pretokens of one chunk."""
    counts = sum(
        (count_pretokens(blocks, special_tokens, pattern) for blocks, _ in open_ranges(chunk, out.stopping)),
        start=Counter[str](),
    )
    out.figures = {"bytes": chunk.bytes, "pretokens": counts.total(), "unique": len(counts)}
    write_counts(out.directory / "counts.parquet", counts)


@stage("count", page=pages.count)
def count(out: Draft, parts: list[Output]) -> None:
    """Add up the counts of the chunks, the most frequent pretoken first."""
    unique = merge_counts([part.path("counts.parquet") for part in parts], out.directory / "counts.parquet")
    out.figures = {"pretokens": sum(part.manifest["figures"]["pretokens"] for part in parts), "unique": unique}
