"""Runs the stages of a flow one after the other in this process, without Prefect."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from flows.plan import Executor, Stages, UntilReached
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.stage import Stage
from tests.helpers.roots import run_context


class LocalExecutor(Executor):
    """Makes the outputs that are missing. ``made`` lists them: the title of a mapped stage, the name of another."""

    def __init__(self, config: Any, root: Any, until: str | None = None) -> None:
        super().__init__(run_context(root), config, until)
        self.made: list[str] = []
        self.outputs: dict[str, list[Ref]] = {}
        """By title."""
        self.arguments: dict[str, list[Any]] = {}
        """First argument of each call, by title."""

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        return self._make(stage, title or stage.name, arguments)

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        return [self._make(stage, title, (item, *arguments)) for item in items]

    def _make(self, stage: Stage, title: str, arguments: Sequence[Any]) -> Ref:
        ref, is_cached = stage.materialize(self.run, stage.bind(*arguments))
        self.made += [] if is_cached else [title]
        self.outputs.setdefault(title, []).append(ref)
        self.arguments.setdefault(title, []).append(arguments[0])
        return ref

    def open(self, title: str) -> list[Output]:
        """Return the outputs of a stage."""
        return [read_output(self.run.store, ref) for ref in self.outputs[title]]


def run_locally(stages: Stages, config: Any, root: Any, until: str | None = None) -> LocalExecutor:
    """Run the stages up to ``until``."""
    executor = LocalExecutor(config, root, until)
    with suppress(UntilReached):
        stages(config, executor)
    return executor
