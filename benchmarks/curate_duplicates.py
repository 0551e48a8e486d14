"""Compare MinHash signatures with other libraries, and measure deduplication of texts that are larger than memory.

``python -m benchmarks.curate_duplicates [--rounds 7] [--megabytes 8] [--gigabytes 0.4,4] [--limit 0.6]``. Signatures
have 112 values over 5-grams of words. One thread; the implementations take turns; speeds are medians, in MB per second
of CPU time. rensa gets shingles of lower-case words from Python, datatrove (a hundredth of the text) makes its own and
is left out if it or spaCy is missing. ASCII is children's stories; mixed is Chinese, Japanese, Korean, and stories with
emoji, in Cyrillic letters, and with accents.

Then texts of ``gigabytes`` are made, a fifth of whose documents are copies with changed lines, and a twentieth exact
copies, and deduplicated by one process each: equal documents, near-duplicates, repeated lines. A process that takes
more than ``limit`` gigabytes is killed. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import run_limited
from benchmarks.texts import END, cjk, documents, emoji, stories, take_bytes
from lm.curate import (
    DocumentBatch,
    DocumentFiles,
    MinHash,
    digest_documents_to_runs,
    digest_lines_to_runs,
    drop_repeated_lines,
    find_equal_documents,
    find_near_duplicates,
    find_repeated_lines,
    pack_utf8,
    sign_documents_to_runs,
)

_MINHASH = MinHash()
_DATATROVE_SHARE = 100
_BATCH_BYTES = 8 << 20
_FILE_BYTES = 100_000_000
_RECENT = 5000  # documents that copies are made of


def mixed_scripts() -> Iterator[bytes]:
    """Yield Chinese, Japanese or Korean, emoji, and stories in Cyrillic and accented letters, in turn, without end."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    alphabets = "абцдефгхийклмнопярстувщхыз", "äbçdéfghîjklmñôpqrštüvwxýž"
    tables = [str.maketrans(letters + letters.upper(), alphabet + alphabet.upper()) for alphabet in alphabets]
    texts = [document.removesuffix(END).decode() for document in documents(stories())]
    replaced = ((text.translate(table).encode() for text in cycle(texts)) for table in tables)
    return chain.from_iterable(zip(cjk(), emoji(), *replaced, strict=False))


def with_rensa() -> Callable[[list[str]], Any]:
    from rensa import RMinHash

    def sign(texts: list[str]) -> None:
        for text in texts:
            words = text.lower().split()
            minhash = RMinHash(num_perm=_MINHASH.num_hashes, seed=1)
            minhash.update([" ".join(words[i : i + 5]) for i in range(len(words) - 4)])
            minhash.digest()

    return sign


def with_datatrove() -> Callable[[list[str]], Any]:
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    signer = MinhashDedupSignature(tempfile.mkdtemp(), MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8))

    def sign(texts: list[str]) -> None:
        for text in texts[::_DATATROVE_SHARE]:
            shingles = signer.get_shingles(text)
            if len(shingles):
                signer.get_signature(shingles)

    sign(["some words to load the tokenizer"])
    return sign


