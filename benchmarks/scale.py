"""Measure what a run costs by chunks, workers and requests, and predict runs of 1 and 15 TB on a cluster.

``python -m benchmarks.scale [--quick]``. First, real runs up to ``encode``, each a process, which report to a Prefect
server. The object store is moto behind a proxy that counts requests and delays each of them:

- 100, 1,000 and 10,000 small chunks, on a directory;
- 1 and 2 Dask workers, if prefect-dask is installed;
- groups of one small chunk on the object store, without a delay;
- the speed of each stage with 40 MB of stories and Python sources.

Their costs are the parameters of :mod:`benchmarks.scale_model`. The model then predicts other real runs, with delays of
20 and 100 ms, and runs of 1 and 15 TB. Prints the tables of docs/scale.md. The last line is JSON.
"""

import argparse
import functools
import json
import logging
import math
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.chunks import PROJECT, count_rows, server
from benchmarks.orchestration import DirectCaller
from benchmarks.scale_model import Cluster, Corpus, Costs, Prediction, StepCost, predict
from benchmarks.texts import documents, package_files, stories, take_bytes
from lm.text.demo_corpus import demo_stories

# The clusters of the predictions.
WORKERS = (1, 10, 100)
CORES_PER_WORKER = 16
WORKER_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s, of the driver too
BUCKET_BYTES_PER_SECOND = 12.5e9  # 100 Gbit/s
BUCKET_REQUESTS_PER_SECOND = 3_500.0  # writes of one S3 prefix; reads may be 5,500
LATENCIES_SECONDS = (0.02, 0.1)
SOURCE_BYTES = 1e9
CORPORA = {
    "1 TB in 1 MB chunks": Corpus(1e12, 1e6, SOURCE_BYTES),
    "15 TB in 1 MB chunks": Corpus(15e12, 1e6, SOURCE_BYTES),
    "15 TB in 256 MB chunks": Corpus(15e12, 256e6, SOURCE_BYTES),
}

