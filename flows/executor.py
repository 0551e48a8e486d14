"""Run the stages of a flow in Prefect: each as a task, with records and artifacts."""

import functools
import logging
import platform
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from contextvars import copy_context
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from uuid import UUID

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateDetails, TaskRun
from prefect.context import TagsContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.clusters import Runner, open_runner
from flows.plan import Executor, Stages, UntilReached, count_groups
from flows.prefect_support.assets import AssetEvents, find_origins
from flows.prefect_support.deployments import run_deployment_to_end
from flows.prefect_support.final_states import mark_cancelled_after_ctrl_c, mark_task_runs_crashed, note_start
from flows.prefect_support.logging import ArtifactPublisher, name_run, send_logs_to_prefect, tag_run
from flows.prefect_support.recovery import create_recovery_automations
from flows.prefect_support.signals import find_interrupt, reinstall_sigterm_handler
from lm.common.errors import DivergedError, MachineError, Stopped, TransientError, UserError
from lm.files.remote_copies import remove_old_copies
from tasks.runs.run_record import Recorder, make_run
from tasks.runs.run_report import figures_line, page_of
from tasks.runtime.locks import stop_without_lease, use_root
from tasks.runtime.output import Ref, open_output
from tasks.runtime.run_context import RunContext, show_progress
from tasks.runtime.stage import Stage
from tasks.train import train

log = logging.getLogger(__name__)
T = TypeVar("T")


RETRY_DELAYS: list[float] = [2, 4, 8]
"""Seconds before each retry of a task. A thread that waits cannot be stopped."""

FLOW_OPTIONS: dict[str, Any] = {
    "flow_run_name": name_run,
    # The executor limits the parallel tasks to execution.workers; this number only has to be larger.
    "task_runner": ThreadPoolTaskRunner(max_workers=256),
    "on_crashed": [mark_cancelled_after_ctrl_c],
}
"""Options of Prefect's decorator that all flows have."""


def run_stages(stages: Stages, config: Any, root: str, until: str | None, refresh: tuple[str, ...]) -> dict[str, Any]:
    """Run the stages up to ``until`` and return the record of the run. Call it in a Prefect flow."""
    config.check_stages(until, refresh)
    reinstall_sigterm_handler()
    send_logs_to_prefect()
    note_start(flow_run.id, flow_run.run_count)
    tag_run("textmill", config.name, until or "full")
    with suppress(PrefectHTTPStatusError):  # a server may allow only some users to create automations
        create_recovery_automations()
    if get_current_settings().api.url:  # the UI of a temporary server ends with the run
        log.info("Run %s: %s", flow_run.name, flow_run.ui_url)

    run = make_run(config, root, flow_run.name, refresh)
    run.store.remove_old_uploads()
    remove_old_copies(config.execution.download_cache << 30)
    # Without the run's tags: Prefect asks its server for a concurrency slot for each tag of each task run.
    with TagsContext(), PrefectExecutor(run, config, until, refresh) as executor, use_root(run):
        recorder, artifacts = executor.recorder, executor.artifacts
        try:
            with suppress(UntilReached):
                stages(config, executor)
        except BaseException as error:
            run.stopping.set()  # other threads may still process groups of chunks
            if (interrupt := find_interrupt(error)) and interrupt is not error:
                recorder.stop()
                # Prefect reports an interrupt as a crash, and another error as a failure.
                raise type(interrupt)(*interrupt.args) from error
            if isinstance(error, Exception) and not isinstance(error, Stopped):
                recorder.fail(error)
            else:
                recorder.stop()
            if isinstance(error, UserError):
                artifacts.publish("report", recorder.table(str(error)), f"Run {run.name} failed")
            raise
        record = recorder.finish()
        artifacts.publish("report", recorder.table(), f"{len(record['stages'])} stages of run {run.name}")
    return record


def check_device(name: str) -> None:
    """Raise UserError if the device is missing."""
    if name not in ("auto", "cpu"):
        from lm.hardware.device import choose_device

        choose_device(name)


