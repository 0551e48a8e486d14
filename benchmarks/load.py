"""Whether large and odd inputs go from text to shards within a memory limit: how fast, and in how much memory.

``python -m benchmarks.load [--only corpus,files,document,specials,s3] [--scale 1] [--limit 2]``. Each case is made up,
then ``textmill run --until encode`` reads it over an empty root. Above the ``limit`` of gigabytes (10⁹ bytes) the
process and its children are killed: by the kernel where a control group can be had, and by this process, which adds up
their memory four times a second (pages that are shared by halves, thirds …; not those of files, which the kernel takes
back). Then the bytes of all ids must be those of the text. Linux only. The last line is JSON.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from benchmarks.texts import END, documents, letters, limited, packages, stories
from lm.tokenizer import Tokenizer, token_dtype
from tasks.output import Ref, read_output
from tasks.records import RunRecord, read
from tasks.store import Store

_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1
_STAGES = ("ingest", "chunk", "count", "merge", "encode")


def varied() -> Iterator[bytes]:
    """Stories and Python sources again and again, each document with eight words that nothing else has."""
    rng = np.random.default_rng(0)
    for document in cycle(chain(documents(stories()), packages("*.py"))):
        words = b" ".join(letters(rng, 8).tobytes() for _ in range(8))
        yield document.removesuffix(END) + words + b"\n" + END


def corpus(folder: Path, scale: float) -> None:
    """4 GB in 40 files."""
    parts = varied()
    for number in range(40):
        with (folder / f"{number:02}.txt").open("wb") as file:
            file.writelines(limited(parts, int(100_000_000 * scale)))


def files(folder: Path, scale: float) -> None:
    """10,000 documents, each a file."""
    for number, document in zip(range(int(10_000 * scale)), varied(), strict=False):
        (folder / f"{number:05}.txt").write_bytes(document.removesuffix(END))


def document(folder: Path, scale: float) -> None:
    """A gigabyte without a separator."""
    with (folder / "long.txt").open("wb") as file:
        file.writelines(part.removesuffix(END) for part in limited(varied(), int(1_000_000_000 * scale)))


def specials(folder: Path, scale: float) -> None:
    """200,000 separators in a row, between two documents."""
    (folder / "specials.txt").write_bytes(b"Before." + END * int(200_000 * scale) + b"After." + END)


def bucket(folder: Path, scale: float) -> None:
    """200 MB, for a root that is an object store."""
    with (folder / "text.txt").open("wb") as file:
        file.writelines(limited(varied(), int(200_000_000 * scale)))


CASES: dict[str, Callable[[Path, float], None]] = {
    "corpus": corpus,
    "files": files,
    "document": document,
    "specials": specials,
    "s3": bucket,
}


def memory_of(pid: int) -> int:
    """Bytes of the process and of all that it has started."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    family = {pid}
    parents = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    while grown := {child for child, parent in parents if parent in family} - family:
        family |= grown
    total = 0
    for member in family:
        try:
            said = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in said.splitlines()[1:]}
        total += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    return total


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """A control group of the kernel that holds its processes to ``limit`` bytes; None where none can be made."""
    group = _GROUPS / f"textmill-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        while left := (group / "cgroup.procs").read_text().split():  # such as a server that the run had started
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        group.rmdir()


def run_limited(command: list[str], limit: int, log: Path) -> dict[str, Any]:
    """Run a command to its end, or to ``limit`` bytes: its exit code, seconds, and greatest memory."""
    with control_group(limit) as group, log.open("wb") as said:

        def join() -> None:
            if group:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        started, peak = time.perf_counter(), 0
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=join
        )
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            if peak > limit:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.25)
        seconds = time.perf_counter() - started
        held = "kernel" if group else "watched"
        return {"exit": process.returncode, "seconds": round(seconds, 1), "peak_mb": peak >> 20, "limit_by": held}


def encoded_bytes(root: str) -> tuple[int, int, dict[str, float]]:
    """Bytes that the ids of the latest run stand for without the separators, their number, and seconds by stage."""
    store = Store(root)
    record = read(RunRecord, store, "runs", "latest.json") or {"stages": {}}
    outputs = {name: read_output(store, Ref(name, stage["key"])) for name, stage in record["stages"].items()}
    tokenizer = Tokenizer.load(outputs["merge"].directory("tokenizer"))
    counts = np.zeros(tokenizer.size, np.int64)
    for key in store.names("encode-chunk"):
        if key != "latest.json":
            ids = np.fromfile(
                read_output(store, Ref("encode-chunk", key)).path("tokens.bin"), token_dtype(tokenizer.size)
            )
            counts += np.bincount(ids, minlength=tokenizer.size)
    separators = sum(int(counts[token_id]) for token_id in tokenizer.special_ids.values())
    lengths = np.array([len(tokenizer.vocab[token_id]) for token_id in range(tokenizer.size)])
    lengths[list(tokenizer.special_ids.values())] = 0
    seconds = {name: record["stages"][name]["seconds"] for name in _STAGES}
    return int(counts @ lengths), separators, seconds


def text_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of the text without separators, and their number: a file that does not end with one gets it."""
    total = separators = 0
    for path in folder.iterdir():
        data = path.read_bytes()
        found = data.count(END)
        total += len(data) - found * len(END)
        separators += found + (not data.endswith(END))
    return total, separators


@contextmanager
def object_store() -> Iterator[str]:
    """A root in a bucket of an S3 that this process plays."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    try:
        fsspec.filesystem("s3").mkdir("load")
        yield "s3://load/root"
    finally:
        server.stop()


def measure(case: str, scale: float, limit: int) -> dict[str, Any]:
    """Make a case, run it, check and describe it."""
    with (
        tempfile.TemporaryDirectory(prefix="textmill-load-") as place,
        object_store() if case == "s3" else nullcontext(str(Path(place) / "root")) as root,
    ):
        folder, log = Path(place) / "text", Path(place) / "log"
        folder.mkdir()
        CASES[case](folder, scale)
        size, separators = text_bytes(folder)
        command = ["textmill", "run", "--root", root, "--until", "encode", "--data.train", f"['{folder}/*.txt']"]
        command += ["--data.valid_fraction", "0", "--tokenizer.vocab_size", "32000", "--chunk.target_bytes", "16777216"]
        found = run_limited(command, limit, log)
        if found["exit"]:
            found["said"] = log.read_text(errors="replace").splitlines()[-20:]
            return found
        done, ends, seconds = encoded_bytes(root)
        if (done, ends) != (size, separators):
            found["said"] = [f"{done:,} bytes and {ends:,} separators are encoded of {size:,} and {separators:,}"]
            found["exit"] = "wrong"
        return found | {"mb": round(size / 1e6, 1), "mb_per_second": round(size / 1e6 / found["seconds"], 1), **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="some of %(default)s")
    parser.add_argument("--scale", type=float, default=1, help="of the cases' sizes")
    parser.add_argument("--limit", type=float, default=2, help="gigabytes that a run with its children may take")
    options = parser.parse_args()
    results = {}
    for case in options.only.split(","):
        results[case] = measure(case, options.scale, int(options.limit * 1e9))
        print(case, json.dumps(results[case]), file=sys.stderr, flush=True)
    print(json.dumps(results))
    sys.exit(any(found["exit"] for found in results.values()))


if __name__ == "__main__":
    main()
