"""A model of the pipeline on a cluster: predicts time, requests, memory and rows from measured costs.

:func:`predict` adds up the steps of :mod:`flows.pipeline`. A step of the driver waits for its requests one after the
other, or 16 at a time. A mapped step is simulated: task runs start in order on the first free thread. Nothing is
measured here: the other modules of this folder measure the costs and compare the model with real runs.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.scale.costs import MB, Costs, StepCost
from flows.clusters import _MAX_TASK_RUNS, max_task_runs_on_cluster
from flows.pipeline import _COUNTS_PER_SUM
from lm.files.compression import BLOCK_BYTES
from lm.text.ingest import _MAX_GROUP_BYTES as _MAX_SOURCE_GROUP_BYTES
from lm.text.ingest import _MAX_GROUP_SOURCES
from lm.text.sources import _RANGE_BLOCK_BYTES
from lm.tokenizer.bpe import training_memory_bytes
from lm.tokenizer.pretoken_counts import NUM_PARTITIONS
from tasks.runtime.inputs import _MAX_GROUP_BYTES, _MIN_GROUPS
from tasks.runtime.store import _MAX_CONCURRENT_REQUESTS

STAGES = ("ingest", "chunk", "count", "merge", "encode", "index")
_Item = TypeVar("_Item")
# A read of a range fetches the block that was asked for and a block ahead.
RANGE_REQUEST_BYTES = _RANGE_BLOCK_BYTES + BLOCK_BYTES
STREAM_REQUEST_BYTES = (50 << 20) + BLOCK_BYTES  # s3fs, with its own block size
UPLOAD_PART_BYTES = 50 << 20  # s3fs
_COUNT_TABLE_COPIES = 3  # of a partition in memory while it is summed and sorted


@dataclass(frozen=True)
class Corpus:
    """A text in equal chunks and equal sources. Sizes in bytes."""

    text_bytes: float
    chunk_bytes: float
    source_bytes: float
    valid_bytes: float = 16 << 20
    """Validation text in addition; by default as much as ``data.valid_max_bytes`` allows."""
    max_group_sources: int = _MAX_GROUP_SOURCES

    @property
    def sources(self) -> int:
        return max(1, round(self.text_bytes / self.source_bytes))

    @property
    def source_groups(self) -> list[float]:
        """Bytes of each group of sources, as :func:`lm.text.ingest.group_sources` makes them."""
        sources = max(1, min(self.max_group_sources, int(_MAX_SOURCE_GROUP_BYTES / self.source_bytes)))
        count = math.ceil(self.sources / sources)
        return [self.text_bytes / count] * count

    def groups(self, texts: Sequence[float]) -> list[float]:
        """Return the bytes of each group of chunks of texts, as :mod:`tasks.runtime.inputs` makes them."""
        groups, before = [], 0.0
        for text in texts:
            chunks = max(1, round(text / self.chunk_bytes))
            chunk = text / chunks
            while chunks:
                wanted = min(_MAX_GROUP_BYTES, before / _MIN_GROUPS)
                size = min(chunks, max(1, math.ceil(wanted / chunk)))
                groups.append(size * chunk)
                before += size * chunk
                chunks -= size
        return groups


@dataclass(frozen=True)
class Cluster:
    """Machines and an object store. The driver is a process of its own and reads at the speed of a worker."""

    workers: int
    cores: int
    """Of a worker; as many threads."""
    latency_seconds: float
    """Of a request, until its first byte."""
    worker_bytes_per_second: float
    bucket_bytes_per_second: float
    bucket_requests_per_second: float
    threads_per_task: int = 1
    """Threads of a task run. A worker runs ``cores / threads_per_task`` task runs at once."""

    @property
    def slots(self) -> int:
        """Task runs at once."""
        return self.workers * max(1, self.cores // self.threads_per_task)


@dataclass(frozen=True)
class Prediction:
    """Seconds and requests of each stage; memory in MB (10^6 bytes)."""

    seconds: dict[str, float]
    requests: dict[str, float]
    driver_mb: float
    """Without the stage merge."""
    merge_mb: float
    """Memory of the stage merge, in the driver."""
    pretokens: float
    """Different pretokens, for merge."""
    rows: float
    task_runs: int
    groups: int
    busy_cores: int
    """Most cores that count and encode can keep busy."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def schedule(durations: Iterable[float], slots: int) -> float:
    """Return when the last of some tasks ends. Each starts in its order on the first free slot."""
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def bundle(items: Sequence[_Item], slots: int) -> list[Sequence[_Item]]:
    """Divide consecutive items among the task runs of a stage, as :class:`flows.executor.PrefectExecutor` does."""
    size = -(-len(items) // max_task_runs_on_cluster(2 * slots)) or 1
    return [items[start : start + size] for start in range(0, len(items), size)]


def predict(costs: Costs, corpus: Corpus, cluster: Cluster) -> Prediction:
    """Predict the first run of the pipeline up to ``encode``, with an empty root."""
    model = _Model(costs, corpus, cluster)
    for name in STAGES:
        model.seconds[name] = model.requests[name] = 0.0
    model.read_sources()
    model.count()
    model.merge()
    model.encode()
    return model.result()


class _Model:
    """Adds the steps of a run to the seconds and requests of their stages."""

    def __init__(self, costs: Costs, corpus: Corpus, cluster: Cluster) -> None:
        self.costs, self.corpus, self.cluster = costs, corpus, cluster
        self.groups, self.valid_groups = corpus.groups(corpus.source_groups), corpus.groups([corpus.valid_bytes])
        self.seconds: dict[str, float] = {}
        self.requests: dict[str, float] = {}
        self.task_runs = 0

    def _driver_step(
        self, stage: str, step: str, items: float, concurrency: int = 1, cpu: float = 0.0, reads: float = 0.0
    ) -> None:
        """Add a step of the driver. ``concurrency`` requests of its items are under way together; ``cpu`` seconds and
        ``reads`` bytes come in addition. Python's lock makes the CPU seconds of all items serial."""
        cost, cluster = self.costs.steps.get(step, StepCost()), self.cluster
        waiting = math.ceil(items / concurrency) * cost.requests * cluster.latency_seconds
        waiting = max(waiting, items * cost.requests / cluster.bucket_requests_per_second)
        working = items * cost.seconds
        self.seconds[stage] += cost.fixed_requests * cluster.latency_seconds + cost.fixed_seconds + cpu
        self.seconds[stage] += max(waiting, working) if concurrency > 1 else waiting + working
        self.seconds[stage] += reads / cluster.worker_bytes_per_second
        self.requests[stage] += cost.total_requests(items)

    def read_sources(self) -> None:
        """Hash the sources in the driver, then ingest groups of sources and cut them into chunks."""
        costs, corpus, cluster = self.costs, self.corpus, self.cluster
        threads = min(cluster.cores, _MAX_CONCURRENT_REQUESTS)
        cpu = corpus.text_bytes / MB * costs.hash_seconds_per_mb / threads
        self._driver_step("ingest", "sources", corpus.sources, threads, cpu, corpus.text_bytes)
        blocks = corpus.text_bytes / STREAM_REQUEST_BYTES
        self.requests["ingest"] += blocks
        self.seconds["ingest"] += blocks * cluster.latency_seconds / threads
        chunk_seconds_per_mb = costs.chunk_seconds_per_mb + costs.chunk_seconds_per_chunk * MB / corpus.chunk_bytes
        for stage, groups, seconds_per_mb, request_bytes in (
            ("ingest", corpus.source_groups, costs.ingest_seconds_per_mb, STREAM_REQUEST_BYTES),
            ("chunk", [*corpus.source_groups, corpus.valid_bytes], chunk_seconds_per_mb, RANGE_REQUEST_BYTES),
        ):
            self._map_groups(stage, f"{stage}-group", groups, seconds_per_mb, 0.0, request_bytes)
            self._fixed(stage, f"{stage}-group")
            self._driver_step(stage, stage, len(groups), _MAX_CONCURRENT_REQUESTS)

    def _map(
        self,
        stage: str,
        cpu: Sequence[float],
        python_seconds: float,
        moved_bytes: Sequence[float],
        requests: Sequence[float],
    ) -> None:
        """Add a mapped step: the CPU seconds, bytes and requests in series of each item.

        ``python_seconds`` of an item hold Python's lock: in each worker, one thread at a time.
        """
        cluster = self.cluster
        bundles = bundle(range(len(cpu)), cluster.slots)
        self.task_runs += len(bundles)
        threads = min(cluster.threads_per_task, len(bundles[0]))
        most_bytes_per_second = min(cluster.workers * cluster.worker_bytes_per_second, cluster.bucket_bytes_per_second)
        durations = [
            seconds + count * cluster.latency_seconds + size / cluster.worker_bytes_per_second
            for seconds, count, size in zip(cpu, requests, moved_bytes, strict=True)
        ]
        tasks = (schedule((durations[index] for index in indices), threads) for indices in bundles)
        self.seconds[stage] += max(
            schedule(tasks, cluster.slots),
            len(cpu) * python_seconds / cluster.workers,
            sum(moved_bytes) / most_bytes_per_second,
            sum(requests) / cluster.bucket_requests_per_second,
        )
        self.requests[stage] += sum(requests)

    def _map_groups(
        self,
        stage: str,
        step: str,
        groups: Sequence[float],
        seconds_per_mb: float,
        written: float = 0.0,
        request_bytes: int = RANGE_REQUEST_BYTES,
    ) -> None:
        """Add a mapped step over groups. It writes ``written`` bytes for each byte of text."""
        cost = self.costs.steps.get(step, StepCost())
        self._driver_step(stage, f"{step} look-up", len(groups), _MAX_CONCURRENT_REQUESTS)
        self._map(
            stage,
            [cost.seconds + size / MB * seconds_per_mb for size in groups],
            cost.seconds,
            [size * (1 + written) for size in groups],
            [cost.requests + size // request_bytes + size * written // UPLOAD_PART_BYTES for size in groups],
        )

    def _fixed(self, stage: str, step: str) -> None:
        """Add the part of a mapped step that does not depend on its items. The driver does it."""
        cost = self.costs.steps.get(step, StepCost())
        self.requests[stage] += cost.fixed_requests
        self.seconds[stage] += cost.fixed_requests * self.cluster.latency_seconds + cost.fixed_seconds

    def count(self) -> None:
        """Count each group, add up the counts 32 files at a time, and the last files in the driver."""
        costs, cost = self.costs, self.costs.steps.get("count-sum", StepCost())
        self._map_groups("count", "count-group", self.groups, costs.count_seconds_per_mb)
        self._fixed("count", "count-group")
        parts = self.groups
        while len(parts) > _COUNTS_PER_SUM:
            self._driver_step("count", "count-sum look-up", len(parts), _MAX_CONCURRENT_REQUESTS)
            batches = [parts[start : start + _COUNTS_PER_SUM] for start in range(0, len(parts), _COUNTS_PER_SUM)]
            read = [sum(map(costs.counts_bytes, batch)) for batch in batches]
            written = [costs.counts_bytes(sum(batch)) for batch in batches]
            waits = [len(batch) * cost.requests / _MAX_CONCURRENT_REQUESTS for batch in batches]
            self._map(
                "count",
                [
                    len(batch) * cost.seconds + size / MB * costs.sum_seconds_per_mb
                    for batch, size in zip(batches, read, strict=True)
                ],
                _COUNTS_PER_SUM * cost.seconds,
                [sum(sizes) for sizes in zip(read, written, strict=True)],
                waits,
            )
            self.requests["count"] += len(parts) * cost.requests - sum(waits)
            parts = [sum(batch) for batch in batches]
        self.last_counts_bytes = sum(map(costs.counts_bytes, parts))
        cpu = self.last_counts_bytes / MB * costs.sum_seconds_per_mb
        moved = self.last_counts_bytes + costs.counts_bytes(self.corpus.text_bytes)
        self._driver_step("count", "count", len(parts), _MAX_CONCURRENT_REQUESTS, cpu, moved)

    def merge(self) -> None:
        """Learn the merges in the driver."""
        self.pretokens = self.costs.pretokens(self.corpus.text_bytes)
        cpu = self.pretokens * self.costs.merge_seconds_per_pretoken
        self._driver_step("merge", "merge", 0, cpu=cpu)

    def encode(self) -> None:
        """Encode each group, then read the size and the documents of each shard in the driver."""
        costs, text = self.costs, self.corpus.text_bytes
        for groups in (self.groups, self.valid_groups):
            self._map_groups("encode", "encode-group", groups, costs.encode_seconds_per_mb, costs.shard_bytes_per_byte)
        self._fixed("encode", "encode-group")
        documents = text / costs.bytes_per_document
        cpu, reads = documents * costs.index_seconds_per_document, 8 * documents
        self._driver_step(
            "index", "encode", len(self.groups) + len(self.valid_groups), _MAX_CONCURRENT_REQUESTS, cpu, reads
        )

    def result(self) -> Prediction:
        """Return the sums, with memory and rows."""
        costs, count = self.costs, len(self.groups)
        table_bytes = self.last_counts_bytes / costs.file_bytes_per_pretoken * (costs.bytes_per_pretoken + 12)
        driver_mb = costs.driver_base_mb + max(
            count * costs.driver_kb_per_group * 1e3 / MB,
            table_bytes / NUM_PARTITIONS * _COUNT_TABLE_COPIES / MB,
        )
        merge_bytes = training_memory_bytes(int(self.pretokens), int(self.pretokens * costs.bytes_per_pretoken))
        threads = min(self.cluster.threads_per_task, len(bundle(range(count), self.cluster.slots)[0]))
        return Prediction(
            seconds=self.seconds,
            requests=self.requests,
            driver_mb=driver_mb,
            merge_mb=costs.driver_base_mb + merge_bytes / MB,
            pretokens=self.pretokens,
            rows=costs.rows_per_run + self.task_runs * costs.rows_per_task_run + 2 * count * costs.rows_per_group,
            task_runs=self.task_runs,
            groups=count,
            busy_cores=min(self.cluster.slots, min(count, _MAX_TASK_RUNS)) * threads,
        )
