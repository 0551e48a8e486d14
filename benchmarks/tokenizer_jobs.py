"""What ``benchmarks.tokenizer`` times: each job, as each tokenizer does it, in a process of its own. Each function has
run once before the clock starts, which loads the modules."""

import hashlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module as load
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.texts import END
from lm.formats import read_vocab
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN, pretokenize
from lm.tokenizer import Tokenizer

FORMS = ("gigatoken", "gigatoken/split")
MERGES = 32_000


@dataclass(frozen=True)
class Task:
    """One measurement: who does which job on which text, with how many threads."""

    job: str
    who: str
    text: str
    threads: int = 1
    rounds: int = 1000
    vocab_size: int = 257 + MERGES
    constructed: bool = False  # whether the tokenizer has been made before the clock starts
    check: bool = False  # whether digests of the result are wanted
    tokenizer: str = ""  # the folder of vocab.json, merges.txt and tokenizer.json
    output: str = ""

    def read(self) -> str:
        return Path(self.text).read_bytes().decode()


@cache
def tokenizer(who: str, folder: str, fresh: int) -> Any:
    if who == "ours":
        return Tokenizer.from_files(f"{folder}/vocab.json", f"{folder}/merges.txt", [END_OF_TEXT])
    return load("gigatoken").Tokenizer(f"{folder}/tokenizer.json")


@cache
def ranks(folder: str) -> dict[bytes, int]:
    """The vocabulary as tiktoken wants it, for which it has a file of its own; read before the clock."""
    return {token: token_id for token_id, token in read_vocab(Path(folder) / "vocab.json", [END_OF_TEXT]).items()}


def encode(task: Task) -> list[Path]:
    fresh = 0 if task.constructed else time.perf_counter_ns()
    ids: Any
    if task.who == "ours":
        ours = tokenizer("ours", task.tokenizer, fresh)
        return load("lm.shards").encode_files([task.text], ours, Path(task.output), threads=task.threads)
    if task.who in FORMS:
        split = task.who == FORMS[1]
        source = load("gigatoken").TextFileSource([task.text], separator=END_OF_TEXT) if split else task.text
        rows = tokenizer("gigatoken", task.tokenizer, fresh).encode_files(source, parallel=task.threads > 1)
        ids = load("awkward").flatten(rows)
    elif task.who == "tiktoken":
        mergeable = dict(ranks(task.tokenizer))
        special = {END_OF_TEXT: mergeable.pop(END)}
        named = {"pat_str": GPT2_PATTERN, "mergeable_ranks": mergeable, "special_tokens": special}
        encoding = load("tiktoken").Encoding("bench", **named)
        # On a large text faster than its batches, and than the text as one string of four bytes a character.
        parts = [encoding.encode_to_numpy(part.decode()) for part in Path(task.text).read_bytes().split(END)]
        end = np.array([special[END_OF_TEXT]], parts[0].dtype)
        ids = np.concatenate([array for part in parts for array in (part, end)][:-1])
    else:
        hugging_face = load("tokenizers").Tokenizer.from_file(f"{task.tokenizer}/tokenizer.json")
        found = hugging_face.encode_batch_fast(task.read().split(END_OF_TEXT))
        end = hugging_face.token_to_id(END_OF_TEXT)
        ids = [token_id for document in found for token_id in (*document.ids, end)][:-1]
    np.asarray(ids).astype(np.uint16).tofile(path := Path(task.output) / "ids.bin")
    return [path]


def count(task: Task) -> Any:
    if task.who == "ours":
        return load("lm.counts").count_files([task.text], [END_OF_TEXT], threads=task.threads)
    if task.who == "gigatoken":
        return load("gigatoken").gigatoken_rs.pretokenized_counts(Path(task.text).read_bytes(), END)
    # the reference: the pattern as the module regex matches it
    counts = Counter(pretoken for document in task.read().split(END_OF_TEXT) for pretoken in pretokenize(document))
    return [(pretoken.encode(), count) for pretoken, count in counts.items()]


def train(task: Task) -> Any:
    if task.who == "ours":
        return load("lm.bpe").train_bpe(task.text, task.vocab_size, [END_OF_TEXT], threads=task.threads)[1]
    if task.who == "gigatoken":
        return load("gigatoken").train_bpe(task.text, task.vocab_size, [END_OF_TEXT], separator=END)[1]
    documents = iter(task.read().split(END_OF_TEXT))
    train_from = load("rustbpe").Tokenizer().train_from_iterator
    return train_from(documents, vocab_size=task.vocab_size - 1, pattern=GPT2_PATTERN)


def resident(name: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process in MB; where there is no /proc, the greatest size so far."""
    status = Path("/proc/self/status")
    if status.exists():
        return float(status.read_text().split(f"{name}:")[1].split()[0]) * 1024 / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def work(task: Task) -> dict[str, Any]:
    """Do a task in this process: seconds, memory and, if wanted, digests of what came out."""
    run: Callable[[Task], Any] = {"encode": encode, "count": count, "train": train}[task.job]
    with tempfile.TemporaryDirectory(dir=task.output) as folder:
        (tiny := Path(folder) / "tiny.txt").write_text(f"Hello world, hello there{END_OF_TEXT}And hello{END_OF_TEXT}")
        run(replace(task, text=str(tiny), output=folder, vocab_size=260))
    with open(task.text, "rb", buffering=0) as file:  # everyone finds the file in the page cache
        while file.read(1 << 20):
            pass
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # the greatest size begins anew
    before, wall, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    result = run(task)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = {"wall": wall, "cpu": cpu, "memory_mb": resident("VmHWM") - before}
    return found | (digests(result, task) if task.check else {})


def digests(result: Any, task: Task) -> dict[str, Any]:
    """Of ids with and without separators, of counts, of merges; and these merges."""
    digest = lambda data: hashlib.sha256(data).hexdigest()  # noqa: E731
    if task.job == "encode":
        ids = np.concatenate([np.fromfile(path, "<u2") for path in result])
        return {"all": digest(ids), "words": digest(ids[ids != ranks(task.tokenizer)[END]])}
    if task.job == "train":
        return {"all": digest(repr(result).encode()), "merges": [f"{a.hex()} {b.hex()}" for a, b in result]}
    pairs = result if isinstance(result, list) else zip(*(column.to_pylist() for column in result), strict=True)
    return {"all": digest(repr(sorted(pairs)).encode())}
