"""Learn superwords from much text: the time, the processor time and the memory of the second stage.

``python -m benchmarks.superwords [--megabytes 100,331,1000] [--vocab-size 32768] [--superwords 16384] [--threads 2]``.
The text: stories, the Python files of the installed packages, then the stories again and again, with one word in ten
replaced by another one of them, so that each copy has new phrases. Each second stage is a process of its own, after one
on a small text, which loads and compiles. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.texts import END, documents, package_files, stories, take_bytes
from lm.text.chunks import FilePart, split_files
from lm.text.patterns import SEGMENT_PATTERNS
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import count_files
from lm.tokenizer.superwords import train_superwords
from lm.tokenizer.tokenizer import Tokenizer

_REPLACED = 0.1  # of the words
_WARM_UP_BYTES = 1 << 20


def varied_stories() -> Iterator[bytes]:
    """Yield copies of all stories without end, each with other words replaced."""
    words = np.array(stories().split(b" "), dtype=object)
    rng = np.random.default_rng(0)
    while True:
        copy = words.copy()
        replaced = np.flatnonzero(rng.random(len(words)) < _REPLACED)
        replaced = np.array([i for i in replaced if words[i].isalpha()])
        copy[replaced] = copy[rng.permutation(replaced)]
        yield from documents(b" ".join(copy))


def write_text(path: Path, size: int) -> None:
    """Write a text of ``size`` bytes or little more."""
    parts = chain(documents(stories()), (file + END for file in package_files("*.py")), varied_stories())
    with path.open("wb") as file:
        file.writelines(take_bytes(parts, size))


def open_part(part: FilePart) -> Iterator[Iterable[bytes]]:
    """Yield the text of a part of a file."""
    with part.open() as blocks:
        yield blocks


def encode(tokenizer: Tokenizer, data: bytes) -> tuple[float, float]:
    """Return bytes per token, and megabytes per CPU-second of one thread."""
    tokens = started = 0.0
    for _ in range(2):
        started, tokens = time.process_time(), sum(len(ids) for ids in tokenizer.encode_blocks([data]))
    return len(data) / tokens, len(data) / 1e6 / (time.process_time() - started)


def learn(text: str, folder: str, vocab_size: int, threads: int) -> dict[str, Any]:
    """Measure the second stage on a file, after the merges of the tokenizer in ``folder``."""
    merges = Tokenizer.load(folder).merges
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small.txt"
        with open(text, "rb") as file:
            small.write_bytes(file.read(_WARM_UP_BYTES).rsplit(END, 1)[0] + END)
        train(str(small), merges, vocab_size, threads)
    before, cpu, started = peak_mb(), time.process_time(), time.perf_counter()
    learned = train(text, merges, vocab_size, threads)
    result = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_mb(),
        "peak_mb_before": before,
        "tokens": learned.tokens,
        "pieces": learned.pieces,
        "min_frequency": learned.min_frequency,
        "superwords": len(learned.merges) - learned.word_merges,
    }
    tokenizer = Tokenizer(learned.vocab, learned.merges, [END_OF_TEXT], SEGMENT_PATTERNS["gpt2"])
    sample = stories()[: 20 << 20]
    result["bytes_per_token"], result["encode_mb_per_cpu_second"] = encode(tokenizer, sample)
    return result


def train(text: str, merges: list[tuple[bytes, bytes]], vocab_size: int, threads: int) -> Any:
    """Learn superwords from a file."""
    files = split_files([text], [END_OF_TEXT], SEGMENT_PATTERNS["gpt2"])
    parts = [partial(open_part, part) for part in files]
    return train_superwords(parts, merges, vocab_size, [END_OF_TEXT], GPT2_PATTERN, threads=threads)


def peak_mb() -> float:
    """Return the peak memory of this process. That of getrusage includes the parent's at the fork. Linux only."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure all sizes, or one as a process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="100,331,1000")
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--superwords", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learn", nargs=2, metavar=("FILE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learn:
        text, folder = options.learn
        print(json.dumps(learn(text, folder, options.vocab_size, options.threads)))
        return
    results = {}
    for size in map(int, options.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            file, folder = Path(scratch) / "text.txt", Path(scratch) / "tokenizer"
            write_text(file, size * 1_000_000)
            started, found = time.perf_counter(), dict[str, Any]()
            for name, vocab_size in (("", options.vocab_size - options.superwords), ("plain", options.vocab_size)):
                counts = count_files([file], [END_OF_TEXT], threads=options.threads)
                tokenizer = Tokenizer(*train_merges(counts, vocab_size, [END_OF_TEXT]), [END_OF_TEXT])
                if name:
                    speed = encode(tokenizer, stories()[: 20 << 20])
                    found |= {"plain_bytes_per_token": speed[0], "plain_encode_mb_per_cpu_second": speed[1]}
                else:
                    found["first_stage_seconds"] = time.perf_counter() - started
                    tokenizer.save(folder)
            arguments = ["--vocab-size", str(options.vocab_size), "--threads", str(options.threads)]
            command = [sys.executable, "-m", "benchmarks.superwords", "--learn", str(file), str(folder), *arguments]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found |= json.loads(output.splitlines()[-1])
            results[f"{size}_mb"] = {name: round(value, 2) for name, value in found.items()}
            print(size, results[f"{size}_mb"], file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
