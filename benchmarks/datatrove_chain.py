"""Run datatrove's chain of curation over a file, in the Python that has datatrove: for benchmarks.curate_chain.

``PYTHON benchmarks/datatrove_chain.py FOLDER FILE`` reads FILE in FOLDER, JSON Lines with zstd, filters, masks
addresses, removes near-duplicates, and writes JSON Lines with zstd to FOLDER. It prints the CPU seconds. Imports
nothing of this project.
"""

import sys
import time
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.text import split_into_words


def main() -> None:
    folder, file = sys.argv[1:]
    split_into_words("The first call loads the tokenizer.")
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    read = JsonlReader(folder, glob_pattern=file, compression="zstd")
    kept = JsonlReader(f"{folder}/filtered", compression="zstd")
    steps: list[list[Any]] = [
        [
            read,
            GopherRepetitionFilter(),
            GopherQualityFilter(),
            C4QualityFilter(),
            FineWebQualityFilter(),
            PIIFormatter(),
            JsonlWriter(f"{folder}/filtered", compression="zstd"),
        ],
        [kept, MinhashDedupSignature(f"{folder}/signatures", config)],
        [MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)],
        [MinhashDedupCluster(f"{folder}/buckets", f"{folder}/remove", config=config)],
        [kept, MinhashDedupFilter(f"{folder}/remove"), JsonlWriter(f"{folder}/out", compression="zstd")],
    ]
    started = time.process_time()
    for number, pipeline in enumerate(steps):
        tasks = config.num_buckets if number == 2 else 1
        executor = LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{folder}/logs-{number}")
        executor.run()
    print(time.process_time() - started)
    if not any(Path(folder, "out").iterdir()):
        sys.exit("datatrove wrote nothing")


if __name__ == "__main__":
    main()
