"""What the stages of a flow ask of an executor; and the executor that looks up which stages are cached, without Prefect
and without running any."""

import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tasks.runs.run_record import Recorder, make_run, run_name
from tasks.runtime.locks import use_root
from tasks.runtime.output import Ref
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Stage

log = logging.getLogger(__name__)
T = TypeVar("T")

_PENDING_KEY = "pending"  # the key of an output that does not exist yet


class UntilReached(Exception):
    """Ends a run after its last stage."""


class Pending(Exception):
    """Ends a plan at a stage, its argument: the stages after it depend on its output, which does not exist yet."""


class Executor(ABC):
    """Returns the outputs of the stages of a flow: it runs the stages, or only looks in the cache."""

    def __init__(self, run: RunContext, config: Any, until: str | None = None) -> None:
        """``config`` is the flow's. ``until`` is the last stage; None: the last of the flow."""
        self.run, self.config, self.until = run, config, until
        self.inputs: Any = None
        """What the first stages need."""
        self.finished: dict[str, Ref] = {}
        """Output of each stage of the flow that is finished, by the name of the stage."""

    def find_inputs(self, function: Callable[..., T]) -> T:
        """Return what the first stages need: what a function of the flow's config and the store finds.

        It reads new sources: their digests are in the keys.
        """
        self.inputs = inputs = function(self.config, self.run.store)
        return inputs

    @abstractmethod
    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Return the output of a stage. ``title`` names this call for people; empty: the name of the stage."""

    @abstractmethod
    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Return the outputs of a stage for all items, each the first argument of a call."""

    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function of the store and these arguments reads from outputs."""
        return function(self.run.store, *arguments)

    def finish(self, output: Ref) -> Ref:
        """Record that a stage of the flow is finished, and return its output. Raise UntilReached after the last."""
        self.finished[output.stage] = output
        if output.stage == self.until:
            raise UntilReached
        return output

    def log(self, message: str, *values: Any) -> None:  # noqa: B027 # a dry run logs nothing
        """Log a line about work that is done."""


Stages = Callable[[Any, Executor], None]  # runs all stages of a flow in their order, from the flow's config


class DryRunExecutor(Executor):
    """Looks up the output of each stage and runs nothing. A context manager.

    At an output that does not exist yet but would have to be read, the ``with`` block ends: the remaining stages are
    added to the rows. It ends after the stage ``until`` too.
    """

    def __init__(self, run: RunContext, config: Any, until: str | None = None) -> None:
        super().__init__(run, config, until)
        self.rows: list[tuple[str, str]] = []
        """Stage, and what a run would do with it and why."""
        self.missing: dict[str, float] = {}
        """Stages that would run, and the share of their groups that is missing. Groups belong to the stage that
        combines them: those of encode-group to encode."""
        self.arguments: dict[str, tuple[Any, ...]] = {}
        """Arguments of the last call of each stage."""

    def __enter__(self) -> "DryRunExecutor":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Pending):
            looked_up, before = {*self.finished, *self.arguments, *self.missing}, error.args[0]
            for name, times in Counter(self.config.stage_names()).items():
                if name not in looked_up and before != self.until:
                    self.missing[name] = 1.0
                    self.rows += [(name, _pending_reason([Ref(before, _PENDING_KEY)]))] * times
                    before = name
        return isinstance(error, (Pending, UntilReached))

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Return the cached output, or a pending one. All calls of a stage have its name, so that a plan is short."""
        self.arguments[stage.name] = arguments
        reason = _pending_reason(arguments)
        if not reason:
            ((ref, is_cached),) = stage.look_up(self.run, [stage.bind(*arguments)])
            if is_cached:
                self.rows.append((stage.name, "cached"))
                return ref
            reason = f"runs{stage.explain(self.run, stage.bind(*arguments))}"
        self.missing.setdefault(stage.name, 1.0)
        self.rows.append((stage.name, reason))
        return Ref(stage.name, _PENDING_KEY)

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Return the cached outputs of all items, and a pending one for each that is missing or not known yet."""
        if not items:
            return []
        outputs = [Ref(stage.name, _PENDING_KEY)] * len(items)
        known = [index for index, item in enumerate(items) if not _pending([item, *arguments])]
        looked_up = stage.look_up(self.run, [stage.bind(items[index], *arguments) for index in known])
        for index, (ref, is_cached) in zip(known, looked_up, strict=True):
            if is_cached:
                outputs[index] = ref
        missing = [index for index, ref in enumerate(outputs) if ref.key == _PENDING_KEY]
        if not missing:
            self.rows.append((title, f"cached, {count_groups(len(items))}"))
            return outputs
        first = (items[missing[0]], *arguments)
        reason = _pending_reason(first)
        if not reason:
            part = f"{len(missing)} of " if len(missing) < len(items) else ""
            explained = stage.explain(self.run, stage.bind(*first))
            reason = f"runs, {part}{count_groups(len(items))}{explained}"
        self.rows.append((title, reason))
        name = stage.name.partition("-")[0]  # the stage that combines the groups
        share = 1.0 if _pending(arguments) else (len(known) + len(missing)) / len(items) - 1
        self.missing[name] = max(share, self.missing.get(name, 0.0))
        return outputs

    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that reads outputs. Raise Pending if an output does not exist yet."""
        if pending := _pending(arguments):
            raise Pending(pending[0].stage)
        return super().read(function, *arguments)


def count_groups(count: int) -> str:
    """Return a number of groups of chunks in words."""
    return f"{count:,} group{'' if count == 1 else 's'}"


def _pending_reason(arguments: Sequence[Any]) -> str:
    """Return a reason that names the arguments whose output does not exist yet; empty if all exist."""
    stages = sorted({ref.stage for ref in _pending(arguments)})
    return f"runs if the content of {', '.join(stages)} changes" if stages else ""


def _pending(arguments: Sequence[Any]) -> list[Ref]:
    def items(argument: Any) -> Iterable[Any]:
        if isinstance(argument, dict):
            return argument.values()
        return argument if isinstance(argument, list) else [argument]

    values = [value for argument in arguments for value in items(argument)]
    return [value for value in values if isinstance(value, Ref) and value.key == _PENDING_KEY]


def dry_run(stages: Stages, config: Any, root: str, until: str | None, refresh: Sequence[str]) -> DryRunExecutor:
    """Look up every stage up to ``until``, and return the executor that has the results."""
    config.check_stages(until, ())
    with DryRunExecutor(make_run(config, root, "plan", tuple(refresh)), config, until) as executor:
        stages(config, executor)
    return executor


def plan(stages: Stages, config: Any, root: str, until: str | None, refresh: Sequence[str]) -> list[tuple[str, str]]:
    """Return for every stage up to ``until`` its name, and what a run would do and why."""
    return dry_run(stages, config, root, until, refresh).rows


def cached_run(stages: Stages, config: Any, root: str, until: str | None) -> dict[str, Any] | None:
    """Return the record of a run that takes every stage from the cache, and write it unless the last record says the
    same. Return None if a stage must run."""
    config.check_stages(until, ())
    run = make_run(config, root, run_name(until, config.chosen_name or f"cached-{os.getpid()}"))
    recorder = Recorder(run, config, until)
    with use_root(run):
        with DryRunExecutor(run, config, until) as executor:
            stages(config, executor)
        if executor.missing:
            return None
        for name, ref in executor.finished.items():
            recorder.add(name, ref)
        log.info("All stages are cached. Nothing to run.")
        return recorder.finish()
