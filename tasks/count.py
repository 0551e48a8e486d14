"""Stage ``count``: chunks in, one table of pretoken counts out; mapped over the chunks, then added up."""

from lm.counts import count_to_file, merge_counts
from tasks import pages
from tasks.output import Output
from tasks.stage import Draft, stage
from tasks.texts import Chunk, open_ranges


@stage("count-chunk", libraries=("regex",), run_name="count {chunk}")
def count_chunk(out: Draft, chunk: Chunk, special_tokens: list[str], pattern: str) -> None:
    """Count the pretokens of one chunk."""
    texts = (blocks for blocks, _ in open_ranges(chunk, out.stopping))
    memory = (out.execution.count_memory << 20) // out.execution.workers
    total, unique = count_to_file(out.directory / "counts.parquet", texts, special_tokens, pattern, memory)
    out.figures = {"bytes": chunk.bytes, "pretokens": total, "unique": unique}


@stage("count", page=pages.count)
def count(out: Draft, parts: list[Output]) -> None:
    """Add up the counts of the chunks."""
    total, unique = merge_counts([part.path("counts.parquet") for part in parts], out.directory / "counts.parquet")
    out.figures = {"pretokens": total, "unique": unique}
