"""Measure the cost of many small chunks: a corpus in 10,000 chunks and in a few large ones, each run twice.

``python -m benchmarks.chunks [--chunks 10000] [--until encode] [--server]``. The corpus is generated stories. A small
chunk has 2,000 bytes. Each run is a process with an empty ``HOME``, and the second run finds everything cached. With
``--server``, the runs report to a Prefect server. Without it, the first run starts an ephemeral server and the second
needs none. With ``--store-delay SECONDS``, only the small chunks are run, the root is on a local S3 server (moto), and
each request of the second run is delayed.

Prints wall and CPU seconds, the memory of the driver, the number of files below the root and in the home, and the
number of rows in Prefect's database. The last line is JSON.
"""

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.object_store import BUCKET, ObjectStore
from benchmarks.orchestration import free_port, wait_for_server
from lm.text.demo_corpus import demo_stories

PROJECT = Path(__file__).parents[1]
_CHUNK_BYTES = 2_000
_CODE = """
import json, resource, sys
from textmill.cli.main import main
code = main()
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), file=sys.stderr)
sys.exit(code)
"""


def run(environment: dict[str, str], root: str, corpus: Path, target_bytes: int, until: str) -> dict[str, float]:
    """Run the pipeline once and return its seconds and memory."""
    arguments = ["run", "--root", root, "--until", until, "--data.train", str([str(corpus)])]
    arguments += ["--chunk.target_bytes", str(target_bytes)]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-c", _CODE, *arguments], cwd=PROJECT, env=environment, capture_output=True, text=True
    )
    if process.returncode:
        raise SystemExit(process.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = next(int(line) for line in reversed(process.stderr.splitlines()) if line.isdigit())
    return {"wall": time.perf_counter() - start, "cpu": cpu, "driver_mb": memory / 1024}


def count_chunks(root: Path) -> int:
    """Return the number of chunks that the chunk stage made."""
    return sum(len(path.read_bytes().splitlines()) for path in root.glob("chunk-group/*/*/chunks.jsonl"))


def count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def count_rows(database: Path) -> int:
    """Return the number of rows in all tables of Prefect's database."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return sum(connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names)


@contextmanager
def server(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start a Prefect server and yield the environment in which runs report to it."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_server(port, process)
        yield {**environment, "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    finally:
        process.terminate()
        process.wait()


def new_home(home: Path) -> dict[str, str]:
    """Create a home and compile the kernels for it. Return the environment of its processes."""
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = [sys.executable, "-m", "lm.compile_kernels"]
    subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True)
    return environment


def measure_store(folder: Path, corpus: Path, until: str, delay_seconds: float) -> dict[str, Any]:
    """Run the pipeline twice with small chunks and a root on an object store."""
    store = ObjectStore()
    environment, root = {**new_home(folder / "home"), **store.environment}, f"s3://{BUCKET}/root"
    with server(environment) as reporting:
        first = run(reporting, root, corpus, _CHUNK_BYTES, until)
        store.delay_seconds, requests = delay_seconds, store.requests
        second = run(reporting, root, corpus, _CHUNK_BYTES, until)
    store.close()
    return {"first": first, "second": {**second, "requests": store.requests - requests}}


def measure(folder: Path, corpus: Path, target_bytes: int, until: str, has_server: bool) -> dict[str, Any]:
    """Run the pipeline twice, the first time with an empty root and home."""
    home, root = folder / f"home-{target_bytes}", folder / f"root-{target_bytes}"
    environment = new_home(home)
    before = count_files(home)
    if has_server:
        with server(environment) as reporting:
            first, second = (run(reporting, str(root), corpus, target_bytes, until) for _ in range(2))
    else:
        first, second = (run(environment, str(root), corpus, target_bytes, until) for _ in range(2))
    return {
        "chunks": count_chunks(root),
        "first": first,
        "second": second,
        "files_in_root": count_files(root),
        "files_in_home": count_files(home) - before,
        "prefect_rows": count_rows(home / ".prefect" / "prefect.db"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--until", default="encode")
    parser.add_argument("--server", action="store_true", help="report to a Prefect server")
    parser.add_argument("--store-delay", type=float, metavar="SECONDS", help="use an object store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.txt"
        size, stories = 0, iter(demo_stories(options.chunks * 10))
        with corpus.open("w", encoding="utf-8") as file:
            while size < options.chunks * (_CHUNK_BYTES + 150):  # a chunk ends with the story that reaches its target
                size += file.write(next(stories))
        if options.store_delay is not None:
            print(json.dumps(measure_store(folder, corpus, options.until, options.store_delay)))
            return
        few, many = (
            measure(folder, corpus, target, options.until, options.server) for target in (size // 4, _CHUNK_BYTES)
        )
    for name, result in (("few", few), ("many", many)):
        print(f"{name}: {json.dumps(result)}")
    extra = many["chunks"] - few["chunks"]
    cost = {f"{kind}_ms_a_chunk": 1000 * (many["first"][kind] - few["first"][kind]) / extra for kind in ("wall", "cpu")}
    print(json.dumps({"few": few, "many": many, **cost}))


if __name__ == "__main__":
    main()
