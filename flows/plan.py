"""What a run would do, and why, without running it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.config import PipelineConfig
from flows.pipeline import absolute, chain
from tasks.ingest import find_sources
from tasks.output import Ref, open_output
from tasks.stage import Run, Stage
from tasks.store import patiently
from tasks.texts import read_chunks

_PENDING = "pending"  # the key of an output that is not there yet


@dataclass
class Planner:
    """Looks each stage up instead of running it; ``rows`` tells (stage, what would happen)."""

    run: Run
    rows: list[tuple[str, str]] = field(default_factory=list)

    def call(self, stage: Stage, *arguments: Any) -> Ref:
        """The output where it is intact, else a pending one."""
        ref, fate = self._look_up(stage, arguments)
        self.rows.append((stage.name, fate))
        return ref

    def map(self, stage: Stage, texts: Ref, chunks: Ref, split: str, *arguments: Any) -> list[Ref]:
        """The outputs of the chunks; one pending output where the chunks are not known yet."""
        if _PENDING in (texts.key, chunks.key):
            self.rows.append((f"{stage.name} {split}", "runs once the chunks are known"))
            return [Ref(stage.name, _PENDING)]
        items = read_chunks(self.run.store, texts, chunks, split)
        found = [self._look_up(stage, (item, *arguments)) for item in items]
        fates = [fate for ref, fate in found if ref.key == _PENDING]
        fate = f"{len(fates)} of {len(items)} chunks: {fates[0]}" if fates else f"cached, {len(items)} chunks"
        self.rows.append((f"{stage.name} {split}", fate))
        return [ref for ref, _ in found]

    def _look_up(self, stage: Stage, arguments: tuple[Any, ...]) -> tuple[Ref, str]:
        pending = Ref(stage.name, _PENDING)
        flat = [part for argument in arguments for part in (argument if isinstance(argument, list) else [argument])]
        waits = sorted({part.stage for part in flat if isinstance(part, Ref) and part.key == _PENDING})
        if waits:
            return pending, f"runs if the content of {', '.join(waits)} changes"
        named = stage.named(arguments)
        ref = stage.ref(named, self.run)
        if stage.found(ref, self.run):
            return ref, "cached"
        there = open_output(self.run.store, ref)
        return pending, f"runs: {stage.reason(ref, there, stage.ingredients(named, self.run), self.run)}"


def plan(config: PipelineConfig, root: str, until: str | None, refresh: Sequence[str]) -> list[tuple[str, str]]:
    """(stage, what would happen and why) for every stage up to ``until``."""
    planner = Planner(Run(absolute(root), "plan", frozenset(refresh), config.execution))
    sources = patiently(
        find_sources.fn, config.data, planner.run.store
    )  # read where they are new, as digests are in the keys
    for name, _ in chain(config, sources, planner.call, planner.map):
        if name == until:
            break
    return planner.rows