class PrefectExecutor(Executor):
    """Runs each stage as a Prefect task, and the groups of a mapped stage in parallel. A context manager."""

    def __init__(self, run: RunContext, config: Any, until: str | None = None, refresh: tuple[str, ...] = ()) -> None:
        super().__init__(run, config, until)
        self.recorder, self.artifacts = Recorder(run, config, until, refresh), ArtifactPublisher(run.label)
        self.assets = AssetEvents(run)
        self._resources = ExitStack()
        self._task_runs: dict[Any, State[Any]] = {}  # of this run, by their outputs
        self._explained: set[str] = set()  # stages whose reason to run was logged: for training text, before validation

    def __enter__(self) -> "PrefectExecutor":
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.close()

    @functools.cached_property
    def _runner(self) -> Runner:
        """Opened by the first group that is not cached: a cached run needs no cluster."""
        return self._resources.enter_context(open_runner(self.run, self.config.data.paths))

    def find_inputs(self, function: Callable[..., T]) -> T:
        """Return what the first stages need, as the result of a task."""
        return super().find_inputs(make_task(function, "find-sources", "find sources", retries=0))  # it retries itself

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Run a stage in this process, or return its cached output. Raise the stage's exception if it fails.

        The stage train runs in ``execution.train_deployment`` if there is one.
        """
        calls = [stage.bind(*arguments)]
        ref, _ = stage.key(self.run, calls[0])
        self.assets.note_inputs([ref], calls)
        if stage is train and self.run.execution.train_deployment and not stage.look_up(self.run, calls)[0][1]:
            task = make_task(_train_elsewhere, stage.name)
            parameters: dict[str, Any] = {"run": self.run, "config": self.config, "calls": calls}
        else:
            task = make_task(make_outputs, stage.name, "{title}")
            parameters = self._parameters(stage, calls, title or stage.name)
        # Quoted: Prefect would take any object with the memory address of an earlier result for that result.
        quoted = {name: quote(value) for name, value in parameters.items()}
        state: Any = task(**quoted, return_state=True, wait_for=self._upstream(calls))
        try:
            state.result()  # raises the exception of a task that failed
        except DivergedError as error:
            self.assets.emit_not_finite(ref, str(error))
            raise
        self._note_task_run([ref], state.state_details.task_run_id)
        return ref

    def _upstream(self, calls: Sequence[dict[str, Any]]) -> list[State[Any]]:
        """Return the task runs of this run that made the inputs of calls: the arrows in Prefect's graph."""
        states = (self._task_runs[item] for item in find_origins(calls) if item in self._task_runs)
        return list({state.state_details.task_run_id: state for state in states}.values())

    def _note_task_run(self, refs: Sequence[Ref], task_run_id: UUID) -> None:
        state: State[Any] = Completed(data=True, state_details=StateDetails(task_run_id=task_run_id))
        self._task_runs.update(dict.fromkeys(refs, state))

    def finish(self, output: Ref) -> Ref:
        """Record that a stage of the flow is finished, publish its page, and return its output.

        Raises UntilReached after the last stage to run.
        """
        content, is_made = self.recorder.add(output.stage, output)
        self.recorder.save()
        state = self._task_runs.get(output)
        self.assets.emit(content, is_made, state.state_details.task_run_id if state else None)
        if is_made:
            page = f"# {output.stage}\n\n{page_of(content)}"
            self.artifacts.publish(output.stage, page, figures_line(content))
        return super().finish(output)

    def log(self, message: str, *values: Any) -> None:
        """Log a line about the work."""
        log.info(message, *values)

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Run a stage for every item that is not cached, such as a group of chunks. Return the outputs of all items.

        Consecutive items form a task run, so that a stage has some hundreds of task runs at most. Raise the first
        failure immediately. A cached item needs no task run.
        """
        if not items:
            return []
        calls = [stage.bind(item, *arguments) for item in items]
        looked_up = stage.look_up(self.run, calls)
        outputs = [ref for ref, _ in looked_up]
        self.assets.note_inputs(outputs, calls)
        missing = [index for index, (_, is_cached) in enumerate(looked_up) if not is_cached]
        if missing:
            share = f"{len(missing)} of " if len(missing) < len(items) else ""
            reason = "" if stage.name in self._explained else stage.explain(self.run, calls[missing[0]])
            self._explained.add(stage.name)
            log.info("%s: processing %s%s%s.", title, share, count_groups(len(items)), reason)
            self._make(stage, title, calls, outputs, missing)
            self.run.made.update(outputs[index] for index in missing)  # workers have their own copy of the run
            stage.note_latest(self.run, outputs[-1])
        return outputs

    def _make(
        self, stage: Stage, title: str, calls: Sequence[dict[str, Any]], outputs: Sequence[Ref], missing: Sequence[int]
    ) -> None:
        """Run the calls whose indices are ``missing``."""
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
                        task = make_task(make_outputs, stage.name, "{title}")
                        parameters = self._parameters(stage, group, name)
                        future = self._runner.submit(task, parameters, self._upstream(group))
                        running[future] = indices
                        future.add_done_callback(finished.put)
                    try:
                        future = finished.get(timeout=5)  # then look whether the cluster is alive, and how large it is
                    except Empty:
                        continue
                    future.result()
                    indices = running.pop(future)  # without a reference, Dask forgets the task
                    self._note_task_run([outputs[index] for index in indices], future.task_run_id)
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


@functools.cache
def make_task(function: Callable[..., Any], name: str, run_name: str = "", retries: int = len(RETRY_DELAYS)) -> Any:
    """Return the Prefect task of a function. Prefect keeps no result: whether an output is cached decides its manifest.

    ``run_name`` names its task runs, from their parameters; empty: ``name``.
    """
    return Task(
        function,
        name=name,
        task_run_name=run_name or name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=retries,
        retry_delay_seconds=RETRY_DELAYS,
        retry_condition_fn=should_retry,
    )


def should_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether Prefect runs a failed task again, and log that it does. Only a failure that may pass is worth it:
    of a network, a server, or a training process that was killed."""
    if not isinstance(state.data, TransientError):
        return False
    log.warning("%s. Trying again.", str(state.data).partition("\n")[0].rstrip("."))
    return True


