"""Learn merges from very many different pretokens: the time and the memory, beside the prediction of the count page.

``python -m benchmarks.merge_memory [--gigabytes 1.5] [--vocab-size 32000] [--min-counts 1,2] [--limit 16]``. The
pretokens are pairs and triples of words. Seven of ten occur once. A process that takes more than ``limit`` gigabytes
(10⁹ bytes) is killed. Linux only. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.load import run_limited
from benchmarks.texts import documents, package_files, stories
from lm.tokenizer.bpe import train_merges, training_memory_bytes
from lm.tokenizer.pretoken_counts import NUM_PARTITIONS, SCHEMA, count_pretokens, read_counts, summarize_counts

_NUM_WORDS = 20_000
_SHARE_OF_RARE = 0.7


def write_pretokens(path: Path, text_bytes: int) -> None:
    """Write a file of counts with about ``text_bytes`` of different pretokens."""
    rng = np.random.default_rng(0)
    texts = ([document] for source in (documents(stories()), package_files("*.py")) for document in source)
    [counted] = count_pretokens(texts, [])
    words = counted.sort_by([("count", "descending")])["pretoken"].combine_chunks()[:_NUM_WORDS]
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for _ in range(NUM_PARTITIONS):
            partition_bytes = text_bytes // NUM_PARTITIONS
            rows = partition_bytes // 8
            parts = [words.take(pa.array(rng.integers(0, len(words), rows))) for _ in range(2)]
            pretokens = pc.unique(pc.binary_join_element_wise(*parts, b""))
            ends = np.cumsum(pc.binary_length(pretokens).to_numpy(), dtype=np.int64)
            pretokens = pretokens[: int(np.searchsorted(ends, partition_bytes))]
            ranks = np.arange(1, len(pretokens) + 1)
            counts = np.maximum(1, (len(pretokens) * (1 - _SHARE_OF_RARE) * 2 / ranks).astype(np.int64))
            writer.write_table(pa.table([pretokens, counts], schema=SCHEMA), row_group_size=len(pretokens))


def main() -> None:
    """Measure, or learn the merges of a file as one measured process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--min-counts", default="1,2")
    parser.add_argument("--limit", type=float, default=16)
    parser.add_argument("--learn", nargs=2, metavar=("FILE", "MIN_COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learn:
        path, min_count = options.learn
        train_merges(read_counts(Path(path), int(min_count)), options.vocab_size, [])
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.parquet"
        write_pretokens(path, int(options.gigabytes * 1e9))
        min_counts = [int(number) for number in options.min_counts.split(",")]
        for min_count, kept in summarize_counts(path, [1, *min_counts]).kept.items():
            if min_count not in min_counts:
                continue
            command = [sys.executable, "-m", "benchmarks.merge_memory", "--vocab-size", str(options.vocab_size)]
            command += ["--learn", str(path), str(min_count)]
            measured = run_limited(command, int(options.limit * 1e9), Path(folder) / "log")
            predicted_mb = training_memory_bytes(kept.unique, kept.bytes, options.vocab_size) >> 20
            results[min_count] = {**kept._asdict(), **measured, "predicted_mb": predicted_mb}
            print(min_count, results[min_count], (Path(folder) / "log").read_text()[-2000:], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
