"""Stage ``chunk``: cut texts into chunks, the units of parallel work."""

from lm.common.errors import UserError
from lm.text.chunks import cut_chunks
from lm.text.config import ChunkConfig
from tasks.pages import stages as pages
from tasks.runtime.chunk_input import text_ranges, text_urls, write_groups
from tasks.runtime.context import Attempt
from tasks.runtime.output import Output
from tasks.runtime.stage import stage


@stage("chunk", page=pages.chunk)
def chunk(out: Attempt, texts: Output, special_tokens: list[str], pattern: str, config: ChunkConfig) -> None:
    """Write ``chunks.jsonl``, the byte ranges of each chunk, and ``groups.json``, the groups of chunks."""
    if damaged := texts.find_damaged():
        raise UserError(f"{texts.url}/{damaged[0]} is damaged. Run the pipeline again: it makes it again.")
    chunks = {
        split: cut_chunks(
            text_urls(texts, split), special_tokens, config.target_bytes, pattern, text_ranges(texts, split)
        )
        for split in ("train", "valid")
    }
    out.figures = {split: {"chunks": number} for split, number in write_groups(out.directory, chunks).items()}
