"""The servers, processes and texts of the real runs."""

import functools
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chunks import PROJECT, server
from benchmarks.object_store import BUCKET, COUNTER_PATH, ObjectStore
from benchmarks.texts import documents, package_files, stories, take_bytes
from lm.text.demo_corpus import demo_stories

GROUP_BYTES = 8_000  # of generated text for each group


@dataclass
class Site:
    """A Prefect server, an object store, and a folder for the files of the runs."""

    folder: Path
    environment: dict[str, str]
    store: ObjectStore

    @property
    def database(self) -> Path:
        return Path(self.environment["PREFECT_HOME"]) / "prefect.db"

    def run(self, root: str, sources: Sequence[str], target_bytes: int, threads: int, *options: str) -> dict[str, Any]:
        """Run the pipeline up to ``encode`` with an empty root, and return what it used."""
        record = self.folder / "record.json"
        command = [sys.executable, "-m", "benchmarks.scale.meter", str(record)]
        if root.startswith("s3://"):
            command += ["--counter", self.store.url + COUNTER_PATH]
        command += ["run", "--root", root, "--until", "encode", "--data.train", json.dumps(list(sources))]
        command += ["--chunk.target_bytes", str(target_bytes), "--execution.threads", str(threads), *options]
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.run(command, cwd=PROJECT, env=self.environment, capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(process.stderr)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result: dict[str, Any] = json.loads(record.read_text())
        result["wall"] = time.perf_counter() - started
        result["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return result

    def put_sources(self, name: str, text: bytes, number: int) -> list[str]:
        """Write a text to ``number`` sources in the object store; return their URLs."""
        size = -(-len(text) // number)
        for part in range(number):
            self.store.put(f"{name}/{part:03}.txt", text[part * size : (part + 1) * size])
        return [f"s3://{BUCKET}/{name}/{part:03}.txt" for part in range(number)]


@contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """Start the servers."""
    store, home = ObjectStore(), folder / "home"
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        **store.environment,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PREFECT_HOME": str(home / "prefect"),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    # Compile the kernels before the clock starts.
    command = [sys.executable, "-m", "lm.compile_kernels"]
    subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True)
    try:
        with server(environment) as reporting:
            yield Site(folder, reporting, store)
    finally:
        store.close()


def small_text(size: int) -> bytes:
    """Return ``size`` bytes of generated stories."""
    return b"".join(take_bytes((story.encode() for story in demo_stories(size // 100)), size))


@functools.cache
def mixed_text(size: int) -> bytes:
    """Return ``size`` bytes of stories and Python sources in random order."""
    parts = [*take_bytes(documents(stories()), size // 2), *take_bytes(package_files("*.py"), size // 2)]
    random.Random(0).shuffle(parts)
    return b"".join(parts)


def read_manifests(root: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in root.glob(f"{stage}/*/manifest.json")]
