"""How fast the tokenizer is beside gigatoken, tiktoken, Hugging Face tokenizers and rustbpe: encode, count, train.

``python -m benchmarks.tokenizer [--corpus FILE …] [--vocab vocab.json --merges merges.txt] [--only encode,count,…]``.
Encoding is from a text file to a file of uint16 ids: the tokenizer is constructed within the clock, and remembers no
pretoken. Counting and training start at the file too. First the results are compared; then everyone is timed in turn,
each time in a process of its own that has done the same with a few words before its clock starts; medians count.
Memory is the greatest resident size less that before the clock, files mapped to memory included. The last line is
JSON: in ``ratios``, more than 1 means that ours is faster; ``…_rate`` is our speed on such documents over that on the
corpus. Peers come with ``pip install -e '.[bench]'``; what a missing one would tell is left out.

gigatoken encodes in both forms that keep its ids whole, the file as one text and split at the separators (which it then
leaves out), and the faster one counts. Hugging Face gets a sample of the documents and is compared by MB/s.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.texts import ADVERSARIES, DATA, END, KINDS, documents, limited, mixed
from benchmarks.tokenizer_jobs import FORMS, MERGES, Task, work
from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer

MODULES = {"gigatoken": "gigatoken", "tiktoken": "tiktoken", "huggingface": "tokenizers", "rustbpe": "rustbpe"}
MIXED, KIND, SAMPLE, LARGE = 331_000_000, 32_000_000, 30_000_000, 2_000_000_000  # bytes of the texts
SECTIONS = ("encode", "count", "train", "corpora", "documents", "adversarial", "memory")
SECONDS = 1800  # after which a process is given up


class Bench:
    """Texts in a folder, measurements in turn, and what they gave."""

    def __init__(self, directory: Path, corpus: list[Path], rounds: int) -> None:
        self.directory, self.rounds = directory, rounds
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.ratios: dict[str, float] = {}
        self.checks: dict[str, bool] = {}
        self.extra: dict[str, Any] = {"memory_mb": {}, "adversarial": {}, "merges": {}}
        files = repr([(str(path.resolve()), path.stat()[6:9:2]) for path in corpus])  # sizes and times
        self.name = f"given-{hashlib.sha256(files.encode()).hexdigest()[:8]}" if corpus else "mixed"
        joined = (path.read_bytes() + END for path in corpus)
        self.corpus = self.text(self.name, lambda: joined) if corpus else self.text(self.name, mixed, MIXED)

    def text(self, name: str, parts: Callable[[], Iterable[bytes]], size: int = 1 << 40) -> str:
        """The path of a text, made unless it is there."""
        path = self.directory / f"{name}.txt"
        if not path.exists():
            say(f"making {path}")
            with (part := path.with_suffix(".part")).open("wb") as file:
                file.writelines(limited(parts(), size))
            part.rename(path)
        return str(path)

    def sample(self) -> str:
        """Documents from all over the corpus, for the slow."""

        def parts() -> Iterable[bytes]:
            data = Path(self.corpus).read_bytes()
            return documents(data)[:: max(1, len(data) // SAMPLE)]

        return self.text(f"{self.name}-sample", parts)

    def measure(self, task: Task) -> dict[str, Any]:
        """What a process of its own finds; empty, with a note, where a peer is missing or somebody fails."""
        module = MODULES.get(task.who.split("/")[0], "lm")
        if importlib.util.find_spec(module) is None:
            self.notes.append(f"{module} is not installed (.[bench]): its ratios are left out")
            return {}
        environment = {**os.environ, "RAYON_NUM_THREADS": str(task.threads), "TOKENIZERS_PARALLELISM": "false"}
        with tempfile.TemporaryDirectory(dir=self.directory) as output:
            task = replace(task, tokenizer=str(self.directory / "tokenizer"), output=output)
            command = [sys.executable, "-m", "benchmarks.tokenizer", "--worker", json.dumps(asdict(task))]
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
                if done.returncode == 0:
                    return json.loads(done.stdout.splitlines()[-1])
                trouble = (done.stderr.splitlines() or [f"exit {done.returncode}"])[-1]
            except subprocess.TimeoutExpired:
                trouble = f"given up after {SECONDS} s"
        self.notes.append(f"{task.job} of {Path(task.text).stem} by {task.who} failed: {trouble[:200]}")
        return {}

    def medians(self, *tasks: Task) -> list[dict[str, Any]]:
        """Measure the tasks in turn, round by round; what failed is empty."""
        runs: list[list[dict[str, Any]]] = [[] for _ in tasks]
        for turn in range(self.rounds):
            for task, found in zip(tasks, runs, strict=True):
                if turn < task.rounds and len(found) == turn and (run := self.measure(task)):
                    found.append(run)
                    say(f"{turn + 1}  {task.job} {Path(task.text).stem}  {task.who}  {run['wall']:.2f} s")
        rows = []
        for task, found in zip(tasks, runs, strict=True):
            row = {name: statistics.median(run[name] for run in found) for name in (found[0] if found else ())}
            if row:
                row["mb_per_s"] = Path(task.text).stat().st_size / 1e6 / row["wall"]
                about = {"job": task.job, "text": Path(task.text).stem, "who": task.who, "threads": task.threads}
                self.rows.append(about | {name: round(value, 4) for name, value in row.items()} | {"runs": len(found)})
            rows.append(row)
        return rows

    def check(self, job: str, text: str, others: Sequence[str], threads: int) -> None:
        """Whether the others find the same as we; those that are missing or fail are left out."""
        ours, *found = (self.measure(Task(job, who, text, threads, check=True)) for who in ("ours", *others))
        for who, theirs in zip(others, found, strict=True):
            if theirs or not ours:
                what = "words" if who == FORMS[1] else "all"
                self.checks[name := f"{job} {Path(text).stem}: {who}"] = bool(ours) and ours[what] == theirs.get(what)
                say(f"{name}: {'equal' if self.checks[name] else 'NOT EQUAL'}")

    def ratio(self, name: str, theirs: Sequence[dict[str, Any]], ours: dict[str, Any], what: str) -> None:
        """Their best over ours in seconds; in MB/s, the other way round."""
        values = [row[what] for row in theirs if row]
        if values and ours:
            self.ratios[name] = ours[what] / max(values) if what == "mb_per_s" else min(values) / ours[what]

    def encode(self) -> None:
        """Encode the corpus."""
        self.check("encode", self.corpus, (*FORMS, "tiktoken"), 2)
        self.check("encode", self.sample(), ["huggingface"], 1)
        slow = [Task("encode", "tiktoken", self.corpus), Task("encode", "huggingface", self.sample(), rounds=3)]
        tasks = [Task("encode", who, self.corpus, threads) for threads in (1, 2) for who in ("ours", *FORMS)]
        one, *theirs_one, two, theirs_two, split_two, tiktoken, hugging_face = self.medians(*tasks, *slow)
        self.ratio("encode_vs_gigatoken_cpu1", theirs_one, one, "cpu")
        self.ratio("encode_vs_gigatoken_wall2", [theirs_two, split_two], two, "wall")
        self.ratio("encode_vs_tiktoken", [tiktoken], one, "cpu")
        self.ratio("encode_vs_huggingface", [hugging_face], one, "mb_per_s")

    def count(self) -> None:
        """Count the pretokens of the corpus."""
        self.check("count", self.sample(), ["regex"], 1)
        self.check("count", self.corpus, ["gigatoken"], 2)
        tasks = [Task("count", who, self.corpus, threads) for threads in (1, 2) for who in ("ours", "gigatoken")]
        one, theirs_one, two, theirs_two = self.medians(*tasks)
        self.ratio("count_vs_gigatoken_cpu1", [theirs_one], one, "cpu")
        self.ratio("count_vs_gigatoken_wall2", [theirs_two], two, "wall")
        if found := [value for name, value in self.ratios.items() if name.startswith("count")]:
            self.ratios["count_vs_gigatoken"] = min(found)

    def train(self) -> None:
        """Train on the corpus, from the file to the merges."""
        ours, two, theirs = (
            self.measure(Task("train", who, self.corpus, threads, check=True))
            for who, threads in (("ours", 1), ("ours", 2), ("gigatoken", 2))
        )
        self.checks["merges of 1 and 2 threads"] = bool(ours) and ours.get("all") == two.get("all")
        self.checks["number of merges"] = len(ours.get("merges", ())) == MERGES
        if ours and theirs:
            same = [mine == other for mine, other in zip(ours["merges"], theirs["merges"], strict=False)]
            self.extra["merges"]["leading_as_gigatoken"] = [*same, False].index(False)
        tasks = [Task("train", who, self.corpus, 2) for who in ("ours", "gigatoken", "rustbpe")]
        our, gigatoken, rustbpe = self.medians(*tasks[:2], replace(tasks[2], rounds=3))
        self.ratio("train_vs_gigatoken", [gigatoken], our, "wall")
        self.ratio("train_vs_rustbpe", [rustbpe], our, "wall")

    def corpora(self) -> None:
        """Encode texts of one kind."""
        for name, parts in KINDS.items():
            text = self.text(name, parts, KIND)
            self.check("encode", text, FORMS, 1)
            ours, *theirs = self.medians(*(Task("encode", who, text) for who in ("ours", *FORMS)))
            self.ratio(f"encode_{name}", theirs, ours, "cpu")

    def documents(self) -> None:
        """Encode one long document, and a million of 100 bytes."""
        long = Path(self.corpus).read_bytes().replace(END, b"")
        plain = long[:120_000_000].decode(errors="ignore").encode("ascii", "ignore")[:100_000_000]
        small = (plain[start : start + 100] + END for start in range(0, len(plain), 100))
        texts = [self.text(f"{self.name}-long", lambda: [long]), self.text(f"{self.name}-small", lambda: small)]
        for text in texts:
            self.check("encode", text, FORMS, 2)
        usual, *rows = self.medians(*(Task("encode", "ours", text, 2) for text in (self.corpus, *texts)))
        for name, row in zip(("long_document_rate", "small_documents_rate"), rows, strict=True):
            if usual and row:
                self.ratios[name] = row["mb_per_s"] / usual["mb_per_s"]

    def adversarial(self) -> None:
        """Encode 1 and 10 MB of what is hard on encoders; the tokenizer is there already."""
        for name, make in ADVERSARIES.items():
            texts = []
            for size in (1, 10):
                data = make(np.random.default_rng(0), size * 1_000_000)
                texts.append(self.text(f"{name}-{size}", [data].copy))
                self.check("encode", texts[-1], FORMS[:1], 1)
            tasks = [Task("encode", who, text, constructed=True) for who in ("ours", FORMS[0]) for text in texts]
            short, long, _, theirs = self.medians(*tasks)
            if short and long:
                found = {"mb_per_s": long["mb_per_s"], "times_for_10x": long["wall"] / short["wall"]}
                found |= {"vs_gigatoken": theirs["wall"] / long["wall"]} if theirs else {}
                self.extra["adversarial"][name] = {what: round(value, 2) for what, value in found.items()}

    def memory(self) -> None:
        """The memory that the corpus takes, and 2 GB of it again and again."""
        parts = documents(Path(self.corpus).read_bytes())
        large = Path(self.text(f"{self.name}-2gb", lambda: cycle(parts), LARGE))
        for job in ("encode", "count"):
            for name, text in (("corpus", self.corpus), ("2gb", str(large))):
                (row,) = self.medians(Task(job, "ours", text, 2, rounds=1))
                if row:
                    self.extra["memory_mb"][f"{job}_{name}"] = round(row["memory_mb"])
        large.unlink()

    def report(self, table: bool) -> None:
        """Print the table, and the line of JSON."""
        about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        model = re.search(r"model name\s*:\s*(.+)", about)
        machine = {"cpu": model[1] if model else platform.processor(), "cores": os.cpu_count()}
        modules = filter(importlib.util.find_spec, ("numpy", "numba", "pyarrow", *MODULES.values()))
        machine |= {"python": platform.python_version(), **{name: metadata.version(name) for name in modules}}
        ratios = {name: round(value, 3) for name, value in self.ratios.items()}
        notes = list(dict.fromkeys(self.notes))
        if table:
            columns = {"mb_per_s": "8.1f", "wall": "8.3f", "cpu": "8.3f", "memory_mb": "9.0f", "runs": "4"}
            print(f"{'job':6} {'text':26} {'who':15} threads     MB/s   wall s    CPU s peak MB runs")
            for row in self.rows:
                figures = (format(row[name], form) for name, form in columns.items())
                print(f"{row['job']:6} {row['text']:26} {row['who']:15} {row['threads']:7}", *figures)
            checks = {name: "equal" if equal else "NOT EQUAL" for name, equal in self.checks.items()}
            told = checks | ratios
            for what, found in self.extra.items():
                told |= {f"{what} {name}": value for name, value in found.items()}
            for name, value in (told | machine).items():
                print(f"{name:45} {value}")
            print(*notes, sep="\n")
        result = {"ratios": ratios, "equal": bool(self.checks) and all(self.checks.values()), "checks": self.checks}
        print(json.dumps(result | self.extra | {"rows": self.rows, "notes": notes, "machine": machine}))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", default=[], help="UTF-8 text, where it is not to be made")
    parser.add_argument("--vocab", type=Path, default=DATA / "gpt2_vocab.json")
    parser.add_argument("--merges", type=Path, default=DATA / "gpt2_merges.txt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of %(default)s")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "textmill-benchmark")
    parser.add_argument("--json", action="store_true", help="print the line of JSON only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(Task(**json.loads(options.worker)))))
        return
    sections = options.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only {unknown.pop()}: there are {', '.join(SECTIONS)}")
    for path in (options.vocab, options.merges, *options.corpus):
        if not path.is_file():
            parser.error(f"{path} is missing; name GPT-2's files with --vocab and --merges, and text with --corpus")
    Tokenizer.from_files(options.vocab, options.merges, [END_OF_TEXT]).save(options.directory / "tokenizer")
    bench = Bench(options.directory, options.corpus, options.rounds)
    for section in sections:
        getattr(bench, section)()
    bench.report(table=not options.json)


if __name__ == "__main__":
    main()
