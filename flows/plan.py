"""Look up which stages are cached, without running any and without Prefect."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from flows.chain import Chain
from tasks.runs.run_record import Recorder, make_run, run_name
from tasks.runtime.context import RunContext
from tasks.runtime.output import Ref
from tasks.runtime.root_lock import use_root
from tasks.runtime.stage import Stage

log = logging.getLogger(__name__)

_PENDING_KEY = "pending"  # the key of an output that does not exist yet


@dataclass
class DryRunExecutor:
    """Looks up the output of each stage and runs nothing."""

    run: RunContext
    rows: list[tuple[str, str]] = field(default_factory=list)
    """Stage, and what a run would do with it and why."""
    is_all_cached: bool = True
    missing: dict[str, float] = field(default_factory=dict)
    """Stages that would run, and the share of their groups that is missing. Groups belong to the stage that combines
    them: those of encode-group to encode."""

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Return the cached output, or a pending one. All calls of a stage have its name, so that a plan is short."""
        if reason := _pending_reason(arguments):
            return self._add_pending(stage, stage.name, reason)
        ((ref, is_cached),) = stage.look_up(self.run, [stage.bind(*arguments)])
        if not is_cached:
            return self._add_pending(stage, stage.name, self._run_reason(stage, arguments))
        self.rows.append((stage.name, "cached"))
        return ref

    def read(self, function: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        """Return the items of a mapped stage, or one pending output if an argument is pending."""
        if pending := _pending(arguments):
            return pending[:1]
        return function(self.run.store, *arguments)

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Return the cached outputs of all items, or one pending output if any is missing or not known yet."""
        if not items:
            return []
        if reason := _pending_reason((*items, *arguments)):
            self.missing[_combining_stage(stage)] = 1.0
            return [self._add_pending(stage, title, reason)]
        outputs = stage.look_up(self.run, [stage.bind(item, *arguments) for item in items])
        missing = [item for item, (_, is_cached) in zip(items, outputs, strict=True) if not is_cached]
        if missing:
            share = len(missing) / len(items)
            self.missing[_combining_stage(stage)] = max(share, self.missing.get(_combining_stage(stage), 0.0))
            reason = self._run_reason(stage, (missing[0], *arguments))
            return [self._add_pending(stage, title, f"{len(missing)} of {len(items)} groups: {reason}")]
        self.rows.append((title, f"cached, {len(items)} groups"))
        return [ref for ref, _ in outputs]

    def _add_pending(self, stage: Stage, name: str, action: str) -> Ref:
        self.is_all_cached = False
        self.missing.setdefault(_combining_stage(stage), 0.0 if stage.is_mapped else 1.0)
        self.rows.append((name, action))
        return Ref(stage.name, _PENDING_KEY)

    def _run_reason(self, stage: Stage, arguments: tuple[Any, ...]) -> str:
        return f"runs: {stage.explain(self.run, stage.bind(*arguments))}"


def _combining_stage(stage: Stage) -> str:
    return stage.name.removesuffix("-group").removesuffix("-sum")


def _pending_reason(arguments: tuple[Any, ...]) -> str:
    """Return a reason that names the arguments whose output does not exist yet; empty if all exist."""
    stages = sorted({ref.stage for ref in _pending(arguments)})
    return f"runs if the content of {', '.join(stages)} changes" if stages else ""


def _pending(arguments: tuple[Any, ...]) -> list[Ref]:
    values = [value for argument in arguments for value in (argument if isinstance(argument, list) else [argument])]
    return [value for value in values if isinstance(value, Ref) and value.key == _PENDING_KEY]


def plan(chain: Chain, config: Any, root: str, until: str | None, refresh: Sequence[str]) -> list[tuple[str, str]]:
    """Return for every stage up to ``until`` its name, and what a run would do and why."""
    executor = DryRunExecutor(make_run(config, root, "plan", tuple(refresh)))
    inputs = chain.find_inputs(config, executor.run.store)  # reads new sources: their digests are in the keys
    list(chain.run(config, inputs, executor, until))
    return executor.rows


def cached_run(chain: Chain, config: Any, root: str, until: str | None) -> dict[str, Any] | None:
    """Return the record of a run that takes every stage from the cache, and write it unless the last record says the
    same. Return None if a stage must run."""
    run = make_run(config, root, run_name(until, f"cached-{uuid4().hex[:8]}"))
    executor, recorder = DryRunExecutor(run), Recorder(run, config, until)
    with use_root(run):
        stages = list(chain.run(config, chain.find_inputs(config, run.store), executor, until))
        if not executor.is_all_cached:
            return None
        for stage, ref in stages:
            recorder.add(stage, ref)
        log.info("All stages are cached. Nothing to run.")
        return recorder.finish()
