"""Measure the whole chain of curation beside datatrove's: from JSON Lines with zstd to JSON Lines with zstd.

``python -m benchmarks.curate_chain --datatrove PYTHON [--rounds 3] [--megabytes 200] [--languages en]``. Both apply the
rules of Gopher, C4 and FineWeb, mask addresses, and remove near-duplicates by 14 × 8 MinHash values. One thread, MB of
UTF-8 a CPU-second, medians of rounds in turn. textmill's figure is that of the command ``textmill curate``: the CPU
time that twice the text takes more, because its start and Prefect's server take seconds for any text; the time of the
whole command stands beside it. datatrove reads 0.5 MB in a round. The last line is JSON.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from benchmarks.curate import corpora, megabytes

_WORKER = Path(__file__).with_name("datatrove_chain.py")
_PEER_MEGABYTES = 0.5
_MASKS = "[email, phone, ip]"


def write_rows(path: Path, texts: list[str]) -> float:
    """Write texts as JSON Lines with zstd; return their size in MB."""
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        for text in texts:
            file.write(json.dumps({"text": text}).encode() + b"\n")
    return megabytes(texts)


def run(command: list[str], **environment: str) -> float:
    """Return the CPU seconds of a command and its child processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def curate(file: Path, languages: str) -> float:
    with tempfile.TemporaryDirectory() as root:
        options = {
            "data.train": str(file),
            "data.valid_fraction": "0",
            "filter.rules": "{}",
            "filter.masks": _MASKS,
            "filter.languages": languages,
            "deduplicate.jaccard_threshold": "0.75",
            "execution.threads": "1",
            "root": root,
        }
        command = [str(Path(sys.executable).with_name("textmill")), "curate"]
        seconds = run([*command, *(part for name, value in options.items() for part in (f"--{name}", value))])
        if not [*Path(root).rglob("*.jsonl.zst")]:
            sys.exit("textmill curate wrote nothing")
        return seconds


def datatrove(python: str, texts: list[str]) -> float:
    """Return the MB a CPU-second of datatrove's chain."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_rows(Path(folder, "in.jsonl.zst"), texts)
        done = subprocess.run(
            [python, str(_WORKER), folder, "in.jsonl.zst"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{python} cannot run datatrove's chain:\n{done.stderr[-2000:]}")
        return size / float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datatrove", metavar="PYTHON", required=True, help="of an environment with datatrove")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=200, help="of the larger text")
    parser.add_argument("--languages", default="[]", help="for filter.languages, such as [en]; default: off")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, texts in corpora(int(options.megabytes * 1e6)):
            files = [Path(folder, f"{name}-{part}.jsonl.zst") for part in ("half", "whole")]
            sizes = [write_rows(files[0], texts[::2]), write_rows(files[1], texts)]
            sample = texts[:: max(1, round(sizes[1] / _PEER_MEGABYTES))]
            curate(files[0], options.languages)  # compiles
            rates, whole, theirs = [], [], []
            for _ in range(options.rounds):
                seconds = [curate(file, options.languages) for file in files]
                rates.append((sizes[1] - sizes[0]) / (seconds[1] - seconds[0]))
                whole.append(sizes[1] / seconds[1])
                theirs.append(datatrove(options.datatrove, sample))
            medians = {
                "textmill": statistics.median(rates),
                "the whole command": statistics.median(whole),
                "datatrove": statistics.median(theirs),
            }
            ratio = medians["textmill"] / medians["datatrove"]
            print(
                f"{name:6}",
                *(f"{part} {rate:8.3f} MB/s" for part, rate in medians.items()),
                f"× {ratio:.0f}",
                flush=True,
            )
            results.append({"text": name, "rates": medians, "ratio": ratio})
    print(json.dumps({"results": results, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
