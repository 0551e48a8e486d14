"""Stage ``encode``: chunks and tokenizer in, token shards out; mapped over the chunks, then indexed."""

import json
from functools import lru_cache
from typing import Any

from lm.shards import write_shard
from lm.tokenizer import Tokenizer, token_dtype
from tasks import pages
from tasks.output import Output
from tasks.stage import Draft, stage
from tasks.texts import Chunk, open_ranges

# A run's tokenizer, the same for all chunks: what it has learned of pretokens serves them all.
_load = lru_cache(maxsize=1)(Tokenizer.load)


@stage("encode-chunk", libraries=("regex",), run_name="encode {chunk}")
def encode_chunk(out: Draft, chunk: Chunk, tokenizer: Output, separator: str) -> None:
    """Encode one chunk to one shard: ``tokens.bin``, ``documents.npy`` and ``shard.json`` with their numbers."""
    loaded = _load(tokenizer.directory("tokenizer"))
    tokens, documents = write_shard(open_ranges(chunk, out.stopping), loaded, separator, out.directory)
    out.figures = {"tokens": tokens, "documents": documents, "bytes": chunk.bytes}
    (out.directory / "shard.json").write_text(json.dumps(out.figures), encoding="utf-8")


@stage("encode", page=pages.encode)
def encode(out: Draft, train: list[Output], valid: list[Output], tokenizer: Output, separator: str) -> None:
    """List the shards in their order in ``index.json``, with the statistics of each split."""
    vocab_size = _load(tokenizer.directory("tokenizer")).size
    index: dict[str, Any] = {
        "vocab_size": vocab_size,
        "dtype": token_dtype(vocab_size).str,
        "separator": separator,
        "tokenizer": tokenizer.digest,
    }
    for split, parts in (("train", train), ("valid", valid)):
        shards = [part.json("shard.json") for part in parts]
        totals = {name: sum(shard[name] for shard in shards) for name in ("tokens", "documents", "bytes")}
        out.figures[split] = {**totals, "bytes_per_token": totals["bytes"] / max(1, totals["tokens"])}
        index[split] = {
            **out.figures[split],
            "shards": [{"digest": part.digest, **shard} for part, shard in zip(parts, shards, strict=True)],
        }
    (out.directory / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
