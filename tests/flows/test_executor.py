"""Errors of tasks in a cluster, without a cluster: what the user is told, and what stays an interrupt."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from flows import executor
from flows.clusters import Runner
from flows.config import PipelineConfig
from flows.executor import PrefectExecutor
from flows.prefect_support.signals import Terminated
from lm.common.errors import InvalidUtf8Error, Stopped, TransientError, UserError
from tasks.runtime.execution import Execution
from tasks.runtime.output import Ref
from tasks.runtime.stage import Stage
from tests.helpers.roots import letters, run_context

ADDRESS = "tcp://scheduler:1"
LOST = rf"^The Dask scheduler at {ADDRESS} is lost\. Start it again\. Finished groups are kept; run the same command"


class CancelledError(Exception):
    """Has the name of Dask's error for a future whose scheduler is lost."""


class KilledWorker(Exception):
    """Has the name of Dask's error for a task whose workers died."""


class FailedFuture:
    """A task run that has ended with an error."""

    def __init__(self, error: BaseException) -> None:
        self.task_run_id, self._error = uuid4(), error

    def add_done_callback(self, function: Callable[["FailedFuture"], None]) -> None:
        function(self)

    def result(self) -> None:
        raise self._error


class Cluster:
    """Stands for Prefect's runner of Dask tasks. Each task fails with ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.futures: list[FailedFuture] = []
        self._error = error
        self.client = SimpleNamespace(
            status="running", scheduler_info=lambda: {"address": ADDRESS}, nthreads=lambda: {"tcp://worker:1": 1}
        )

    def submit(self, task: Any, parameters: dict[str, Any], wait_for: list[Any]) -> FailedFuture:
        self.futures.append(FailedFuture(self._error))
        return self.futures[-1]


class Site:
    """An executor on a cluster, and the task runs that it reports as crashed."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crashed: list[UUID] = []
        self.connections = 0
        self.connection_error: BaseException | None = None
        self.cluster = Cluster(RuntimeError("no task should run"))
        self.run = run_context(tmp_path, execution=Execution(runner="dask", address=ADDRESS))
        monkeypatch.setattr(executor, "mark_task_runs_crashed", lambda ids, message: self.crashed.extend(ids))
        monkeypatch.setattr(executor, "open_runner", self._open_runner)

    @contextmanager
    def _open_runner(self, *_: Any) -> Iterator[Runner]:
        self.connections += 1
        if self.connection_error:
            raise self.connection_error
        yield Runner(self.run.execution, self.cluster)

    def map(self, error: BaseException | None = None) -> None:
        """Run two groups of a stage whose tasks fail with ``error``."""
        if error:
            self.cluster = Cluster(error)
        with PrefectExecutor(self.run, PipelineConfig()) as opened:
            opened.map(letters, "letters", ["x", "y"], 1)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_a_cluster_that_is_lost_before_the_first_task_is_named(site: Site) -> None:
    site.cluster.client.status = "closed"
    with pytest.raises(UserError, match=LOST):
        site.map()
    assert not site.cluster.futures


@pytest.mark.parametrize("error", [CancelledError("lost"), ConnectionError("reset"), TimeoutError()], ids=repr)
def test_a_cluster_that_is_lost_while_tasks_run_is_named(site: Site, error: Exception) -> None:
    with pytest.raises(UserError, match=LOST) as caught:
        site.map(error)
    assert caught.value.__cause__ is error
    assert site.crashed == [future.task_run_id for future in site.cluster.futures]
    assert len(site.crashed) == 2


def test_a_part_whose_workers_died_is_explained(site: Site) -> None:
    with pytest.raises(UserError, match="Do they have enough memory"):
        site.map(KilledWorker("letters-1"))


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'tasks'"), pickle.UnpicklingError("bad")], ids=repr
)
def test_a_worker_that_cannot_load_a_task_is_explained(site: Site, error: Exception) -> None:
    with pytest.raises(UserError, match=r"could not load a task: .*Install the same version"):
        site.map(error)


@pytest.mark.parametrize(
    "error",
    [
        UserError("s3://corpus/root/a.txt changed or was damaged while count-group read it. Run the pipeline again."),
        TransientError("The root s3://corpus/root cannot be reached: timeout"),
        InvalidUtf8Error(0xFF, 7, "a.txt"),
        Stopped("The run is being stopped."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_message_of_a_worker_reaches_the_user(site: Site, error: Exception) -> None:
    """Errors of a worker are pickled."""
    received = pickle.loads(pickle.dumps(error))
    with pytest.raises(type(error)) as caught:
        site.map(received)
    assert caught.value is received
    assert not site.run.stopping.is_set(), "a search goes on"
    assert str(received) == str(error)
    assert vars(received) == vars(error)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Terminated()], ids=repr)
@pytest.mark.parametrize("is_grouped", [True, False], ids=["group", "cause"])
def test_an_interrupt_in_an_error_of_the_cluster_is_no_lost_scheduler(
    site: Site, interrupt: BaseException, is_grouped: bool
) -> None:
    error: BaseException = ConnectionError("closed")
    error.__cause__ = interrupt
    if is_grouped:
        error = BaseExceptionGroup("tasks", [ValueError("other"), interrupt])
    with pytest.raises(type(error)) as caught:
        site.map(error)
    assert caught.value is error
    assert len(site.crashed) == 2


def test_an_error_of_the_connection_is_raised_without_another_connection(site: Site) -> None:
    site.connection_error = RuntimeError("versions differ")
    with pytest.raises(RuntimeError, match="versions differ"):
        site.map()
    assert site.connections == 1


def test_a_refresh_makes_groups_in_workers_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker notes what it made in its own copy of the run."""
    run = run_context(tmp_path, refresh=frozenset({"letters"}))

    def make_in_worker(
        self: PrefectExecutor, stage: Stage, _: str, calls: Sequence[Any], __: Sequence[Ref], missing: Sequence[int]
    ) -> None:
        worker = pickle.loads(pickle.dumps(run))
        for index in missing:
            stage.materialize(worker, calls[index])

    monkeypatch.setattr(PrefectExecutor, "_make", make_in_worker)
    with PrefectExecutor(run, PipelineConfig()) as opened:
        outputs = opened.map(letters, "letters", ["x", "y"], 1)
    assert letters.look_up(run, [letters.bind(text, 1) for text in "xy"]) == [(ref, True) for ref in outputs]