def make_outputs(
    stage: Stage, calls: Sequence[dict[str, Any]], run: RunContext, title: str, code: dict[str, Any]
) -> State[bool] | bool:
    """Make the output of each call unless it is cached. Return whether all were cached.

    It is pickled by reference: a worker of a cluster imports it, and the stages, from its own installation of textmill.
    A worker works on ``execution.threads_per_task`` calls at a time. It stops if the lease of the run is lost.
    ``title`` names the task run. ``code`` has the driver's :meth:`Stage.code_ingredients`. Raises MachineError if
    the worker has another version of textmill or of a library.

    It returns no Refs: Prefect knows a result by its address in memory, and would show this task as an input of any
    other whose parameters come to lie at that address later.
    """
    if run.is_worker:
        send_logs_to_prefect()
        _check_same_code(stage, code)
    with stop_without_lease(run) if run.is_worker else nullcontext():
        threads = min(len(calls), run.execution.threads_per_task)
        if threads > 1:
            contexts = [copy_context() for _ in calls]  # logging needs the context of the Prefect run
            with ThreadPoolExecutor(threads) as pool:
                results = list(
                    pool.map(lambda context, call: context.run(stage.materialize, run, call), contexts, calls)
                )
        else:
            results = list(map(functools.partial(stage.materialize, run), calls))
    # Only the manifests decide what is cached. The name of Prefect's state is for people.
    is_cached = all(is_cached for _, is_cached in results)
    return Completed(name="Cached", data=True) if is_cached else False


def _check_same_code(stage: Stage, code: dict[str, Any]) -> None:
    own = stage.code_ingredients()
    if different := sorted(name for name in code if code[name] != own.get(name)):
        details = "; ".join(f"{name}: {own.get(name)} on the worker, {code[name]} in the driver" for name in different)
        raise MachineError(
            f"The worker on {platform.node()} has other code than the driver ({details}). Install the same version "
            "of textmill and of its libraries on all workers."
        )


def _train_elsewhere(run: RunContext, config: Any, calls: Sequence[dict[str, Any]]) -> None:
    """Have a run of ``execution.train_deployment`` make the output of the stage train."""
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
