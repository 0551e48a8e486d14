"""Run stages as Prefect tasks."""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from prefect.futures import PrefectFuture, as_completed

from tasks.runtime.chunk_input import read_groups
from tasks.runtime.context import RunContext
from tasks.runtime.output import Ref
from tasks.runtime.progress import show_progress
from tasks.runtime.stage import Stage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefectExecutor:
    """Runs each stage as a Prefect task, and groups of chunks in parallel."""

    run: RunContext

    def call(self, stage: Stage, *arguments: Any) -> Ref:
        """Run a stage, or return its cached output. Raise the stage's exception if it fails."""
        state: Any = stage.task(*arguments, run=self.run, return_state=True)
        return Ref(**state.result())

    def map(self, stage: Stage, texts: Ref, chunks: Ref, split: str, *arguments: Any) -> list[Ref]:
        """Run a stage for every group of chunks that is not cached, ``execution.workers`` groups at a time.

        Raise the first failure immediately. A cached group needs no task run.
        """
        groups = read_groups(self.run.store, texts, chunks, split)
        outputs = stage.look_up(self.run, [stage.bind(group, *arguments) for group in groups])
        pending = deque(group for group, (_, is_cached) in zip(groups, outputs, strict=True) if not is_cached)
        title = f"{stage.name.removesuffix('-group')}-{split}"
        log.info("%s: %s of %s groups of chunks are cached.", title, len(groups) - len(pending), len(groups))
        total_chunks = sum(group.chunks for group in groups)
        done_chunks = total_chunks - sum(group.chunks for group in pending)
        running: dict[PrefectFuture[Any], int] = {}
        with show_progress(title, total_chunks, "chunk", self.run.label) as progress:
            progress(done_chunks)
            while pending or running:
                while pending and len(running) < self.run.execution.workers:
                    group = pending.popleft()
                    running[stage.task.submit(group, *arguments, run=self.run)] = group.chunks
                future = next(as_completed(list(running)))
                future.result()
                done_chunks += running.pop(future)
                progress(done_chunks)
        return [ref for ref, _ in outputs]
