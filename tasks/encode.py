"""Stage ``encode``: encode each group of chunks to a token shard, then write the index of the shards."""

import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.pages import text as pages
from tasks.runtime.inputs import Ranges, open_ranges, size_in_bytes
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    from lm.tokenizer.tokenizer import Tokenizer

_load_lock = threading.Lock()


def _load_tokenizer(directory: Path) -> "Tokenizer":
    """Load the tokenizer of a run once: all groups then share its cache of pretokens."""
    with _load_lock:  # lru_cache alone would let several threads load it at the same time
        return _load_tokenizer_once(directory)


@lru_cache(maxsize=1)
def _load_tokenizer_once(directory: Path) -> "Tokenizer":
    from lm.tokenizer.tokenizer import Tokenizer

    return Tokenizer.load(directory)


@stage("encode-group", is_mapped=True)
def encode_group(out: Attempt, group: Ranges, tokenizer: Output, separator: str, tables: str, jieba: str = "") -> None:
    """Encode one group to a shard: ``tokens.bin``, ``documents.npy``, and the totals in ``shard.json``.

    ``tables``: see :func:`lm.text.character_tables.tables_identity`. ``jieba``: its version, if the pattern is jieba,
    for the key.
    """
    from lm.data.token_shards import write_shard
    from lm.text.character_tables import check_tables

    loaded_tokenizer = _load_tokenizer(tokenizer.directory("tokenizer"))
    check_tables(loaded_tokenizer.pattern, tables)
    texts = open_ranges(group, out.run.stopping)
    tokens, documents = write_shard(texts, loaded_tokenizer, separator, out.directory)
    out.figures = {"tokens": tokens, "documents": documents, "bytes": size_in_bytes(group)}
    out.write_json("shard.json", out.figures)
    out.figures["special_texts"] = sum(part.special_texts for _, part in group)


@stage("encode", page=pages.encode)
def encode(
    out: Attempt,
    train: list[Output],
    valid: list[Output],
    tokenizer: Output,
    separator: str,
    sources: dict[str, list[str]] | None = None,
) -> None:
    """Write ``index.json``: the shards in order, and the totals of each split.

    ``sources``: for each split, the name of the source of ``data.mix`` that each shard belongs to. The index then has
    the totals of each source too.
    """
    from lm.tokenizer.tokenizer import token_dtype

    vocab_size = _load_tokenizer(tokenizer.directory("tokenizer")).size
    index: dict[str, Any] = {
        "vocab_size": vocab_size,
        "dtype": token_dtype(vocab_size).str,
        "separator": separator,
        "tokenizer": tokenizer.digest,
    }
    for split, parts in (("train", train), ("valid", valid)):
        shards = out.run.store.map(lambda part: part.json("shard.json"), parts)
        totals = _add_up(shards)
        out.figures[split] = {**totals, "bytes_per_token": totals["bytes"] / max(1, totals["tokens"])}
        if sources is not None:
            named = [*zip(sources[split], shards, strict=True)]
            out.figures[split]["sources"] = {
                source: _add_up([shard for name, shard in named if name == source])
                for source in dict.fromkeys(sources[split])
            }
        index[split] = {
            **out.figures[split],
            "shards": [{"digest": part.digest, **shard} for part, shard in zip(parts, shards, strict=True)],
        }
    out.write_json("index.json", index, indent=1)


def _add_up(shards: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(shard[name] for shard in shards) for name in ("tokens", "documents", "bytes")}
