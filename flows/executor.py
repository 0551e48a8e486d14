"""Run stages as Prefect tasks."""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, is_dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateDetails
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.utilities.annotations import quote

from flows.clusters import Runner, open_runner
from flows.prefect_support.deployments import run_deployment_to_end
from flows.prefect_support.liveness import mark_task_runs_crashed
from flows.prefect_support.signals import find_interrupt
from flows.stage_task import read_refs, stage_task
from lm.common.errors import MachineError, Stopped, UserError
from tasks.runtime.context import RunContext
from tasks.runtime.output import Ref, open_output
from tasks.runtime.progress import show_progress
from tasks.runtime.stage import Stage
from tasks.train import train

log = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0  # between two looks whether the cluster is alive, and how large it is


class PrefectExecutor:
    """Runs each stage as a Prefect task, and the groups of a mapped stage in parallel. A context manager.

    ``config`` is the flow's.
    """

    def __init__(self, run: RunContext, config: Any) -> None:
        self.run, self.config = run, config
        self._resources = ExitStack()
        self._finished: dict[Ref, State[Any]] = {}  # task runs of this run, by their outputs

    def __enter__(self) -> "PrefectExecutor":
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.close()

    @functools.cached_property
    def _runner(self) -> Runner:
        """Opened by the first group that is not cached: a cached run needs no cluster."""
        return self._resources.enter_context(open_runner(self.run, [*self.config.data.train, *self.config.data.valid]))

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Run a stage in this process, or return its cached output. Raise the stage's exception if it fails.

        The stage train runs in ``execution.train_deployment`` if there is one.
        """
        calls = [stage.bind(*arguments)]
        if stage is train and self.run.execution.train_deployment and not stage.look_up(self.run, calls)[0][1]:
            task, parameters = _elsewhere_task, {"run": self.run, "config": self.config, "calls": calls}
        else:
            task, parameters = stage_task(stage.name), self._parameters(stage, calls, title or stage.name)
        # Quoted: Prefect would take any object with the memory address of an earlier result for that result.
        quoted = {name: quote(value) for name, value in parameters.items()}
        state: Any = task(**quoted, return_state=True, wait_for=self._upstream(calls))
        (ref,) = read_refs(state.result())
        self._note_finished([ref], state.state_details.task_run_id)
        return ref

    def _upstream(self, calls: Sequence[dict[str, Any]]) -> list[State[Any]]:
        """Return the task runs of this run that made the inputs of calls: the arrows in Prefect's graph."""
        states = (self._finished[ref] for ref in _find_refs(calls) if ref in self._finished)
        return list({state.state_details.task_run_id: state for state in states}.values())

    def _note_finished(self, refs: Sequence[Ref], task_run_id: UUID) -> None:
        state: State[Any] = Completed(data=[], state_details=StateDetails(task_run_id=task_run_id))
        self._finished.update(dict.fromkeys(refs, state))

    def read(self, function: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        """Return the items of a mapped stage, which a function reads from outputs."""
        return function(self.run.store, *arguments)

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Run a stage for every item that is not cached, such as a group of chunks. Return the outputs of all items.

        Consecutive items form a task run, so that a stage has some hundreds of task runs at most. Raise the first
        failure immediately. A cached item needs no task run.
        """
        if not items:
            return []
        calls = [stage.bind(item, *arguments) for item in items]
        outputs = stage.look_up(self.run, calls)
        missing = [index for index, (_, is_cached) in enumerate(outputs) if not is_cached]
        if missing:
            reason = stage.explain(self.run, calls[missing[0]])
            log.info("%s: %s of %s groups run: %s.", title, len(missing), len(items), reason)
            self._make(stage, title, calls, outputs, missing)
            self.run.made.update(outputs[index][0] for index in missing)  # workers have their own copy of the run
            stage.note_latest(self.run, outputs[-1][0])
        else:
            log.info("%s: %s of %s groups are cached.", title, len(items), len(items))
        return [ref for ref, _ in outputs]

    def _make(
        self,
        stage: Stage,
        title: str,
        calls: Sequence[dict[str, Any]],
        outputs: Sequence[tuple[Ref, bool]],
        missing: Sequence[int],
    ) -> None:
        running: dict[PrefectFuture[Any], Sequence[int]] = {}
        finished: SimpleQueue[PrefectFuture[Any]] = SimpleQueue()
        done = len(calls) - len(missing)
        with show_progress(title, len(calls), "group", self.run.label) as progress:
            progress(done)
            try:
                size = -(-len(missing) // self._runner.max_task_runs())
                pending = deque(missing[start : start + size] for start in range(0, len(missing), size))
                while pending or running:
                    slots = self._count_slots(stage)
                    while pending and len(running) < slots:
                        indices = pending.popleft()
                        name = f"{title} {indices[0] + 1}/{len(calls)}"
                        group = [calls[index] for index in indices]
                        parameters = self._parameters(stage, group, name)
                        future = self._runner.submit(stage_task(stage.name), parameters, self._upstream(group))
                        running[future] = indices
                        future.add_done_callback(finished.put)
                    try:
                        future = finished.get(timeout=_CHECK_SECONDS)
                    except Empty:
                        continue
                    future.result()
                    indices = running.pop(future)  # without a reference, Dask forgets the task
                    self._note_finished([outputs[index][0] for index in indices], future.task_run_id)
                    done += len(indices)
                    progress(done)
            except BaseException as error:
                if explained := self._explain(error, list(running)):
                    raise explained from error
                raise

    def _count_slots(self, stage: Stage) -> int:
        """Return how many task runs of a stage may be in flight."""
        execution = self.run.execution
        if stage.at_once and execution.runner == "threads" and not execution.tasks_in_flight:
            return stage.at_once(execution)
        return self._runner.count_slots()

    def _parameters(self, stage: Stage, calls: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
        return {"stage": stage, "calls": calls, "run": self.run, "title": title, "code": stage.code_ingredients()}

    def _explain(self, error: BaseException, running: list[PrefectFuture[Any]]) -> MachineError | None:
        """Return an error with a message if the cluster failed, and None for an interrupt or an error of a task.

        Leave no task run of a cluster in the state Running.
        """
        if self.run.execution.runner == "threads":
            return None
        mark_task_runs_crashed([future.task_run_id for future in running], "The run ended before this task.")
        if isinstance(error, (UserError, Stopped)) or find_interrupt(error):
            return None
        # Dask's scheduler reports a RuntimeError, a worker the exception itself.
        is_unloadable = any(text in str(error) for text in ("Can't get attribute", "deserialization of the task graph"))
        if is_unloadable or isinstance(error, ImportError) or type(error).__name__ == "UnpicklingError":
            cause = str(error.__cause__ or error).strip().splitlines()[-1]
            return MachineError(
                f"The cluster could not load a task: {cause}. Install the same version of textmill and its libraries "
                "on the scheduler and on all workers."
            )
        if "_runner" not in vars(self):  # the error came before the connection, which is not tried again
            return None
        message = self._runner.explain(error)
        return MachineError(f"{message} Finished groups are kept; run the same command again.") if message else None


def _train_elsewhere(run: RunContext, config: Any, calls: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Have a run of ``execution.train_deployment`` make the output of the stage train. Return its Ref as a dict."""
    ((ref, _),) = train.look_up(run, calls)
    name = run.execution.train_deployment
    config = asdict(replace(config, execution=replace(config.execution, train_deployment="")))
    refresh = ["train"] if "train" in run.refresh else []
    run_deployment_to_end(name, {"config": config, "root": run.root, "until": "train", "refresh": refresh})
    if not open_output(run.store, ref):
        raise UserError(
            f"{name} did not make the output that this run needs. It needs a root that both machines see, and the "
            "same version of textmill and of its libraries."
        )
    run.made.add(ref)
    return [ref._asdict()]


_elsewhere_task = Task(
    _train_elsewhere, name=train.name, task_run_name=train.name, cache_policy=NO_CACHE, persist_result=False
)


def _find_refs(value: Any) -> Iterator[Ref]:
    """Yield the Refs in arguments of a stage, also those inside collections and dataclasses."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, dict):
        yield from _find_refs(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find_refs(item)
    elif is_dataclass(value):
        yield from _find_refs([getattr(value, field.name) for field in fields(value)])
