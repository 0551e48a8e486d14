"""CPU seconds and file sizes of the stages, by text, chunks, sources and documents."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.site import Site, mixed_text, read_manifests

WORK_GROUPS = 6


@dataclass(frozen=True)
class Work:
    """A run with real text in groups of equal size: CPU seconds of its steps, and sizes of its files in MB."""

    text_mb: float
    cpu: dict[str, float]
    counts_mb: float
    """Files of counts of all groups."""
    unique: int
    """Different pretokens."""
    largest_group: dict[str, float]
    root: Path


def run_work(site: Site, text: bytes) -> Work:
    """Run with a text in :data:`WORK_GROUPS` groups, on a directory and in one thread."""
    name = f"work-{len(text)}"
    corpus, root = site.folder / f"{name}.txt", site.folder / name
    corpus.write_bytes(text)
    target_bytes = len(text) // WORK_GROUPS + 1
    result = site.run(str(root), [str(corpus)], target_bytes, 1, "--data.valid_fraction", "0.001")
    groups, (counts,) = read_manifests(root, "count-group"), read_manifests(root, "count")
    return Work(
        text_mb=len(text) / 1e6,
        cpu={name: step["cpu"] for name, step in result["steps"].items()},
        counts_mb=sum(file_bytes(group, "counts.parquet") for group in groups) / 1e6,
        unique=counts["figures"]["unique"],
        largest_group=max((group["figures"] for group in groups), key=lambda figures: figures["bytes"]),
        root=root,
    )


def file_bytes(manifest: dict[str, Any], name: str) -> int:
    return next(int(file["bytes"]) for file in manifest["files"] if file["path"] == name)


def measure_work(site: Site, megabytes: int) -> dict[str, float]:
    """Return the CPU seconds of each stage for each further MB of real text, and the sizes of its files."""
    from lm.tokenizer.pretoken_counts import counts_to_arrays, read_counts

    text = mixed_text(megabytes * 1_000_000)
    few, many = run_work(site, text[: len(text) // 4]), run_work(site, text)

    def slope(step: str, extra: float) -> float:
        return max(0.0, many.cpu[step] - few.cpu[step]) / extra

    extra_mb, (table,) = many.text_mb - few.text_mb, many.root.glob("count/*/*/counts.parquet")
    group = many.largest_group
    exponent = math.log(many.unique / group["unique"]) / math.log(many.text_mb * 1e6 / group["bytes"])
    shards = read_manifests(many.root, "encode-group")
    (counts,) = read_manifests(many.root, "count")
    return {
        "count_seconds_per_mb": slope("count-group", extra_mb),
        "encode_seconds_per_mb": slope("encode-group", extra_mb),
        "sum_seconds_per_mb": slope("count", many.counts_mb - few.counts_mb),
        "merge_seconds_per_pretoken": slope("merge", many.unique - few.unique),
        "pretokens_of_first_mb": many.unique / many.text_mb**exponent,
        "heaps_exponent": exponent,
        "bytes_per_pretoken": len(counts_to_arrays(read_counts(table))[0]) / many.unique,
        "file_bytes_per_pretoken": file_bytes(counts, "counts.parquet") / many.unique,
        "shard_bytes_per_byte": sum(file_bytes(shard, "tokens.bin") for shard in shards) / len(text),
        "bytes_per_document": len(text) / sum(shard["figures"]["documents"] for shard in shards),
    }


def measure_reading(folder: Path, megabytes: int) -> dict[str, float]:
    """Return the CPU seconds for each MB of the three steps that read all text, without their stages."""
    from lm.text.chunks import cut_chunks
    from lm.text.config import DataConfig
    from lm.text.ingest import read_group
    from lm.text.sources import hash_source

    corpus, out = folder / "reading.txt", folder / "reading"
    corpus.write_bytes(mixed_text(megabytes * 1_000_000))
    out.mkdir()
    source, data = hash_source(str(corpus)), DataConfig(train=[str(corpus)], valid_fraction=0.001)
    calls: dict[str, Callable[[], Any]] = {
        "hash_seconds_per_mb": lambda: hash_source(str(corpus)),
        "ingest_seconds_per_mb": lambda: read_group([source], data, 0.001, out),
        "chunk_seconds_per_mb": lambda: list(cut_chunks([str(corpus)], [data.separator], 1_000_000)),
    }
    seconds = {}
    for name, call in calls.items():
        started = time.process_time()
        call()
        seconds[name] = (time.process_time() - started) / (source.bytes / 1e6)
    return seconds


def measure_lists(folder: Path, num_chunks: int) -> dict[str, float]:
    """Measure long lists: of chunks in a group of sources, of documents in the index."""
    from lm.text.chunks import Range
    from tasks.pages.charts import QUARTER_OCTAVES
    from tasks.runtime.inputs import write_groups

    directory = folder / "lists"
    directory.mkdir()
    chunks = ([Range(0, start, start + 1, False, "0" * 64)] for start in range(num_chunks))
    started = time.process_time()
    write_groups(directory, chunks, 0)
    chunk_seconds = time.process_time() - started

    ends = np.arange(1_000_000) * 500
    started = time.process_time()
    np.histogram(np.diff(ends, prepend=0), QUARTER_OCTAVES)
    return {
        "chunk_seconds_per_chunk": chunk_seconds / num_chunks,
        "index_seconds_per_document": (time.process_time() - started) / len(ends),
    }
