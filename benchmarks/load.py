"""Encode large and unusual inputs under a memory limit, and measure the time and the memory.

``python -m benchmarks.load [--only corpus,files,document,specials,s3] [--scale 1] [--limit 2]``. Each case generates a
text and runs ``textmill run --until encode`` over an empty root. A run that takes more than ``limit`` gigabytes (10⁹
bytes) with its children is killed. The kernel does it if a control group can be created. This process also does it: it
adds up the proportional set sizes of anonymous and shared memory four times a second. Pages of files do not count, as
the kernel can reclaim them. At the end the ids must stand for exactly the bytes of the text. Linux only. The last line
is JSON.
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

from benchmarks.texts import END, documents, package_files, random_letters, stories, take_bytes
from lm.tokenizer.tokenizer import Tokenizer, token_dtype
from tasks.runtime.output import Ref, read_output
from tasks.runtime.schemas import RunRecord, read_record
from tasks.runtime.store import Store

_CGROUP_ROOT = Path("/sys/fs/cgroup/memory")  # cgroup version 1
_STAGES = ("ingest", "chunk", "count", "merge", "encode")


def varied_documents() -> Iterator[bytes]:
    """Yield stories and Python sources without end. Eight random words make each document unique."""
    rng = np.random.default_rng(0)
    for document in cycle(chain(documents(stories()), package_files("*.py"))):
        words = b" ".join(random_letters(rng, 8).tobytes() for _ in range(8))
        yield document.removesuffix(END) + words + b"\n" + END


def corpus(folder: Path, scale: float) -> None:
    """Write 4 GB in 40 files."""
    parts = varied_documents()
    for number in range(40):
        with (folder / f"{number:02}.txt").open("wb") as file:
            file.writelines(take_bytes(parts, int(100_000_000 * scale)))


def files(folder: Path, scale: float) -> None:
    """Write 10,000 files of one document each."""
    for number, document in zip(range(int(10_000 * scale)), varied_documents(), strict=False):
        (folder / f"{number:05}.txt").write_bytes(document.removesuffix(END))


def document(folder: Path, scale: float) -> None:
    """Write one document of 1 GB, without a separator."""
    with (folder / "long.txt").open("wb") as file:
        file.writelines(part.removesuffix(END) for part in take_bytes(varied_documents(), int(1_000_000_000 * scale)))


def specials(folder: Path, scale: float) -> None:
    """Write 200,000 separators in a row between two documents."""
    (folder / "specials.txt").write_bytes(b"Before." + END * int(200_000 * scale) + b"After." + END)


def bucket(folder: Path, scale: float) -> None:
    """Write 200 MB for a run whose root is in an object store."""
    with (folder / "text.txt").open("wb") as file:
        file.writelines(take_bytes(varied_documents(), int(200_000_000 * scale)))


CASES: dict[str, Callable[[Path, float], None]] = {
    "corpus": corpus,
    "files": files,
    "document": document,
    "specials": specials,
    "s3": bucket,
}


def measure_memory(pid: int) -> int:
    """Return the memory of the process and its descendants in bytes."""
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    family = {pid}
    parents = [tuple(map(int, line.split())) for line in listing.stdout.splitlines()]
    while children := {child for child, parent in parents if parent in family} - family:
        family |= children
    total = 0
    for member in family:
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:  # the process has ended
            continue
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in rollup.splitlines()[1:]}
        total += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    return total


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """Yield a control group with a limit of ``limit`` bytes, or None if none can be created."""
    group = _CGROUP_ROOT / f"textmill-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        while pids := (group / "cgroup.procs").read_text().split():  # e.g. a server that the run started
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        group.rmdir()


def run_limited(command: list[str], limit: int, log: Path) -> dict[str, Any]:
    """Run a command under a limit of ``limit`` bytes; return its exit code, seconds and peak memory."""
    with control_group(limit) as group, log.open("wb") as output:

        def join() -> None:
            if group:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        started, peak = time.perf_counter(), 0
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=join
        )
        while process.poll() is None:
            peak = max(peak, measure_memory(process.pid))
            if peak > limit:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.25)
        seconds = time.perf_counter() - started
        limit_by = "kernel" if group else "polling"
        return {"exit": process.returncode, "seconds": round(seconds, 1), "peak_mb": peak >> 20, "limit_by": limit_by}


def count_encoded_bytes(root: str) -> tuple[int, int, dict[str, float]]:
    """Return the bytes that the ids of the latest run stand for, the number of separators, and the seconds by stage.

    The bytes do not include the separators.
    """
    store = Store(root)
    record = read_record(RunRecord, store, "runs", "latest.json") or {"stages": {}}
    outputs = {name: read_output(store, Ref(name, stage["key"])) for name, stage in record["stages"].items()}
    tokenizer = Tokenizer.load(outputs["merge"].directory("tokenizer"))
    counts = np.zeros(tokenizer.size, np.int64)
    for key in store.list_names("encode-group"):
        if key != "latest.json":
            ids = np.fromfile(
                read_output(store, Ref("encode-group", key)).path("tokens.bin"), token_dtype(tokenizer.size)
            )
            counts += np.bincount(ids, minlength=tokenizer.size)
    separators = sum(int(counts[token_id]) for token_id in tokenizer.special_ids.values())
    lengths = np.array([len(tokenizer.vocab[token_id]) for token_id in range(tokenizer.size)])
    lengths[list(tokenizer.special_ids.values())] = 0
    seconds = {name: record["stages"][name]["seconds"] for name in _STAGES}
    return int(counts @ lengths), separators, seconds


def count_text_bytes(folder: Path) -> tuple[int, int]:
    """Return the bytes of the text without separators, and the number of separators.

    The pipeline adds a separator to a file that does not end with one.
    """
    total = separators = 0
    for path in folder.iterdir():
        data = path.read_bytes()
        count = data.count(END)
        total += len(data) - count * len(END)
        separators += count + (not data.endswith(END))
    return total, separators


@contextmanager
def object_store() -> Iterator[str]:
    """Start a local S3 server in this process, and yield the URL of a root in a bucket."""
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
    """Generate a case, run the pipeline on it, and check the result."""
    with (
        tempfile.TemporaryDirectory(prefix="textmill-load-") as directory,
        object_store() if case == "s3" else nullcontext(str(Path(directory) / "root")) as root,
    ):
        folder, log = Path(directory) / "text", Path(directory) / "log"
        folder.mkdir()
        CASES[case](folder, scale)
        size, separators = count_text_bytes(folder)
        command = ["textmill", "run", "--root", root, "--until", "encode", "--data.train", f"['{folder}/*.txt']"]
        command += ["--data.valid_fraction", "0", "--tokenizer.vocab_size", "32000", "--chunk.target_bytes", "16777216"]
        result = run_limited(command, limit, log)
        if result["exit"]:
            return result | {"log": log.read_text(errors="replace").splitlines()[-20:]}
        encoded = count_encoded_bytes(root)
        if encoded[:2] != (size, separators):
            problem = f"{encoded[0]:,} bytes and {encoded[1]:,} separators are encoded of {size:,} and {separators:,}"
            result |= {"exit": "wrong", "log": [problem]}
        rate = round(size / 1e6 / result["seconds"], 1)
        return result | {"mb": round(size / 1e6, 1), "mb_per_second": rate, **encoded[2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas; default: %(default)s")
    parser.add_argument("--scale", type=float, default=1, help="factor of the sizes of the cases")
    parser.add_argument("--limit", type=float, default=2, help="memory limit of a run with its children, in gigabytes")
    options = parser.parse_args()
    results = {}
    for case in options.only.split(","):
        results[case] = measure(case, options.scale, int(options.limit * 1e9))
        print(case, json.dumps(results[case]), file=sys.stderr, flush=True)
    print(json.dumps(results))
    sys.exit(any(result["exit"] for result in results.values()))


if __name__ == "__main__":
    main()
