"""The task runs of a pipeline in Prefect: what they read from, and which calls share one."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext
from prefect.events.worker import EventsWorker

from flows.config import PipelineConfig
from flows.executor import PrefectExecutor, make_outputs, make_task
from flows.pipeline import pipeline
from lm.common.errors import MachineError, Stopped, StorageError, TransientError, UserError
from lm.text.config import ChunkConfig
from tasks.runtime.execution import Execution
from tasks.runtime.locks import use_root
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.helpers.pipelines import STAGES, Runner
from tests.helpers.roots import letters

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True, scope="module")
def events_reach_this_server() -> None:
    """Task runs are recorded from events. Prefect sends all events of a process to the server of the first one, also
    after that server has ended, such as that of an earlier test; so begin again."""
    EventsWorker.drain_all(timeout=1, at_exit=False)


@pytest.mark.slow
def test_prefect_knows_which_task_run_read_from_which(run: Runner, config: PipelineConfig) -> None:
    """The arrows of the run graph: inputs inside lists and dataclasses too, and no others."""
    run(config)
    parents = run.inputs()
    assert parents["ingest"] == {"ingest-train", "ingest-valid"}
    assert parents["count"] >= {"chunk-train", "ingest-train"}, "of its groups; they are in a dataclass"
    assert parents["merge"] == {"count"}
    assert parents["train"] == {"encode", "encode-train", "encode-valid", "merge"}
    assert parents["sample"] == {"train", "merge"}


@pytest.mark.slow
def test_a_training_of_another_deployment_counts_as_made_by_this_run(
    run: Runner, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(name: str, parameters: dict[str, Any]) -> None:
        pipeline(**parameters)

    monkeypatch.setattr("flows.executor.run_deployment_to_end", run_here)
    monkeypatch.setattr("flows.prefect_support.deployments.check_deployment", lambda name: None)
    elsewhere = replace(config, execution=replace(config.execution, train_deployment="pipeline/gpu"))
    assert run(elsewhere, until="encode") == STAGES[:5]
    assert run(elsewhere) == ["train", "sample"]
    report = (run.root / "runs" / f"{run.record['name']}.md").read_text()
    assert "## train" in report and "## sample" in report and "## encode" not in report
    inputs = run.inputs()
    assert inputs["train"] == {"encode", "merge"}
    assert inputs["sample"] == {"train", "merge"}
    assert run(elsewhere) == []
    assert run(elsewhere, until="train", refresh=("train",)) == ["train"]


@pytest.mark.slow
def test_many_groups_share_few_task_runs_and_a_tree_of_sums(
    run: Runner, config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, chunk=ChunkConfig(target_bytes=5_000))
    run(config, until="encode")
    assert run.groups("count-sum") == [], "32 files of counts can be added up at once"
    monkeypatch.setattr("flows.clusters._MAX_TASK_RUNS", 3)
    monkeypatch.setattr("flows.pipeline._COUNTS_PER_SUM", 2)
    other = Runner(tmp_path / "other")
    other(config, until="encode")
    groups = len(run.groups("count-group"))
    assert groups > 8
    assert len(other.groups("count-group")) == groups
    assert len(other.groups("count-sum")) > groups / 2, "a sum of sums, until two are left"
    with get_client(sync_client=True) as client:
        flow_run = next(found for found in client.read_flow_runs() if found.name == other.record["name"])
        in_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        names = [task_run.name for task_run in client.read_task_runs(flow_run_filter=in_run, limit=200)]
    assert sum(name.startswith("count ") for name in names) <= 3
    for stage in ("count", "merge", "encode"):
        assert run.output(stage).digest == other.output(stage).digest
    assert other(config, until="encode", refresh=("count",)) == ["count"]
    made = other.groups("count-sum", made_in_last_run=True)
    assert len(made) == len(other.groups("count-sum")), "a refresh of count includes its sums"


class _ChangingSet(set[tuple[str, str]]):
    """A set that another thread always changes."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        raise RuntimeError("Set changed size during iteration")


@pytest.mark.slow
def test_prefect_does_not_look_into_what_the_threads_of_a_run_change(config: PipelineConfig, tmp_path: Path) -> None:
    run = RunContext(str(tmp_path), "x", made=_ChangingSet())

    def make_letters() -> list[Ref]:
        with PrefectExecutor(run, config) as executor:
            return executor.map(letters, "letters", ["a", "b"], 2)

    with use_root(run):
        refs = Flow(make_letters, name="letters")()
    assert [read_output(run.store, ref).path("a.txt").read_text() for ref in refs] == ["aa", "bb"]


@pytest.mark.slow
def test_prefect_keeps_no_address_of_a_result(config: PipelineConfig, tmp_path: Path) -> None:
    """An object that comes to lie at such an address later would make the task an input of others."""
    run = RunContext(str(tmp_path), "x")

    def make_letters() -> dict[int, Any]:
        with PrefectExecutor(run, config) as executor:
            for _ in range(2):  # the second time, cached
                executor.call(letters, "a", 2)
                executor.map(letters, "letters", ["a", "b"], 2)
        context = FlowRunContext.get()
        assert context
        return dict(context.run_results)

    with use_root(run):
        assert Flow(make_letters, name="letters")() == {}


def test_a_task_on_a_worker_works_on_several_groups_at_a_time(config: PipelineConfig, tmp_path: Path) -> None:
    """As in a worker, which gets a copy of the run."""
    run = RunContext(str(tmp_path), "x", execution=Execution(threads_per_task=3), lease="20260101-000000-full-x")
    calls = [{"text": text, "number": 2} for text in "abcdef"]
    with use_root(run):
        worker = pickle.loads(pickle.dumps(run))
        make_outputs(letters, calls, worker, "letters", letters.code_ingredients())
        refs = [letters.key(run, call)[0] for call in calls]
        assert [read_output(run.store, ref).path("a.txt").read_text() for ref in refs] == [
            2 * text for text in "abcdef"
        ]
        state = make_outputs(letters, calls, worker, "letters", letters.code_ingredients())
        assert getattr(state, "name", "") == "Cached"
        with pytest.raises(UserError, match=r"other code than the driver \(code: .* on the worker, 99 in the driver\)"):
            make_outputs(letters, calls, worker, "letters", letters.code_ingredients() | {"code": 99})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (TransientError("s3://corpus/a.txt cannot be reached: timeout."), True),
        (StorageError("a.txt cannot be written: No space left on device."), False),
        (MachineError("Training process 0 of 2 ended with code 1."), False),
        (UserError("a.txt does not exist."), False),
        (Stopped("The run is being stopped."), False),
        (KeyboardInterrupt(), False),
        (ZeroDivisionError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_a_failure_that_may_pass_is_retried(
    error: BaseException, is_retried: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fail() -> None:
        attempts.append(error)
        raise error

    monkeypatch.setattr("flows.executor.RETRY_DELAYS", [0, 0, 0])
    with pytest.raises(type(error)):
        Flow(make_task(fail, "fail"), name="failing")()
    assert len(attempts) == (4 if is_retried else 1)
    assert caplog.text.count("cannot be reached: timeout. Trying again.") == (3 if is_retried else 0)
