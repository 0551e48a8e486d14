"""The timed jobs of ``benchmarks.tokenizer``: encode, warm, count and train, each for each library.

A measurement is a process. Each function runs once before its clock starts, which imports the modules.
"""

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
from benchmarks.vocabularies import QUICKTOK
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN, pretokenize
from lm.tokenizer.formats.vocab_merges import read_vocab
from lm.tokenizer.tokenizer import Tokenizer

GIGATOKEN_FORMS = ("gigatoken", "gigatoken/split")
MERGES = 32_000


@dataclass(frozen=True)
class Task:
    """The settings of one measurement: job, library, text and threads."""

    job: str
    library: str
    text: str
    threads: int = 1
    rounds: int = 1000
    vocab_size: int = 257 + MERGES
    is_constructed: bool = False  # whether the tokenizer is constructed before the clock starts
    check: bool = False  # whether the result has digests of the output
    pattern: str = "gpt2"  # its name
    is_chat: bool = False  # whether the tokenizer has 256 special tokens and normalizes to NFC
    tokenizer: str = ""  # the folder that Tokenizer.save wrote
    dtype: str = "<u2"  # of the ids that are written
    end_id: int = 0  # of <|endoftext|>
    output: str = ""

    def read(self) -> str:
        return Path(self.text).read_bytes().decode()


@cache
def make_tokenizer(library: str, folder: str, cache_key: int) -> Any:
    if library == "ours":
        return Tokenizer.load(folder)
    return load("gigatoken").Tokenizer(f"{folder}/tokenizer.json")


@cache
def read_ranks(folder: str) -> dict[bytes, int]:
    """Read the vocabulary in tiktoken's form. tiktoken has another file format, so this is not timed."""
    return {token: token_id for token_id, token in read_vocab(Path(folder) / "vocab.json", [END_OF_TEXT]).items()}


def construct(task: Task) -> Any:
    return make_tokenizer(task.library, task.tokenizer, time.perf_counter_ns())


def encode(task: Task) -> list[Path]:
    cache_key = 0 if task.is_constructed else time.perf_counter_ns()
    ids: Any
    if task.library == "ours":
        ours = make_tokenizer("ours", task.tokenizer, cache_key)
        return load("lm.tokenizer.stream").encode_files([task.text], ours, Path(task.output), threads=task.threads)
    if task.library in GIGATOKEN_FORMS:
        is_split = task.library == GIGATOKEN_FORMS[1]
        source = load("gigatoken").TextFileSource([task.text], separator=END_OF_TEXT) if is_split else task.text
        rows = make_tokenizer("gigatoken", task.tokenizer, cache_key).encode_files(source, parallel=task.threads > 1)
        ids = load("awkward").flatten(rows)
    elif task.library == "tiktoken":
        mergeable = dict(read_ranks(task.tokenizer))
        special = {END_OF_TEXT: mergeable.pop(END)}
        options = {"pat_str": PATTERNS[task.pattern], "mergeable_ranks": mergeable, "special_tokens": special}
        encoding = load("tiktoken").Encoding("bench", **options)
        # On a large text this is faster than batches, and than one string with four bytes per character.
        parts = [encoding.encode_to_numpy(part.decode()) for part in Path(task.text).read_bytes().split(END)]
        end = np.array([special[END_OF_TEXT]], parts[0].dtype)
        ids = np.concatenate([array for part in parts for array in (part, end)][:-1])
    elif task.library == "quicktok":  # has its own vocabularies, and loads them once
        encoding = load("quicktok").get_encoding(QUICKTOK[task.pattern])
        joined, starts = encoding.encode_batch(task.read().split(END_OF_TEXT), task.threads)
        ids = np.insert(joined, starts[1:-1], task.end_id)
    else:
        hugging_face = load("tokenizers").Tokenizer.from_file(f"{task.tokenizer}/tokenizer.json")
        documents = hugging_face.encode_batch_fast(task.read().split(END_OF_TEXT))
        end = hugging_face.token_to_id(END_OF_TEXT)
        ids = [token_id for document in documents for token_id in (*document.ids, end)][:-1]
    np.asarray(ids).astype(task.dtype).tofile(path := Path(task.output) / "ids.bin")
    return [path]


def make_warm_encoder(task: Task) -> Callable[[], Any]:
    """Return a function that encodes the text from memory to one array of ids, by a tokenizer that has done it before.

    Ours gets the text with its separators, the peers the documents; gigatoken the better of both.
    """
    text = task.read()
    documents = text.split(END_OF_TEXT)
    path = f"{task.tokenizer}/tokenizer.json"
    encode_once: Callable[[], Any]
    match task.library:
        case "ours":
            ours, data = Tokenizer.load(task.tokenizer), text.encode()
            encode_once = lambda: np.concatenate([*ours.encode_blocks([data])])  # noqa: E731
        case "gigatoken" | "gigatoken/split":
            parts = documents if task.library == GIGATOKEN_FORMS[1] else [text]
            gigatoken, flatten = load("gigatoken").Tokenizer(path), load("awkward").flatten
            encode_once = lambda: np.asarray(flatten(gigatoken.encode_batch(parts, parallel=False)))  # noqa: E731
        case "fastokens":
            fastokens = load("fastokens").Tokenizer.from_file(path)
            encode_once = lambda: np.frombuffer(fastokens.encode_batch_flat(documents)[0], np.uint32)  # noqa: E731
        case "tokie":
            tokie = load("tokie").Tokenizer.from_json(path)
            encode_once = lambda: tokie.encode_batch_flat(documents, add_special_tokens=False)[0]  # noqa: E731
        case _:
            kitoken = load("kitoken").Kitoken.from_tokenizers_file(path)
            encode_once = lambda: np.concatenate(kitoken.encode_all(documents)).astype(np.uint32)  # noqa: E731
    encode_once()
    return encode_once


