"""Stage ``chunk``: cut the texts of each group of sources into chunks, the units of parallel work, then list them."""

import numpy as np

from lm.text.chunks import cut_chunks
from lm.text.config import ChunkConfig
from tasks.pages import text as pages
from tasks.pages.charts import QUARTER_OCTAVES
from tasks.runtime.inputs import OpenTextGroup, write_groups
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage


@stage("chunk-group", is_mapped=True)
def chunk_group(
    out: Attempt, group: OpenTextGroup, special_tokens: list[str], pattern: str, config: ChunkConfig
) -> None:
    """Write ``chunks.jsonl``, the byte ranges of each chunk, and ``groups.json``, the groups of chunks."""
    ranges, rows = [ranges for _, ranges in group.texts], [text.rows for text, _ in group.texts]
    texts = group.urls, special_tokens, config.target_bytes, pattern, ranges
    chunks = cut_chunks(*texts, rows=rows, separator=group.separator)
    with keep_unchanged(group.sources, out.run.store):
        sizes = write_groups(out.directory, chunks, group.bytes_before)
    out.figures = {
        "chunks": len(sizes),
        "bytes": sum(sizes),
        "smallest": min(sizes, default=0),
        "largest": max(sizes, default=0),
        "sizes": np.histogram(sizes, QUARTER_OCTAVES)[0].tolist(),
    }


@stage("chunk", page=pages.chunk)
def chunk(out: Attempt, train: list[Output], valid: list[Output]) -> None:
    """Write ``chunk_groups.json``: the groups of chunks of each split."""
    groups = {}
    for split, parts in (("train", train), ("valid", valid)):
        listed = out.run.store.map(lambda part: part.json("groups.json"), parts)
        groups[split] = [{"part": number, "group": group} for number, part in enumerate(listed) for group in part]
        out.figures[split] = {"chunks": sum(entry["group"]["chunks"] for entry in groups[split])}
    out.write_json("chunk_groups.json", groups)
