"""Compare the tokenizer with gigatoken, tiktoken, quicktok, fastokens, tokie, kitoken, Hugging Face and rustbpe.

``python -m benchmarks.tokenizer [--corpus FILE …] [--vocab vocab.json --merges merges.txt] [--only encode,count,…]``.
The jobs are encode, warm, count and train. Encoding reads a text file and writes a file of uint16 ids, or uint32 if the
vocabulary is larger: see :mod:`benchmarks.vocabularies`. Its time includes the construction of the tokenizer, with an
empty cache of pretokens; ours was constructed on this machine before. The job warm encodes a text from memory to one
array, in one thread, by a tokenizer that has encoded it before. Counting and training also start from the file. First
the results are compared. Then all libraries take turns. Each measurement is a process that has processed a few words
before its clock starts; the results are medians. Memory is the peak resident size, less that before the clock; it
includes mapped files.

The last line is JSON. In ``ratios``, more than 1 means that ours is faster. ``…_rate`` is our speed on such documents
over our speed on the corpus, ``…_rate_cpu1`` over that of GPT-2's tokenizer on one long document, by CPU time with one
thread; ``chat`` is a tokenizer with 256 special tokens and NFC. The peers come with ``pip install -e '.[bench]'``; the
ratios of a missing peer are left out. gigatoken encodes the file as one text, and split at the separators, which are
then missing from its ids; the faster form counts. Hugging Face encodes a sample of the documents, and its speed is
compared in MB/s.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.texts import ADVERSARIAL, CORPORA, DATA, END, TRAINED, documents, mixed, take_bytes
from benchmarks.tokenizer_jobs import GIGATOKEN_FORMS, MERGES, Task, run_task
from benchmarks.tokenizer_report import MODULES, Results, print_report
from benchmarks.vocabularies import QUICKTOK, prepare
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer, token_dtype

MIXED_BYTES, CORPUS_BYTES, SAMPLE_BYTES, LARGE_BYTES = 331_000_000, 32_000_000, 30_000_000, 2_000_000_000
GIGATOKEN_PATTERNS = ("o200k", "llama3", "qwen2")  # that it recognises in our tokenizer.json
WARM_PEERS = (*GIGATOKEN_FORMS, "fastokens", "tokie", "kitoken")
SECTIONS = (
    "construct",
    "encode",
    "warm",
    "count",
    "train",
    "corpora",
    "patterns",
    "documents",
    "adversarial",
    "memory",
)
TRAINED_VOCAB_SIZE = 300  # for the texts of TRAINED
TIMEOUT_SECONDS = 1800  # of a measurement


class Bench:
    """The texts, the measurements and their results."""

    def __init__(self, directory: Path, gpt2_files: tuple[Path, Path], corpus: list[Path], rounds: int) -> None:
        self.directory, self.gpt2_files, self.rounds = directory, gpt2_files, rounds
        self.tokenizers: dict[tuple[str, bool], dict[str, Any]] = {}
        self.results = Results()
        files = repr([(str(path.resolve()), path.stat()[6:9:2]) for path in corpus])  # size and mtime
        self.name = f"given-{hashlib.sha256(files.encode()).hexdigest()[:8]}" if corpus else "mixed"
        joined = (path.read_bytes() + END for path in corpus)
        self.corpus = self.text(self.name, lambda: joined) if corpus else self.text(self.name, mixed, MIXED_BYTES)

    def text(self, name: str, parts: Callable[[], Iterable[bytes]], size: int = 1 << 40) -> str:
        """Return the path of a text. Make the text if it does not exist."""
        path = self.directory / f"{name}.txt"
        if not path.exists():
            log(f"making {path}")
            with (part := path.with_suffix(".part")).open("wb") as file:
                file.writelines(take_bytes(parts(), size))
            part.rename(path)
        return str(path)

    def sample(self) -> str:
        """Return the path of documents from all parts of the corpus, for slow libraries."""

        def parts() -> Iterable[bytes]:
            data = Path(self.corpus).read_bytes()
            return documents(data)[:: max(1, len(data) // SAMPLE_BYTES)]

        return self.text(f"{self.name}-sample", parts)

    def tokenizer(self, pattern: str, is_chat: bool) -> dict[str, Any]:
        """Return the fields of a task that belong to the tokenizer of a pattern."""
        if (pattern, is_chat) not in self.tokenizers:
            folder = prepare(self.directory, pattern, *self.gpt2_files, is_chat)
            tokenizer = Tokenizer.load(folder)
            fields = {"dtype": token_dtype(tokenizer.size).str, "end_id": tokenizer.special_ids[END_OF_TEXT]}
            self.tokenizers[pattern, is_chat] = {"tokenizer": str(folder), **fields}
        return self.tokenizers[pattern, is_chat]

    def measure(self, task: Task) -> dict[str, Any]:
        """Run a task in its own process. Return {} and add a note if the task fails or the peer is not installed."""
        module = MODULES.get(task.library.split("/")[0], "lm")
        if importlib.util.find_spec(module) is None:
            self.results.notes.append(f"{module} is not installed (.[bench]): its ratios are left out")
            return {}
        environment = {**os.environ, "RAYON_NUM_THREADS": str(task.threads), "TOKENIZERS_PARALLELISM": "false"}
        with tempfile.TemporaryDirectory(dir=self.directory) as output:
            task = replace(task, **self.tokenizer(task.pattern, task.is_chat), output=output)
            command = [sys.executable, "-m", "benchmarks.tokenizer", "--worker", json.dumps(asdict(task))]
            try:
                process = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
                )
                if process.returncode == 0:
                    return json.loads(process.stdout.splitlines()[-1])
                problem = (process.stderr.splitlines() or [f"exit code {process.returncode}"])[-1]
            except subprocess.TimeoutExpired:
                problem = f"timeout after {TIMEOUT_SECONDS} s"
        self.results.notes.append(f"{task.job} of {Path(task.text).stem} by {task.library} failed: {problem[:200]}")
        return {}

    def medians(self, *tasks: Task) -> list[dict[str, Any]]:
        """Measure the tasks in turn, round by round, and return their medians. A failed task has an empty row."""
        runs: list[list[dict[str, Any]]] = [[] for _ in tasks]
        for number in range(self.rounds):
            for task, results in zip(tasks, runs, strict=True):
                if number < task.rounds and len(results) == number and (result := self.measure(task)):
                    results.append(result)
                    log(f"{number + 1}  {task.job} {Path(task.text).stem}  {task.library}  {result['wall']:.2f} s")
        rows = []
        for task, results in zip(tasks, runs, strict=True):
            row = {name: statistics.median(run[name] for run in results) for name in (results[0] if results else ())}
            if row:
                row["mb_per_s"] = Path(task.text).stat().st_size / 1e6 / row["wall"]
                settings = {
                    "job": task.job,
                    "text": Path(task.text).stem,
                    "library": task.library,
                    "threads": task.threads,
                    "pattern": task.pattern,
                }
                self.results.rows.append(
                    settings | {name: round(value, 4) for name, value in row.items()} | {"runs": len(results)}
                )
            rows.append(row)
        return rows

    def check(self, job: str, text: str, peers: Sequence[str], threads: int, **settings: Any) -> None:
        """Check that the peers have the same result as ours. A peer that is missing or fails is left out.

        ``settings`` are other fields of :class:`Task`.
        """
        task = Task(job, "ours", text, threads, check=True, **settings)
        ours, *results = (self.measure(replace(task, library=library)) for library in ("ours", *peers))
        for library, result in zip(peers, results, strict=True):
            if result or not ours:
                digest = "without_separators" if library in WARM_PEERS[1:] else "all"
                is_equal = bool(ours) and ours[digest] == result.get(digest)
                self.results.checks[name := f"{job} {Path(text).stem} {task.pattern}: {library}"] = is_equal
                log(f"{name}: {'equal' if is_equal else 'NOT EQUAL'}")

    def ratio(self, name: str, peers: Sequence[dict[str, Any]], ours: dict[str, Any], unit: str) -> None:
        """Record how many times faster ours is than the fastest peer. ``unit`` is ``cpu``, ``wall`` or ``mb_per_s``."""
        values = [row[unit] for row in peers if row]
        if values and ours:
            self.results.ratios[name] = ours[unit] / max(values) if unit == "mb_per_s" else min(values) / ours[unit]

    def construct(self) -> None:
        """Construct GPT-2's tokenizer."""
        ours, gigatoken = self.medians(*(Task("construct", library, self.corpus) for library in ("ours", "gigatoken")))
        self.ratio("construct_vs_gigatoken", [gigatoken], ours, "cpu")
        if ours:
            self.results.ratios["construct_gpt2_ms"] = 1000 * ours["cpu"]

    def encode(self) -> None:
        """Encode the corpus."""
        self.check("encode", self.corpus, (*GIGATOKEN_FORMS, "tiktoken"), 2)
        self.check("encode", self.sample(), ["huggingface"], 1)
        slow = [Task("encode", "tiktoken", self.corpus), Task("encode", "huggingface", self.sample(), rounds=3)]
        tasks = [
            Task("encode", library, self.corpus, threads)
            for threads in (1, 2)
            for library in ("ours", *GIGATOKEN_FORMS)
        ]
        one, *peers_one, two, peer_two, split_two, tiktoken, hugging_face = self.medians(*tasks, *slow)
        self.ratio("encode_vs_gigatoken_cpu1", peers_one, one, "cpu")
        self.ratio("encode_vs_gigatoken_wall2", [peer_two, split_two], two, "wall")
        self.ratio("encode_vs_tiktoken", [tiktoken], one, "cpu")
        self.ratio("encode_vs_huggingface", [hugging_face], one, "mb_per_s")

    def warm(self) -> None:
        """Encode texts of one kind, and documents of all kinds, with a tokenizer that has encoded them before."""
        texts = {name: self.text(name, parts, CORPUS_BYTES) for name, parts in CORPORA.items()}
        kinds = zip(*(documents(Path(text).read_bytes()) for text in texts.values()), strict=False)
        texts["all_kinds"] = self.text("all_kinds", lambda: chain.from_iterable(kinds), CORPUS_BYTES)
        for name, text in texts.items():
            self.check("warm", text, WARM_PEERS[1:-1], 1)  # kitoken gives other ids for most texts
            ours, *peers = self.medians(*(Task("warm", library, text) for library in ("ours", *WARM_PEERS)))
            self.ratio(f"warm_{name}_vs_gigatoken", peers[:2], ours, "cpu")
            for library, row in zip(WARM_PEERS[2:], peers[2:], strict=True):
                self.ratio(f"warm_{name}_vs_{library}", [row], ours, "cpu")

    def count(self) -> None:
        """Count the pretokens of the corpus."""
        self.check("count", self.sample(), ["regex"], 1)
        self.check("count", self.corpus, ["gigatoken"], 2)
        tasks = [
            Task("count", library, self.corpus, threads) for threads in (1, 2) for library in ("ours", "gigatoken")
        ]
        one, peer_one, two, peer_two = self.medians(*tasks)
        self.ratio("count_vs_gigatoken_cpu1", [peer_one], one, "cpu")
        self.ratio("count_vs_gigatoken_wall2", [peer_two], two, "wall")
        if ratios := [value for name, value in self.results.ratios.items() if name.startswith("count")]:
            self.results.ratios["count_vs_gigatoken"] = min(ratios)

    def train(self) -> None:
        """Train merges on the corpus."""
        one, two, peer = (
            self.measure(Task("train", library, self.corpus, threads, check=True))
            for library, threads in (("ours", 1), ("ours", 2), ("gigatoken", 2))
        )
        self.results.checks["merges of 1 and 2 threads"] = bool(one) and one.get("all") == two.get("all")
        self.results.checks["number of merges"] = len(one.get("merges", ())) == MERGES
        if one and peer:
            equal = [ours == other for ours, other in zip(one["merges"], peer["merges"], strict=False)]
            self.results.extra["merges"]["leading_as_gigatoken"] = [*equal, False].index(False)
        tasks = [Task("train", library, self.corpus, 2) for library in ("ours", "gigatoken", "rustbpe")]
        ours, gigatoken, rustbpe = self.medians(*tasks[:2], replace(tasks[2], rounds=3))
        self.ratio("train_vs_gigatoken", [gigatoken], ours, "wall")
        self.ratio("train_vs_rustbpe", [rustbpe], ours, "wall")

    def corpora(self) -> None:
        """Encode texts of one kind."""
        for name, parts in CORPORA.items():
            text = self.text(name, parts, CORPUS_BYTES)
            self.check("encode", text, GIGATOKEN_FORMS, 1)
            ours, *peers = self.medians(*(Task("encode", library, text) for library in ("ours", *GIGATOKEN_FORMS)))
            self.ratio(f"encode_{name}", peers, ours, "cpu")

    def patterns(self) -> None:
        """Encode and count the corpus by other patterns; tiktoken encodes a part of it."""
        text = self.text(f"{self.name}-patterns", lambda: documents(Path(self.corpus).read_bytes()), CORPUS_BYTES)
        gpt2 = [Task("encode", "ours", self.corpus), Task("count", "ours", self.corpus)]
        peers: dict[str, list[str]] = {}
        tasks: list[Task] = []
        for name in PATTERNS:
            if name != "gpt2":
                self.check("encode", text, ["tiktoken"], 1, pattern=name)
                self.check("count", text, ["regex"], 1, pattern=name)
                possible = ["quicktok"] if name in QUICKTOK else []
                possible += GIGATOKEN_FORMS if name in GIGATOKEN_PATTERNS else ()
                self.check("encode", text, possible, 1, pattern=name)
                peers[name] = possible
                tasks += [Task(job, "ours", self.corpus, pattern=name) for job in ("encode", "count")]
                tasks += [Task("encode", library, self.corpus, pattern=name) for library in possible]
                tasks.append(Task("encode", "tiktoken", text, pattern=name, rounds=3))
        own_encode, own_count, *rows = self.medians(*gpt2, *tasks)
        results = iter(rows)
        for name, possible in peers.items():
            ours, counts = next(results), next(results)
            of_peer = {library: next(results) for library in possible}
            self.ratio(f"encode_{name}_vs_own_gpt2", [own_encode], ours, "cpu")
            self.ratio(f"count_{name}_vs_own_gpt2", [own_count], counts, "cpu")
            for peer in ("quicktok", "gigatoken"):
                forms = [row for library, row in of_peer.items() if library.startswith(peer)]
                self.ratio(f"encode_{name}_vs_{peer}", forms, ours, "cpu")
            self.ratio(f"encode_{name}_vs_tiktoken", [next(results)], ours, "mb_per_s")

    def documents(self) -> None:
        """Encode one long document, a million of 100 bytes, and documents of 300 bytes, with a chat model's tokenizer
        too."""
        long = Path(self.corpus).read_bytes().replace(END, b"")
        ascii_text = long[:120_000_000].decode(errors="ignore").encode("ascii", "ignore")[:100_000_000]
        small = (ascii_text[start : start + 100] + END for start in range(0, len(ascii_text), 100))
        texts = [self.text(f"{self.name}-long", lambda: [long]), self.text(f"{self.name}-small", lambda: small)]
        text = long.decode()
        medium = self.text(
            f"{self.name}-300", lambda: (text[i : i + 300].encode() + END for i in range(0, len(text), 300))
        )
        for path in (*texts, medium):
            self.check("encode", path, GIGATOKEN_FORMS, 2)
        tasks = [Task("encode", "ours", path, 2) for path in (self.corpus, *texts)]
        tasks += [
            Task("encode", "ours", path, is_chat=is_chat) for path in (texts[0], medium) for is_chat in (False, True)
        ]
        corpus, long_row, small_row, plain, *rows = self.medians(*tasks)
        for name, row in (("long_document_rate", long_row), ("small_documents_rate", small_row)):
            if corpus and row:
                self.results.ratios[name] = row["mb_per_s"] / corpus["mb_per_s"]
        sizes = [Path(path).stat().st_size for path in (texts[0], medium, medium)]
        for name, row, size in zip(
            ("long_chat", "documents_of_300", "documents_of_300_chat"), rows, sizes, strict=True
        ):
            if plain and row:
                self.results.ratios[f"{name}_rate_cpu1"] = size / sizes[0] * plain["cpu"] / row["cpu"]

    def adversarial(self) -> None:
        """Encode 1 and 10 MB of texts that are hard for encoders, with a constructed tokenizer; learn from some."""
        for name, make in ADVERSARIAL.items():
            texts = []
            for size in (1, 10):
                data = make(np.random.default_rng(0), size * 1_000_000)
                texts.append(self.text(f"{name}-{size}", [data].copy))
                self.check("encode", texts[-1], GIGATOKEN_FORMS[:1], 1)
            tasks = [
                Task("encode", library, text, is_constructed=True)
                for library in ("ours", GIGATOKEN_FORMS[0])
                for text in texts
            ]
            short, long, _, peer = self.medians(*tasks)
            if short and long:
                figures = {"mb_per_s": long["mb_per_s"], "times_for_10x": long["wall"] / short["wall"]}
                figures |= {"vs_gigatoken": peer["wall"] / long["wall"]} if peer else {}
                self.results.extra["adversarial"][name] = {key: round(value, 2) for key, value in figures.items()}
        for name in TRAINED:
            texts = [self.text(f"{name}-{size}", list) for size in (1, 10)]  # made above
            for text in texts:
                self.check("train", text, ["reference"], 1, vocab_size=TRAINED_VOCAB_SIZE)
            short, long = self.medians(
                *(Task("train", "ours", text, rounds=3, vocab_size=TRAINED_VOCAB_SIZE) for text in texts)
            )
            if short and long:
                figures = {"mb_per_cpu_s": 10 / long["cpu"], "cpu_times_for_10x": long["cpu"] / short["cpu"]}
                self.results.extra["adversarial"][f"train {name}"] = {
                    key: round(value, 2) for key, value in figures.items()
                }

    def memory(self) -> None:
        """Measure the memory for the corpus, and for 2 GB of repeated corpus."""
        parts = documents(Path(self.corpus).read_bytes())
        large = Path(self.text(f"{self.name}-2gb", lambda: cycle(parts), LARGE_BYTES))
        for job in ("encode", "count"):
            for name, text in (("corpus", self.corpus), ("2gb", str(large))):
                (row,) = self.medians(Task(job, "ours", text, 2, rounds=1))
                if row:
                    self.results.extra["memory_mb"][f"{job}_{name}"] = round(row["memory_mb"])
        large.unlink()


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, nargs="+", default=[], help="UTF-8 text; default: stories and Python sources"
    )
    parser.add_argument("--vocab", type=Path, default=DATA / "gpt2_vocab.json")
    parser.add_argument("--merges", type=Path, default=DATA / "gpt2_merges.txt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help="sections, separated by commas; default: %(default)s"
    )
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "textmill-benchmark")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run_task(Task(**json.loads(options.worker)))))
        return
    sections = options.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only {unknown.pop()}: choose from {', '.join(SECTIONS)}")
    for path in (options.vocab, options.merges, *options.corpus):
        if not path.is_file():
            parser.error(
                f"{path} is missing; name GPT-2's vocab.json and merges.txt with --vocab and --merges, and text with "
                "--corpus"
            )
    options.directory.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.directory, (options.vocab, options.merges), options.corpus, options.rounds)
    for section in sections:
        getattr(bench, section)()
    print_report(bench.results, with_table=not options.json)


if __name__ == "__main__":
    main()