def count(task: Task) -> Any:
    if task.library == "ours":
        pattern = PATTERNS[task.pattern]
        return load("lm.tokenizer.pretoken_counts").count_files([task.text], [END_OF_TEXT], pattern, task.threads)
    if task.library == "gigatoken":
        return load("gigatoken").gigatoken_rs.pretokenized_counts(Path(task.text).read_bytes(), END)
    # The reference is the module regex.
    documents = task.read().split(END_OF_TEXT)
    counts = Counter(pretoken for document in documents for pretoken in pretokenize(document, PATTERNS[task.pattern]))
    return [(pretoken.encode(), count) for pretoken, count in counts.items()]


def train(task: Task) -> Any:
    if task.library == "ours":
        return load("lm.tokenizer.bpe").train_bpe(task.text, task.vocab_size, [END_OF_TEXT], threads=task.threads)[1]
    if task.library == "gigatoken":
        return load("gigatoken").train_bpe(task.text, task.vocab_size, [END_OF_TEXT], separator=END)[1]
    if task.library == "reference":
        return learn_plainly(task.read().encode(), task.vocab_size)
    documents = iter(task.read().split(END_OF_TEXT))
    train_from = load("rustbpe").Tokenizer().train_from_iterator
    return train_from(documents, vocab_size=task.vocab_size - 1, pattern=GPT2_PATTERN)


def learn_plainly(data: bytes, vocab_size: int) -> list[tuple[bytes, bytes]]:
    """Learn the merges of a vocabulary with one special token; count all pairs before each merge."""
    tokens = [*(bytes([byte]) for byte in range(256)), END]
    separator, rows = vocab_size, vocab_size + 1
    pretokens = pretokenize(data.decode(), GPT2_PATTERN)
    ids = np.concatenate([[*pretoken.encode(), separator] for pretoken in pretokens])
    merges = []
    while len(tokens) < vocab_size:
        pairs = ids[:-1] * rows + ids[1:]
        counts = np.bincount(pairs, minlength=rows * rows).reshape(rows, rows)
        counts[separator] = counts[:, separator] = 0
        if not counts.any():
            break
        most_frequent = np.argwhere(counts == counts.max()).tolist()
        left, right = max(most_frequent, key=lambda pair: (tokens[pair[0]], tokens[pair[1]]))
        places = np.flatnonzero(pairs == left * rows + right)
        if left == right:  # in a run of places, those at even offsets
            is_first = np.diff(places, prepend=-2) > 1
            run_starts = np.maximum.accumulate(np.where(is_first, places, 0))
            places = places[(places - run_starts) % 2 == 0]
        ids[places] = len(tokens)
        ids = np.delete(ids, places + 1)
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    return merges


def resident_mb(name: str) -> float:
    """Return ``VmRSS`` or ``VmHWM`` of this process in MB, or the peak size if there is no ``/proc``."""
    status = Path("/proc/self/status")
    if status.exists():
        return float(status.read_text().split(f"{name}:")[1].split()[0]) * 1024 / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def run_task(task: Task) -> dict[str, Any]:
    """Run a task in this process; return its seconds and memory, and digests of its output if ``check`` is set."""
    jobs: dict[str, Callable[[Task], Any]] = {"construct": construct, "encode": encode, "count": count, "train": train}
    if task.job == "warm":
        encode_warm = make_warm_encoder(task)
        run = lambda _: encode_warm()  # noqa: E731
    else:
        run = jobs[task.job]
        tiny_text = f"Hello world, hello there{END_OF_TEXT}And hello{END_OF_TEXT}"
        with tempfile.TemporaryDirectory(dir=task.output) as folder:
            (tiny := Path(folder) / "tiny.txt").write_text(tiny_text)
            run(replace(task, text=str(tiny), output=folder, vocab_size=260))
    with open(task.text, "rb", buffering=0) as file:  # read the file into the page cache
        while file.read(1 << 20):
            pass
    if (clear_refs := Path("/proc/self/clear_refs")).exists():
        clear_refs.write_text("5")  # reset the peak size
    before, wall, cpu = resident_mb("VmRSS"), time.perf_counter(), time.process_time()
    result = run(task)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figures = {"wall": wall, "cpu": cpu, "memory_mb": resident_mb("VmHWM") - before}
    return figures | (digests(result, task) if task.check else {})


def digests(result: Any, task: Task) -> dict[str, Any]:
    """Return digests of the ids with and without separators, of the counts, or of the merges; and the merges."""
    digest = lambda data: hashlib.sha256(data).hexdigest()  # noqa: E731
    if task.job in ("encode", "warm"):
        is_warm = task.job == "warm"
        ids = result.astype(task.dtype) if is_warm else np.concatenate([np.fromfile(p, task.dtype) for p in result])
        return {"all": digest(ids), "without_separators": digest(ids[ids != task.end_id])}
    if task.job == "train":
        return {"all": digest(repr(result).encode()), "merges": [f"{a.hex()} {b.hex()}" for a, b in result]}
    pairs = result if isinstance(result, list) else zip(*(column.to_pylist() for column in result), strict=True)
    return {"all": digest(repr(sorted(pairs)).encode())}
