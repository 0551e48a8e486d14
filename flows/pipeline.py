"""The pipeline: from raw text to sampled text, a chain of cached stages."""

import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from prefect import flow
from prefect.futures import as_completed
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows.config import PipelineConfig
from tasks.chunk import chunk
from tasks.count import count, count_chunk
from tasks.encode import encode, encode_chunk
from tasks.ingest import find_sources, ingest
from tasks.merge import merge
from tasks.progress import progress_bar
from tasks.sample import sample
from tasks.stage import Ref, Run, Stage, read_output
from tasks.texts import read_chunks
from tasks.train import train

log = logging.getLogger(__name__)

StageName = Literal["ingest", "chunk", "count", "merge", "encode", "train", "sample"]


class Caller(Protocol):
    """How the chain's stages are called: run by Prefect, or only looked at by ``textmill plan``."""

    @property
    def run(self) -> Run:
        """What every stage is told."""

    def call(self, stage: Stage, *arguments: Any) -> Ref:
        """The output of one stage."""

    def map(self, stage: Stage, texts: Ref, chunks: Ref, split: str, *arguments: Any) -> list[Ref]:
        """The output of one stage for each chunk of a split."""


def chain(config: PipelineConfig, caller: Caller) -> Iterator[tuple[StageName, Ref]]:
    """The stages in their order, each yielded once it is done."""
    call, map_ = caller.call, caller.map
    specials, pattern, separator = config.tokenizer.special_tokens, config.tokenizer.pattern, config.data.separator

    found = [find_sources(patterns, caller.run.store) for patterns in (config.data.train, config.data.valid)]
    texts = call(ingest, *found, config.data)
    yield "ingest", texts
    chunks = call(chunk, texts, specials, pattern, config.chunk)
    yield "chunk", chunks
    counts = call(count, map_(count_chunk, texts, chunks, "train", specials, pattern))
    yield "count", counts
    tokenizer = call(merge, counts, config.tokenizer)
    yield "merge", tokenizer
    train_shards = map_(encode_chunk, texts, chunks, "train", tokenizer, separator)
    valid_shards = map_(encode_chunk, texts, chunks, "valid", tokenizer, separator)
    index = call(encode, train_shards, valid_shards, tokenizer, separator)
    yield "encode", index
    model = call(train, index, train_shards, valid_shards, tokenizer, config.model, config.train)
    yield "train", model
    yield "sample", call(sample, model, tokenizer, config.sample)


@dataclass(frozen=True)
class PrefectCaller:
    """Runs the stages as Prefect tasks, the chunks in parallel."""

    run: Run

    def call(self, stage: Stage, *arguments: Any) -> Ref:
        """Run a stage, or take its cached output; its exception passes on."""
        return Ref(**stage.task(*arguments, run=self.run))

    def map(self, stage: Stage, texts: Ref, chunks: Ref, split: str, *arguments: Any) -> list[Ref]:
        """Run a stage for each chunk, as many at a time as the task runner allows."""
        items = read_chunks(self.run.store, texts, chunks, split)
        futures = [stage.task.submit(item, *arguments, run=self.run) for item in items]
        with progress_bar(f"{stage.name} {split}", len(items), "chunk") as progress:
            for done, _ in enumerate(as_completed(futures), start=1):
                progress(done)
        return [Ref(**future.result()) for future in futures]


DEFAULTS = PipelineConfig()


def task_runner(workers: int) -> Any:
    """Threads: a task costs milliseconds, and no text is pickled. Pure Python stages still take turns on one core."""
    return ThreadPoolTaskRunner(max_workers=workers)


@flow(name="pipeline", task_runner=task_runner(DEFAULTS.execution.workers))
def pipeline(
    config: PipelineConfig = DEFAULTS,
    root: str = "artifacts",
    until: StageName | None = None,
    refresh: tuple[StageName, ...] = (),
) -> dict[str, Any]:
    """Run the chain up to ``until``, every stage from the cache where nothing that decides it has changed.

    Args:
        config: What to make, and how.
        root: Directory or fsspec URL that all outputs are below.
        until: Last stage to run; default: all of them.
        refresh: Stages to make anew whatever is cached.
    """
    started = datetime.now(UTC)
    name = f"{started:%Y%m%d-%H%M%S}-{flow_run.name or uuid.uuid4().hex[:8]}"
    run = Run(absolute(root), name, frozenset(refresh), config.execution)
    record: dict[str, Any] = {"name": name, "at": started.isoformat(timespec="seconds"), "root": run.root}
    record |= {"config": asdict(config), "until": until, "refresh": list(refresh), "stages": {}}
    clock = time.perf_counter()
    for stage_name, ref in chain(config, PrefectCaller(run)):
        output = read_output(run.store, ref)
        state = "made" if output.manifest["made"]["run"] == name else "cached"
        log.info("%s is %s.", stage_name, state)
        now = time.perf_counter()
        record["stages"][stage_name] = {"key": ref.key, "state": state, "seconds": round(now - clock, 3)}
        clock = now
        run.store.write_json(record, "runs", f"{name}.json")  # after each, so that a later failure leaves it known
        if stage_name == until:
            break
    run.store.write_json(record, "runs", "latest.json")
    return record


def absolute(root: str) -> str:
    """A root that means the same in every process: a local path made absolute, a URL as it is."""
    return root if "://" in root else str(Path(root).expanduser().resolve())
