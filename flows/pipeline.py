"""The pipeline: from raw text to sampled text, a chain of cached stages."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BeforeValidator

from flows.config import PipelineConfig, fill_in, load_preset
from flows.report import show_page, show_report
from flows.runs import keep_alive, name_run, record_logs, tag_run
from flows.stop import take_back
from lm.corpus import Source
from lm.device import choose_device
from lm.errors import UserError
from tasks.chunk import chunk
from tasks.count import count, count_chunk
from tasks.encode import encode, encode_chunk
from tasks.ingest import find_sources, ingest
from tasks.lock import in_use
from tasks.merge import merge
from tasks.output import Ref, read_output
from tasks.progress import show_progress
from tasks.sample import sample
from tasks.stage import Run, Stage
from tasks.texts import read_chunks
from tasks.train import train

log = logging.getLogger(__name__)

StageName = Literal["ingest", "chunk", "count", "merge", "encode", "train", "sample"]


def chain(
    config: PipelineConfig,
    sources: tuple[list[Source], list[Source]],
    call: Callable[..., Ref],
    map_: Callable[..., list[Ref]],
) -> Iterator[tuple[StageName, Ref]]:
    """The stages in their order, each yielded once it is done; from the sources for training and for validation.

    ``call(stage, *arguments)`` gives the output of a stage, ``map_(stage, texts, chunks, split, *arguments)`` those for
    each chunk of a split: made by Prefect, or only looked up by ``textmill plan``.
    """
    specials, pattern, separator = config.tokenizer.special_tokens, config.tokenizer.pattern, config.data.separator

    texts = call(ingest, *sources, config.data)
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
        """Run a stage for each chunk, as many at a time as there are workers; the first failure passes on at once."""
        items = deque(read_chunks(self.run.store, texts, chunks, split))
        futures: list[PrefectFuture[dict[str, str]]] = []
        running: list[PrefectFuture[dict[str, str]]] = []
        with show_progress(f"{stage.name.removesuffix('-chunk')}-{split}", len(items), "chunk") as progress:
            while items or running:
                while items and len(running) < self.run.execution.workers:
                    futures.append(stage.task.submit(items.popleft(), *arguments, run=self.run))
                    running.append(futures[-1])
                finished = next(as_completed(running))
                finished.result()
                running.remove(finished)
                progress(len(futures) - len(running))
        return [Ref(**future.result()) for future in futures]


DEFAULTS = load_preset("demo")


# A task costs milliseconds, and no text is pickled. The caller keeps to the workers that are configured.
_THREADS: Any = ThreadPoolTaskRunner(max_workers=256)


@flow(name="pipeline", flow_run_name=name_run, task_runner=_THREADS)
def pipeline(
    config: Annotated[PipelineConfig, BeforeValidator(fill_in)] = DEFAULTS,
    root: str = "artifacts",
    until: StageName | None = None,
    refresh: tuple[StageName, ...] = (),
) -> dict[str, Any]:
    """From raw text to sampled text, every stage taken from the cache where nothing that decides it has changed.

    Args:
        config: What to make, and how.
        root: Directory or fsspec URL that all outputs are below.
        until: Last stage to run; default: all of them.
        refresh: Stages to make anew whatever is cached.
    """
    take_back()
    record_logs()
    keep_alive(flow_run.id, flow_run.run_count)
    tag_run("textmill", until or "full")
    if get_current_settings().api.url:  # else the server ends with the run
        log.info("Run %s: %s", flow_run.name, flow_run.ui_url)
    if until in (None, "train", "sample"):
        choose_device(config.execution.device)  # a device that is not there is better known now than after hours
    run = Run(absolute(root), flow_run.name, frozenset(refresh), config.execution)
    record: dict[str, Any] = {"name": run.name, "at": datetime.now(UTC).isoformat(timespec="seconds"), "root": run.root}
    record |= {"config": asdict(config), "until": until, "refresh": list(refresh), "stages": {}}
    caller, clock = PrefectCaller(run), time.perf_counter()
    with in_use(run.store):
        try:
            for stage_name, ref in chain(config, find_sources(config.data, run.store), caller.call, caller.map):
                output = read_output(run.store, ref)
                state = "made" if output.manifest["made"]["run"] == run.name else "cached"
                now = time.perf_counter()
                if state == "made":
                    log.info("%s is made, in %.1f s.", stage_name, now - clock)
                record["stages"][stage_name] = {"key": ref.key, "state": state, "seconds": round(now - clock, 3)}
                clock = now
                # After each, so that a later failure leaves it known.
                run.store.write_json(record, "runs", f"{run.name}.json")
                show_page(stage_name, output)
                if stage_name == until:
                    break
        except BaseException as error:
            run.stopping.set()  # chunks that still run in threads
            if isinstance(error, UserError):
                with suppress(UserError):  # the root may be what cannot be written
                    show_report(run, record, str(error))
            raise
        show_report(run, record)
        run.store.write_json(record, "runs", "latest.json")
    return record


def absolute(root: str) -> str:
    """A root that means the same in every process: a local path made absolute, a URL as it is."""
    return root if "://" in root else str(Path(root).expanduser().resolve())