def ours(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    _MINHASH.band_keys(_MINHASH.sign(pack_utf8(encoded)))


def implementations() -> dict[str, Callable[[list[str]], Any]]:
    found: dict[str, Callable[[list[str]], Any]] = {"ours": ours}
    for name, make in (("rensa", with_rensa), ("datatrove", with_datatrove)):
        try:
            found[name] = make()
        except (ImportError, TypeError) as error:  # datatrove needs xxhash before 4
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def compare_signatures(rounds: int, num_bytes: int) -> dict[str, dict[str, float]]:
    """Return MB per CPU second of each implementation, by kind of text."""
    rows: dict[str, dict[str, float]] = {}
    signers = implementations()
    for kind, parts in (("ascii", cycle(documents(stories()))), ("mixed", mixed_scripts())):
        texts = [part.removesuffix(END).decode() for part in take_bytes(parts, num_bytes)]
        sizes = {name: sum(len(text.encode()) for text in texts) for name in signers}
        if "datatrove" in sizes:
            sizes["datatrove"] = sum(len(text.encode()) for text in texts[::_DATATROVE_SHARE])
        speeds: dict[str, list[float]] = defaultdict(list)
        ours(texts)  # compiles
        for _ in range(rounds):
            for name, sign in signers.items():
                started = time.process_time()
                sign(texts)
                speeds[name].append(sizes[name] / 1e6 / (time.process_time() - started))
        rows[kind] = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
        print(kind, rows[kind], flush=True)
    return rows


def write_corpus(folder: Path, num_bytes: int) -> None:
    """Write documents of random words of the stories, and copies, in files of 100 MB. New lines have a number."""
    rng = np.random.default_rng(0)
    words = stories().replace(END, b"").split()
    phrases = [b" ".join(words[i] for i in row) for row in rng.integers(0, len(words), (200_000, 7)).tolist()]
    recent: list[list[bytes]] = []
    count = 0

    def new_lines(number: int) -> list[bytes]:
        nonlocal count
        count += number
        pairs = enumerate(rng.integers(0, len(phrases), (number, 2)).tolist(), start=count)
        return [b"%b w%x %b" % (phrases[first], line, phrases[second]) for line, (first, second) in pairs]

    for number in range(-(-num_bytes // _FILE_BYTES)):
        with (folder / f"{number:03}.txt").open("wb") as file:
            while file.tell() < min(_FILE_BYTES, num_bytes - number * _FILE_BYTES):
                kind = rng.random()
                if recent and kind < 0.25:
                    document = list(recent[rng.integers(len(recent))])
                    if kind >= 0.05:
                        changed = rng.integers(0, len(document), 1 + len(document) // 30).tolist()
                        for place, line in zip(changed, new_lines(len(changed)), strict=True):
                            document[place] = line
                else:
                    document = new_lines(int(rng.integers(2, 70)))
                    if len(recent) < _RECENT:
                        recent.append(document)
                    else:
                        recent[rng.integers(_RECENT)] = document
                file.write(b"\n".join(document) + b"\n" + END)


def read_batches(path: Path) -> Iterator[DocumentBatch]:
    """Yield the documents of a file."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(_BATCH_BYTES):
            *whole, rest = (rest + block).split(END)
            yield pack_utf8(whole)


def deduplicate(folder: Path) -> None:
    """Deduplicate the documents of a folder, each file as a group, and print the CPU seconds of each step as JSON."""
    paths = sorted(folder.glob("*.txt"))
    steps: dict[str, float] = {}
    started = time.process_time()

    def measure(name: str) -> None:
        nonlocal started
        steps[name] = round(time.process_time() - started, 1)
        started = time.process_time()

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        groups = [Path(temporary) / path.stem for path in paths]
        for group in groups:
            group.mkdir()
        pairs = [*zip(paths, groups, strict=True)]
        sizes = [[np.diff(offsets) for _, offsets in read_batches(path)] for path in paths]
        flat = [np.concatenate(parts) for parts in sizes]
        ends = [np.cumsum(part + len(END)) - len(END) for part in flat]
        texts = DocumentFiles(
            paths,
            np.repeat(np.arange(len(paths)), [len(part) for part in flat]),
            np.concatenate(ends) - np.concatenate(flat),
            np.concatenate(ends),
        )
        measure("read")
        equal = find_equal_documents(
            [run for path, group in pairs for run in digest_documents_to_runs(read_batches(path), group)]
        )
        measure("equal documents")
        runs = [run for path, group in pairs for run in sign_documents_to_runs(read_batches(path), group, _MINHASH)]
        measure("signatures")
        near = find_near_duplicates(runs, texts, _MINHASH, 0.8)
        measure("near-duplicates")
        lines = [run for path, group in pairs for run in digest_lines_to_runs(read_batches(path), group, "line")]
        repeated = find_repeated_lines(lines, "line")
        measure("repeated lines")
        batches = (batch for path in paths for batch in read_batches(path))
        kept = sum(int(offsets[-1]) for _, offsets in drop_repeated_lines(batches, repeated, "line"))
        measure("text without repeated lines")
        numbers = np.arange(len(equal))
        counts = {
            "documents": len(equal),
            "equal": int((equal != numbers).sum()),
            "near": int((near.survivors != numbers).sum()),
            "disk_mb": sum(run.stat().st_size for run in (*runs, *lines)) >> 20,
            "kept_line_share": round(kept / int(texts.sizes.sum()), 3),
        }
    print(json.dumps({"steps": steps, **counts}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--gigabytes", default="0.4,4")
    parser.add_argument("--limit", type=float, default=0.6)
    parser.add_argument("--deduplicate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deduplicate:
        deduplicate(options.deduplicate)
        return
    results: dict[str, Any] = {}
    if options.rounds:
        results["signatures"] = compare_signatures(options.rounds, int(options.megabytes * 1e6))
    for gigabytes in options.gigabytes.split(",") if options.gigabytes else []:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_corpus(folder, int(float(gigabytes) * 1e9))
            command = [sys.executable, "-m", "benchmarks.curate_duplicates", "--deduplicate", name]
            measured = run_limited(command, int(options.limit * 1e9), folder / "log")
            lines = (folder / "log").read_text().splitlines()
            results[gigabytes] = measured | (json.loads(lines[-1]) if measured["exit"] == 0 else {"log": lines[-20:]})
            print(gigabytes, "GB", results[gigabytes], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
