"""Stage ``chunk``: texts in, the units of parallel work out."""

import json
from dataclasses import asdict

from lm.chunks import ChunkConfig, cut_chunks
from tasks import pages
from tasks.output import Output
from tasks.stage import Draft, stage
from tasks.texts import text_paths


@stage("chunk", page=pages.chunk)
def chunk(out: Draft, texts: Output, special_tokens: list[str], pattern: str, config: ChunkConfig) -> None:
    """Cut the texts; ``chunks.json`` lists the byte ranges of each chunk of ``train`` and ``valid``."""
    chunks = {
        split: [
            [asdict(part) for part in ranges]
            for ranges in cut_chunks(text_paths(texts, split), special_tokens, config.target_bytes, pattern)
        ]
        for split in ("train", "valid")
    }
    out.figures = {split: {"chunks": len(found)} for split, found in chunks.items()}
    (out.directory / "chunks.json").write_text(json.dumps(chunks), encoding="utf-8")
