"""Curate a text that is larger than memory, in a limit of memory.

``python -m benchmarks.curate_large [--gigabytes 10] [--limit 1] [--folder F]``. The text is stories whose sentences are
drawn anew, in files of 100 MB with zstd; one document in a hundred is a copy with one sentence changed. ``textmill
curate`` applies all rules and masks, removes equal documents, near-duplicates and repeated paragraphs, and writes JSON
Lines with zstd, in one thread. If its processes take more than ``limit`` gigabytes, they are killed. The last line is
JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from benchmarks.load import run_limited
from benchmarks.texts import documents, rearranged, stories, take_bytes

_FILE_BYTES = 100_000_000
_OPTIONS = {
    "data.valid_fraction": "0",
    "filter.rules": "{}",
    "filter.masks": "[email, phone, ip]",
    "deduplicate.equal": "true",
    "deduplicate.jaccard_threshold": "0.75",
    "deduplicate.repeats": "paragraph",
    "execution.threads": "1",
}


def write_files(folder: Path, size: int) -> None:
    """Write ``size`` bytes of text, before compression, unless the files are there."""
    texts = rearranged(documents(stories()))
    for number in range(-(-size // _FILE_BYTES)):
        path = folder / f"{number:03}.txt.zst"
        if path.exists():
            continue
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            for document in take_bytes(texts, min(_FILE_BYTES, size - number * _FILE_BYTES)):
                file.write(document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--limit", type=float, default=1)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        root, size = Path(temporary, "root"), int(options.gigabytes * 1e9)
        folder = (options.folder or Path(temporary)) / "text"
        folder.mkdir(exist_ok=True)
        write_files(folder, size)
        chosen = _OPTIONS | {"data.train": str(folder / "*.txt.zst"), "root": str(root)}
        command = [str(Path(sys.executable).with_name("textmill")), "curate"]
        command += [part for name, value in chosen.items() for part in (f"--{name}", value)]
        measured = run_limited(command, int(options.limit * 1e9), Path(temporary, "log"))
        print(Path(temporary, "log").read_text())
        print(json.dumps({"gigabytes": options.gigabytes, **measured}))


if __name__ == "__main__":
    main()