_SMALL_CHUNK_BYTES = 2_000
_GROUP_BYTES = 8_000  # of text for each group on the object store
_WORK_GROUPS = 6
_ROWS_SECONDS = 3.0  # until the server has written the last events of a run
_KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
_BUCKET = "scale"
_COUNTER_PATH = "/_requests"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. ``groups`` are of one chunk each."""

    chunks: tuple[int, ...] = (100, 1_000, 10_000)
    groups: tuple[int, int] = (12, 48)
    """Of the runs on the object store without a delay."""
    checked_groups: int = 24
    checks: tuple[tuple[float, int], ...] = ((0.02, 4), (0.1, 4), (0.1, 16))
    """Delay in seconds, and threads, of the runs that are predicted."""
    max_checks: int = 4
    """The last one has the text of ``work_mb``."""
    work_mb: int = 40
    dask_groups: int = 32
    listed: int = 50_000
    """Chunks whose list is written, to measure memory and time of a chunk."""
    sources: int = 500


_QUICK = Sizes(
    chunks=(50, 150),
    groups=(6, 34),
    checked_groups=12,
    checks=((0.02, 4),),
    max_checks=1,
    work_mb=8,
    dask_groups=0,
    listed=20_000,
    sources=100,
)


class ObjectStore:
    """A moto server that counts its requests and delays each by ``delay_seconds``."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.delay_seconds, self.requests, self._busy_seconds = 0.0, 0, 0.0
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {**_KEYS, "AWS_ENDPOINT_URL": self.url}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{_BUCKET}", method="PUT")).close()

    @property
    def seconds_per_request(self) -> float:
        """Mean time of moto itself."""
        return self._busy_seconds / max(1, self.requests)

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        headers = {"Content-Type": "application/octet-stream"}  # moto would take the default for a form
        request = urllib.request.Request(f"{self.url}/{_BUCKET}/{path}", data, headers, method="PUT")
        urllib.request.urlopen(request).close()

    def close(self) -> None:
        self._server.shutdown()

    def _respond(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _COUNTER_PATH:
            start("200 OK", [("Content-Type", "text/plain")])
            return [str(self.requests).encode()]
        time.sleep(self.delay_seconds)
        started = time.perf_counter()
        body = self._app(environ, start)
        with self._lock:
            self.requests += 1
            self._busy_seconds += time.perf_counter() - started
        return body


class Meter:
    """Notes wall seconds, CPU seconds of the driver and requests of each step of a run, in the run's process."""

    def __init__(self, counter_url: str) -> None:
        self._counter_url = counter_url
        self.steps: dict[str, dict[str, float]] = {}
        self.items: dict[str, int] = {}
        self._sources: Any = None

    def _read(self) -> dict[str, float]:
        used, requests = resource.getrusage(resource.RUSAGE_SELF), 0
        if self._counter_url:
            with urllib.request.urlopen(self._counter_url) as response:
                requests = int(response.read())
        return {"seconds": time.perf_counter(), "cpu": used.ru_utime + used.ru_stime, "requests": requests}

    @contextmanager
    def step(self, name: str, items: int = 0) -> Iterator[None]:
        """Add what the ``with`` block uses to a step."""
        before = self._read()
        yield
        after = self._read()
        step = self.steps.setdefault(name, dict.fromkeys(before, 0.0))
        for kind in step:
            step[kind] += after[kind] - before[kind]
        self.items[name] = self.items.get(name, 0) + items

    def patch(self) -> None:
        """Note the steps of the pipelines that run later in this process.

        Methods are replaced, not a class: Dask would copy a class of this module together with the meter.
        """
        import flows.pipeline
        from flows.executor import PrefectExecutor
        from tasks.runtime.stage import Stage

        meter, find_sources = self, flows.pipeline._find_sources
        call, map_items, look_up = PrefectExecutor.call, PrefectExecutor.map, Stage.look_up

        def measured_call(executor: PrefectExecutor, stage: Stage, *arguments: Any) -> Any:
            with meter.step(stage.name, sum(len(argument) for argument in arguments if isinstance(argument, list))):
                return call(executor, stage, *arguments)

        def measured_map(executor: PrefectExecutor, stage: Stage, title: str, items: Any, *arguments: Any) -> Any:
            with meter.step(stage.name, sum(len(item) if isinstance(item, list) else 1 for item in items)):
                return map_items(executor, stage, title, items, *arguments)

        def measured_look_up(stage: Stage, *arguments: Any) -> Any:
            with meter.step(f"{stage.name} look-up"):
                return look_up(stage, *arguments)

        def measured_find_sources(*arguments: Any) -> Any:
            with meter.step("sources"):
                return find_sources(*arguments)

        PrefectExecutor.call = measured_call  # type: ignore[method-assign, assignment]
        PrefectExecutor.map = measured_map  # type: ignore[method-assign, assignment]
        Stage.look_up = measured_look_up  # type: ignore[method-assign, assignment]
        flows.pipeline._find_sources = measured_find_sources  # type: ignore[assignment]


def run_measured(record: Path, counter_url: str, arguments: list[str]) -> int:
    """Run ``textmill`` in this process, and write what its steps used to ``record``."""
    from flows.cli.parser import main as textmill

    meter = Meter(counter_url)
    meter.patch()
    code = textmill(arguments)
    for name, look_up in meter.steps.items():
        if step := meter.steps.get(name.removesuffix(" look-up")) if name.endswith(" look-up") else None:
            step.update({kind: step[kind] - look_up[kind] for kind in step})  # it is a part of the mapped step
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    record.write_text(json.dumps({"steps": meter.steps, "items": meter.items, "driver_mb": memory_mb}))
    return code


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
        command = [sys.executable, "-m", "benchmarks.scale", "--record", str(record)]
        if root.startswith("s3://"):
            command += ["--counter", self.store.url + _COUNTER_PATH]
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
        return [f"s3://{_BUCKET}/{name}/{part:03}.txt" for part in range(number)]


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
    subprocess.run([sys.executable, "-m", "lm.kernels"], cwd=PROJECT, env=environment, check=True, capture_output=True)
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


def count_log_rows(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return int(connection.execute("SELECT count(*) FROM log").fetchone()[0])


def measure_chunks(site: Site, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Run with more and more small chunks on a directory: wall, CPU, memory and rows."""
    results = []
    for count in counts:
        corpus = site.folder / f"chunks-{count}.txt"
        corpus.write_bytes(small_text(count * (_SMALL_CHUNK_BYTES + 150)))
        rows, log_rows = count_rows(site.database), count_log_rows(site.database)
        root = site.folder / f"chunks-{count}"
        result = site.run(str(root), [str(corpus)], _SMALL_CHUNK_BYTES, 2)
        time.sleep(_ROWS_SECONDS)
        (lines,) = root.glob("chunk/*/*/chunks.jsonl")
        groups = result["items"]["count-group"] + result["items"]["encode-group"]
        result |= {"chunks": len(lines.read_bytes().splitlines()), "groups": groups}
        result |= {"rows": count_rows(site.database) - rows, "log_rows": count_log_rows(site.database) - log_rows}
        results.append(result)
    for result, previous in zip(results, [None, *results[:-1]], strict=True):
        line = f"{result['chunks']:6} chunks, {result['groups']:4} groups: wall {result['wall']:6.1f} s, "
        line += f"CPU {result['cpu']:6.1f} s, driver {result['driver_mb']:.0f} MB, {result['rows']:,} rows"
        if previous:
            extra = result["chunks"] - previous["chunks"]
            wall, cpu = ((result[kind] - previous[kind]) / extra * 1000 for kind in ("wall", "cpu"))
            line += f"; each more chunk: wall {wall:.2f} ms, CPU {cpu:.2f} ms"
        print(line, flush=True)
    return results


@dataclass(frozen=True)
class Work:
    """A run with real text in groups of equal size: CPU seconds of its steps, and sizes of its files in MB."""

    text_mb: float
    cpu: dict[str, float]
    counts_mb: float
    """Files of counts of all groups."""
    unique: int
    """Different pretokens."""
    largest_group: dict[str, float]
    root: Path


def run_work(site: Site, text: bytes) -> Work:
    """Run with a text in :data:`_WORK_GROUPS` groups, on a directory and in one thread."""
    name = f"work-{len(text)}"
    corpus, root = site.folder / f"{name}.txt", site.folder / name
    corpus.write_bytes(text)
    target_bytes = len(text) // _WORK_GROUPS + 1
    result = site.run(str(root), [str(corpus)], target_bytes, 1, "--data.valid_fraction", "0.001")
    groups, (counts,) = read_manifests(root, "count-group"), read_manifests(root, "count")
    return Work(
        text_mb=len(text) / 1e6,
        cpu={name: step["cpu"] for name, step in result["steps"].items()},
        counts_mb=sum(file_bytes(group, "counts.parquet") for group in groups) / 1e6,
        unique=counts["figures"]["unique"],
        largest_group=max((group["figures"] for group in groups), key=lambda figures: figures["bytes"]),
        root=root,
    )


def read_manifests(root: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in root.glob(f"{stage}/*/manifest.json")]


def file_bytes(manifest: dict[str, Any], name: str) -> int:
    return next(int(file["bytes"]) for file in manifest["files"] if file["path"] == name)


def measure_work(site: Site, megabytes: int) -> dict[str, float]:
    """Return the CPU seconds of each stage for each further MB of real text, and the sizes of its files."""
    from lm.tokenizer.pretoken_counts import counts_to_arrays, read_counts

    text = mixed_text(megabytes * 1_000_000)
    few, many = run_work(site, text[: len(text) // 4]), run_work(site, text)

    def slope(step: str, extra: float) -> float:
        return max(0.0, many.cpu[step] - few.cpu[step]) / extra

    extra_mb, (table,) = many.text_mb - few.text_mb, many.root.glob("count/*/*/counts.parquet")
    group = many.largest_group
    exponent = math.log(many.unique / group["unique"]) / math.log(many.text_mb * 1e6 / group["bytes"])
    shards = read_manifests(many.root, "encode-group")
    (counts,) = read_manifests(many.root, "count")
    return {
        "count_seconds_per_mb": slope("count-group", extra_mb),
        "encode_seconds_per_mb": slope("encode-group", extra_mb),
        "sum_seconds_per_mb": slope("count", many.counts_mb - few.counts_mb),
        "merge_seconds_per_pretoken": slope("merge", many.unique - few.unique),
        "pretokens_of_first_mb": many.unique / many.text_mb**exponent,
        "heaps_exponent": exponent,
        "bytes_per_pretoken": len(counts_to_arrays(read_counts(table))[0]) / many.unique,
        "file_bytes_per_pretoken": file_bytes(counts, "counts.parquet") / many.unique,
        "shard_bytes_per_byte": sum(file_bytes(shard, "tokens.bin") for shard in shards) / len(text),
        "bytes_per_document": len(text) / sum(shard["figures"]["documents"] for shard in shards),
    }


def measure_reading(folder: Path, megabytes: int) -> dict[str, float]:
    """Return the CPU seconds for each MB of the three steps of the driver that read all text, without their stages."""
    from lm.text.chunks import cut_chunks
    from lm.text.config import DataConfig
    from lm.text.ingest import ingest_sources
    from lm.text.sources import hash_source

    corpus, out = folder / "reading.txt", folder / "reading"
    corpus.write_bytes(mixed_text(megabytes * 1_000_000))
    out.mkdir()
    source, data = hash_source(str(corpus)), DataConfig(train=[str(corpus)], valid_fraction=0.001)
    calls: dict[str, Callable[[], Any]] = {
        "hash_seconds_per_mb": lambda: hash_source(str(corpus)),
        "ingest_seconds_per_mb": lambda: ingest_sources([source], [], data, out),
        "chunk_seconds_per_mb": lambda: list(cut_chunks([str(corpus)], [data.separator], 1_000_000)),
    }
    seconds = {}
    for name, call in calls.items():
        started = time.process_time()
        call()
        seconds[name] = (time.process_time() - started) / (source.bytes / 1e6)
    return seconds


def measure_lists(sizes: Sizes, folder: Path) -> dict[str, float]:
    """Measure long lists: of chunks in the stage chunk, of sources in each group, of documents in the index."""
    from lm.text.chunks import Range
    from lm.text.config import DataConfig
    from tasks.ingest import find_sources, ingest
    from tasks.pages.plots import QUARTER_OCTAVES
    from tasks.pages.stages import chunk as chunk_page
    from tasks.runtime.chunk_input import text_urls, write_groups
    from tasks.runtime.context import RunContext
    from tasks.runtime.output import read_output

    directory = folder / "lists"
    directory.mkdir()
    chunks = ([Range(0, start, start + 1, False, "0" * 64)] for start in range(sizes.listed))
    started = time.process_time()
    figures = {split: {"chunks": number} for split, number in write_groups(directory, {"train": chunks}).items()}
    out: Any = SimpleNamespace(directory=directory, figures=figures)
    list(chunk_page(out))
    chunk_seconds = time.process_time() - started
    tracemalloc.start()
    list(chunk_page(out))
    chunk_memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    for number in range(sizes.sources):
        (directory / f"{number}.txt").write_text(f"text {number}<|endoftext|>" * 2)
    run = RunContext(str(folder / "sources-root"), "scale")
    data = DataConfig(train=[str(directory / "*.txt")])
    texts = DirectCaller(run).call(ingest, *find_sources(data, run.store), data)
    started = time.process_time()
    for _ in range(5):
        text_urls(read_output(run.store, texts), "train")
    source_seconds = (time.process_time() - started) / 5
    manifest_bytes = len(run.store.read_bytes(*texts, "manifest.json") or b"")

    ends = np.arange(1_000_000) * 500
    started = time.process_time()
    np.histogram(np.diff(ends, prepend=0), QUARTER_OCTAVES)
    return {
        "chunk_seconds_per_chunk": chunk_seconds / sizes.listed,
        "driver_bytes_per_chunk": chunk_memory / sizes.listed,
        "manifest_seconds_per_source": source_seconds / sizes.sources,
        "manifest_bytes_per_source": manifest_bytes / sizes.sources,
        "index_seconds_per_document": (time.process_time() - started) / len(ends),
    }


def run_on_store(site: Site, name: str, text: bytes, groups: int, delay: float, threads: int) -> dict[str, Any]:
    """Run with about ``groups`` groups of one chunk, in a quarter as many sources, on the object store.

    ``delay`` of each request is in seconds.
    """
    sources = site.put_sources(f"text-{name}", text, max(1, groups // 4))
    site.store.delay_seconds = delay
    try:
        result = site.run(f"s3://{_BUCKET}/{name}", sources, len(text) * 7 // (8 * groups), threads)
    finally:
        site.store.delay_seconds = 0.0
    return result | {"sources": len(sources)}


def measure_requests(site: Site, sizes: Sizes) -> dict[str, StepCost]:
    """Return the requests and CPU seconds of each step on an object store, from a run with few groups and one with
    more."""
    few, many = (
        run_on_store(site, f"groups-{count}", small_text(count * _GROUP_BYTES), count, 0.0, 1) for count in sizes.groups
    )
    costs: dict[str, StepCost] = {}
    for name, step in many["steps"].items():
        of_sources, mapped = name in ("sources", "ingest", "chunk"), name.removesuffix(" look-up")
        items = [run["sources"] if of_sources else run["items"].get(mapped, 0) for run in (few, many)]
        costs[name] = fit(items, few["steps"].get(name, dict.fromkeys(step, 0.0)), step)
        print(f"{name:20} {step['requests']:5.0f} requests for {items[1]:3} items: {describe(costs[name])}", flush=True)
    return costs


def fit(items: Sequence[int], few: dict[str, float], many: dict[str, float]) -> StepCost:
    """Return the cost of a step from two runs, with another number of items."""
    extra = items[1] - items[0]
    if not extra:
        return StepCost(many["requests"], 0.0, many["cpu"], 0.0)
    requests, seconds = (max(0.0, (many[kind] - few[kind]) / extra) for kind in ("requests", "cpu"))
    fixed = [max(0.0, many[kind] - each * items[1]) for kind, each in (("requests", requests), ("cpu", seconds))]
    return StepCost(fixed[0], requests, fixed[1], seconds)


def describe(cost: StepCost) -> str:
    return f"{cost.fixed_requests:.1f} + {cost.requests:.2f} an item, CPU {1000 * cost.seconds:.1f} ms an item"


def measure_dask(site: Site, groups: int) -> list[dict[str, Any]]:
    """Run on one and on two Dask workers of this machine, with a directory as root."""
    if not groups or find_spec("prefect_dask") is None:
        print("Dask is skipped: " + ("no groups" if find_spec("prefect_dask") else "prefect-dask is not installed"))
        return []
    results: list[dict[str, Any]] = []
    corpus = site.folder / "dask.txt"
    corpus.write_bytes(small_text(groups * _GROUP_BYTES))
    for workers in (1, 2):
        root = str(site.folder / f"dask-{workers}")
        result = site.run(root, [str(corpus)], _GROUP_BYTES * 7 // 8, workers, "--execution.runner", "dask")
        made = [manifest["made"] for manifest in read_manifests(Path(root), "encode-group")]
        first, last = min(part["started"] for part in made), max(part["started"] + part["seconds"] for part in made)
        print(
            f"Dask, {workers} workers: wall {result['wall']:.1f} s, with start of the cluster; encode "
            f"{1000 * (last - first) / len(made):.0f} ms a group ({len(made)} groups), driver "
            f"{result['driver_mb']:.0f} MB",
            flush=True,
        )
        results.append(result | {"workers": workers})
    return results


def check_model(site: Site, costs: Costs, sizes: Sizes) -> list[dict[str, Any]]:
    """Predict runs with delays, which are not among the measured costs, and run them."""
    small, large = small_text(sizes.checked_groups * _GROUP_BYTES), mixed_text(sizes.work_mb * 1_000_000)
    cases = [(small, sizes.checked_groups, delay, threads) for delay, threads in sizes.checks]
    results: list[dict[str, Any]] = []
    for text, groups, delay, threads in (*cases, (large, _WORK_GROUPS, 0.1, 2))[: sizes.max_checks]:
        run = run_on_store(site, f"check-{len(results)}", text, groups, delay, threads)
        count, valid = run["items"]["count-group"], run["items"]["encode-group"] - run["items"]["count-group"]
        valid_bytes = len(text) * valid / (count + valid)
        train_bytes = len(text) - valid_bytes
        corpus = Corpus(train_bytes, train_bytes / count, train_bytes / run["sources"], valid_bytes)
        busy = site.store.seconds_per_request
        predicted = predict(costs, corpus, Cluster(1, threads, delay + busy, math.inf, math.inf, 1 / busy))
        measured = {name: {"seconds": 0.0, "requests": 0.0} for name in predicted.seconds}
        for name, step in run["steps"].items():
            for kind in ("seconds", "requests"):
                measured[stage_of(name)][kind] += step[kind]
        print(
            f"{count} + {valid} groups of {corpus.chunk_bytes / 1e6:.3f} MB, {1000 * delay:.0f} ms, {threads} threads:"
        )
        rows: list[dict[str, Any]] = [
            {
                "stage": name,
                **values,
                "model_seconds": predicted.seconds[name],
                "model_requests": predicted.requests[name],
            }
            for name, values in measured.items()
        ]
        rows.append({"stage": "total"} | {kind: sum(row[kind] for row in rows) for kind in rows[0] if kind != "stage"})
        for row in rows:
            row["ratio"] = row["model_seconds"] / row["seconds"]
            print(
                f"  {row['stage']:7} predicted {row['model_seconds']:6.1f} s, measured {row['seconds']:6.1f} s, "
                f"ratio {row['ratio']:.2f}; requests {row['model_requests']:5.0f} and {row['requests']:5.0f}",
                flush=True,
            )
        results.append({"groups": count + valid, "delay_seconds": delay, "threads": threads, "stages": rows})
    return results


def stage_of(step: str) -> str:
    """Return the stage of the model that a measured step belongs to."""
    if step == "encode":
        return "index"
    return "ingest" if step == "sources" else step.partition(" ")[0].partition("-")[0]


def predict_all(costs: Costs) -> list[dict[str, Any]]:
    """Print and return the predictions for large texts."""
    results: list[dict[str, Any]] = []
    for name, corpus in CORPORA.items():
        for workers in WORKERS:
            for latency in LATENCIES_SECONDS:
                for threads in (1, CORES_PER_WORKER) if workers == max(WORKERS) else (1,):
                    rates = WORKER_BYTES_PER_SECOND, BUCKET_BYTES_PER_SECOND, BUCKET_REQUESTS_PER_SECOND
                    cluster = Cluster(workers, CORES_PER_WORKER, latency, *rates, threads)
                    prediction = predict(costs, corpus, cluster)
                    results.append({"corpus": name, **asdict(cluster), **asdict(prediction)})
                    print(describe_prediction(name, cluster, prediction), flush=True)
    return results


def describe_prediction(name: str, cluster: Cluster, prediction: Prediction) -> str:
    """Return a line of the table of predictions."""
    hours = "  ".join(f"{stage} {seconds / 3600:.2f}" for stage, seconds in prediction.seconds.items())
    return "; ".join(
        (
            f"{name}, {cluster.workers} workers, {1000 * cluster.latency_seconds:.0f} ms",
            f"{cluster.threads_per_task} threads a task",
            f"{prediction.total_seconds / 3600:.1f} h ({hours})",
            f"{prediction.groups:,} groups",
            f"{sum(prediction.requests.values()) / 1e6:.2f} M requests",
            f"{prediction.busy_cores:,} busy cores",
            f"driver {prediction.driver_mb / 1e3:.1f} GB",
            f"merge {prediction.merge_mb / 1e3:.1f} GB for {prediction.pretokens / 1e6:,.0f} M pretokens",
            f"{prediction.rows:,.0f} rows",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="try the program: texts too small to measure speed")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--counter", default="", help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.record:
        sys.exit(run_measured(options.record, options.counter, arguments))
    if arguments:
        parser.error(f"unknown: {' '.join(arguments)}")
    missing = [name for name in ("moto", "s3fs") if find_spec(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} is missing: pip install 'textmill[peers]'")
    sizes = _QUICK if options.quick else Sizes()
    with tempfile.TemporaryDirectory() as name, open_site(Path(name)) as site:
        by_chunks = measure_chunks(site, sizes.chunks)
        by_workers = measure_dask(site, sizes.dask_groups)
        steps = measure_requests(site, sizes)
        few, many = by_chunks[0], by_chunks[-1]
        tasks = sum(min(256, many["items"][name]) for name in ("count-group", "encode-group"))
        costs = Costs(
            steps=steps,
            **measure_work(site, sizes.work_mb),
            **measure_reading(site.folder, sizes.work_mb),
            **measure_lists(sizes, site.folder),
            driver_base_mb=few["driver_mb"],
            driver_kb_per_group=max(
                0.0, 1e3 * (many["driver_mb"] - few["driver_mb"]) / (many["groups"] - few["groups"])
            ),
            rows_per_run=0.0,
            rows_per_task_run=(many["rows"] - many["log_rows"]) / tasks,
            rows_per_group=many["log_rows"] / many["groups"],
        )
        print(json.dumps({name: value for name, value in asdict(costs).items() if name != "steps"}, indent=1))
        checks = check_model(site, costs, sizes)
    predictions = predict_all(costs)
    result = {"chunks": by_chunks, "workers": by_workers, "costs": asdict(costs), "checks": checks}
    print(json.dumps({**result, "predictions": predictions}))


if __name__ == "__main__":
    main()
