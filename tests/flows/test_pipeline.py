"""The whole pipeline under Prefect: which stages are cached, which run again, and with which outputs."""

import logging
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName

from flows.compare_tokenizers import tokenizers
from flows.config import PipelineConfig, StageName
from flows.executor import PrefectExecutor, make_outputs
from flows.pipeline import pipeline, pipeline_stages
from flows.plan import Executor, UntilReached, plan
from flows.prefect_support.signals import Terminated
from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.model.config import ModelConfig
from lm.text.character_tables import tables_identity
from lm.text.config import ChunkConfig, DataConfig
from lm.text.demo_corpus import demo_stories
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.runtime.context import RunContext
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.root_lock import use_root
from tasks.runtime.stage import Stage
from tests.helpers.roots import letters

pytestmark = pytest.mark.usefixtures("prefect_server")

STAGES = [stage for stage in get_args(StageName) if stage != "budget"]  # of a run without a budget


def write_corpus(path: Path, documents: int) -> None:
    path.write_text("".join(demo_stories(documents)), encoding="utf-8")


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    write_corpus(tmp_path / "train.txt", 200)
    write_corpus(tmp_path / "valid.txt", 30)
    return PipelineConfig(
        data=DataConfig(train=[str(tmp_path / "train.txt")], valid=[str(tmp_path / "valid.txt")]),
        chunk=ChunkConfig(target_bytes=16_000),
        tokenizer=TokenizerConfig(vocab_size=300),
        model=ModelConfig(context_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        train=TrainConfig(steps=4, batch_size=2, warmup_steps=1, eval_interval=2, eval_sequences=2, sample_tokens=2),
        sample=SampleConfig(prompts=["Once"], max_new_tokens=3),
        execution=Execution(compile=False),
    )


class Runner:
    """Runs the pipeline over one root. A call returns the stages that the run made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record: dict[str, Any] = {}

    def __call__(self, config: PipelineConfig, **options: Any) -> list[str]:
        self.record = pipeline(config, str(self.root), **options)
        return [name for name, stage in self.record["stages"].items() if stage["state"] == "made"]

    def output(self, stage: str) -> Output:
        return read_output(RunContext(str(self.root), "").store, Ref(stage, self.record["stages"][stage]["key"]))

    def groups(self, stage: str, made_in_last_run: bool = False) -> list[Output]:
        """Return the outputs of a stage for each group of chunks."""
        store = RunContext(str(self.root), "").store
        outputs = [read_output(store, Ref(stage, key)) for key in store.list_names(stage) if not key.endswith(".json")]
        name = self.record["name"]
        return [out for out in outputs if not made_in_last_run or out.manifest["made"]["run"] == name]

    def inputs(self) -> dict[str, set[str]]:
        """Return the stages whose task runs are inputs of the task runs of each stage in the last run, for Prefect."""
        of_run = FlowRunFilter(name=FlowRunFilterName(any_=[self.record["name"]]))
        with get_client(sync_client=True) as client:
            task_runs = client.read_task_runs(flow_run_filter=of_run)
        stages = {task_run.id: task_run.name.partition(" ")[0] for task_run in task_runs}
        parents: dict[str, set[str]] = {stage: set() for stage in stages.values()}
        for task_run in task_runs:
            names = {name for name, found in task_run.task_inputs.items() if found}
            assert names <= {"wait_for", "__parents__"}, "an object with the memory address of an earlier result"
            inputs: list[Any] = task_run.task_inputs.get("wait_for", [])
            parents[stages[task_run.id]] |= {stages[item.id] for item in inputs}
        return parents


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "root")


def test_a_second_run_is_all_cached_and_execution_changes_nothing(run: Runner, config: PipelineConfig) -> None:
    assert run(config) == STAGES
    assert len(run.groups("count-group")) > 3
    assert run(config) == []
    assert run(replace(config, execution=Execution(threads=1, log_interval=3, compile=False))) == []
    assert {action.split(",")[0] for _, action in plan(pipeline_stages, config, str(run.root), None, ())} == {"cached"}


def test_the_plan_of_a_new_root_has_all_stages_up_to_the_last_one(config: PipelineConfig, tmp_path: Path) -> None:
    rows = plan(pipeline_stages, config, str(tmp_path / "root"), None, ())
    assert [name for name, _ in rows] == ["ingest-train", "ingest-valid", *STAGES]
    assert rows[0][1] == "1 of 1 groups: runs: it has no result yet"
    depends = dict(zip(STAGES[1:], STAGES, strict=False))
    assert dict(rows[3:]) == {name: f"runs if the content of {before} changes" for name, before in depends.items()}
    assert plan(pipeline_stages, config, str(tmp_path / "root"), "count", ()) == rows[:5]


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
def test_a_change_reruns_the_stages_that_depend_on_it(run: Runner, config: PipelineConfig) -> None:
    run(config)
    assert run(replace(config, sample=SampleConfig(prompts=["One"], max_new_tokens=3))) == ["sample"]
    longer = replace(config, train=replace(config.train, steps=5))
    rows = dict(plan(pipeline_stages, longer, str(run.root), None, ()))
    assert rows["encode"] == "cached"
    assert rows["train"] == "runs: changed since its last result: parameters.config.steps"
    assert rows["sample"] == "runs if the content of train changes"
    assert run(longer) == ["train", "sample"]
    smaller = replace(config, tokenizer=TokenizerConfig(vocab_size=290))
    assert run(smaller) == ["merge", "encode", "train", "sample"]
    assert not run.groups("count-group", made_in_last_run=True)


def test_character_tables_and_the_version_of_jieba_enter_the_keys_of_what_they_decide(
    config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls(Executor):
        """Runs nothing, and notes the arguments of mapped stages."""

        def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
            return Ref(stage.name, "")

        def read(self, function: Any, *arguments: Any) -> Any:
            return [Ref("groups", "")]

        def map(self, stage: Stage, title: str, items: Any, *arguments: Any) -> list[Ref]:
            bound[title] = stage.bind(None, *arguments)
            return [Ref(stage.name, "")]

    monkeypatch.setattr("flows.pipeline.jieba_version", lambda: "0.42")
    run = RunContext(str(tmp_path / "root"), "")
    for pattern, version in (("gpt2", None), ("jieba", "0.42")):
        bound = dict[str, Any]()
        changed = replace(config, tokenizer=TokenizerConfig(vocab_size=300, pattern=pattern))
        with suppress(UntilReached):
            pipeline_stages(changed, Calls(run, changed, "encode"))
        assert [bound[title].get("jieba") for title in ("count", "encode-train", "encode-valid")] == [version] * 3
        identity = tables_identity(pattern)
        assert [bound[title]["tables"] for title in ("count", "encode-train", "encode-valid")] == [identity] * 3


@pytest.mark.slow
def test_until_stops_and_refresh_reruns(run: Runner, config: PipelineConfig) -> None:
    assert run(config, until="merge") == STAGES[:4]
    assert run(config) == STAGES[4:]
    before = run.output("merge")
    assert run(config, refresh=("merge",)) == ["merge"], "the content is the same, so later stages stay cached"
    assert run.output("merge").manifest["attempt"] != before.manifest["attempt"]
    assert run.output("merge").digest == before.digest
    assert run(config, until="count", refresh=("count",)) == ["count"]
    assert len(run.groups("count-group", made_in_last_run=True)) == len(run.groups("count-group"))


@pytest.mark.slow
def test_a_deleted_shard_is_the_only_one_made_again(run: Runner, config: PipelineConfig) -> None:
    run(config, until="encode")
    shard = run.groups("encode-group")[1]
    content = shard.path("tokens.bin").read_bytes()
    shard.path("tokens.bin").unlink()
    assert run(config, until="encode") == []
    (made,) = run.groups("encode-group", made_in_last_run=True)
    assert made.ref == shard.ref
    assert made.path("tokens.bin").read_bytes() == content


@pytest.mark.slow
def test_a_flipped_byte_is_detected_and_repaired(run: Runner, config: PipelineConfig) -> None:
    run(config)
    for stage in STAGES:
        output = run.output(stage)
        path = output.path(max(output.manifest["files"], key=lambda file: file["bytes"])["path"])
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert run(config) == [stage]
        assert run.output(stage).digest == output.digest


@pytest.mark.slow
def test_appended_documents_change_only_the_last_group(run: Runner, config: PipelineConfig) -> None:
    run(config, until="encode")
    chunks = len(run.groups("count-group"))
    with Path(config.data.train[0]).open("a", encoding="utf-8") as file:
        file.writelines(demo_stories(3, seed=7))
    assert run(config, until="count") == ["ingest", "chunk", "count"]
    assert chunks > 3
    assert len(run.groups("count-group", made_in_last_run=True)) == 1


@pytest.mark.slow
def test_a_deleted_source_is_not_needed_while_its_outputs_exist(
    run: Runner, config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, until="merge")
    Path(config.data.train[0]).unlink()
    assert run(config, until="merge") == []
    assert "does not exist. The outputs made from it are used." in caplog.text
    with pytest.raises(UserError, match=r"train\.txt does not exist"):
        run(config, until="count", refresh=("count",))


@pytest.mark.slow
def test_a_copied_and_a_moved_root_stay_cached(run: Runner, config: PipelineConfig, tmp_path: Path) -> None:
    run(config)
    shutil.copytree(run.root, tmp_path / "copy")
    run.root.rename(tmp_path / "moved")
    assert Runner(tmp_path / "copy")(config) == []
    assert Runner(tmp_path / "moved")(config) == []
    run.root = tmp_path / "elsewhere"
    assert run(config, until="chunk") == STAGES[:2], "Prefect's records of another root have no effect"


@pytest.mark.slow
def test_root_and_thread_count_do_not_change_the_files(config: PipelineConfig, tmp_path: Path) -> None:
    runs = [Runner(tmp_path / name) for name in ("one", "four")]
    for run, threads in zip(runs, (1, 4), strict=True):
        run(replace(config, execution=Execution(threads=threads, compile=False)), until="encode")
    for stage in ("merge", "encode"):
        one, four = (run.output(stage).manifest for run in runs)
        assert one["files"] == four["files"]
    shards = [[group.manifest["files"] for group in run.groups("encode-group")] for run in runs]
    assert shards[0] == shards[1]


@pytest.mark.slow
def test_a_root_that_is_a_url(config: PipelineConfig) -> None:
    """Outputs are uploaded and fetched again, as with an object store.

    This uses one thread, because all readers of a file in fsspec's memory file system share its position.
    """
    config = replace(config, execution=replace(config.execution, threads=1))
    first, second = (pipeline(config, "memory://pipeline-test") for _ in range(2))
    assert [stage["state"] for stage in first["stages"].values()] == ["made"] * 7
    assert [stage["state"] for stage in second["stages"].values()] == ["cached"] * 7


@pytest.mark.slow
def test_without_validation_text(run: Runner, config: PipelineConfig) -> None:
    data = DataConfig(train=config.data.train, valid_fraction=0)
    assert run(replace(config, data=data)) == STAGES
    assert run.output("train").json("training.json")["valid_loss"] is None


def test_a_failed_training_resumes_from_its_checkpoint(
    run: Runner, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, train=replace(config.train, checkpoint_interval=2))

    def stop_after(steps: int) -> Callable[[Any], Any]:
        def save(self: Any) -> None:
            original(self)
            if self.step >= steps:
                raise RuntimeError("power cut")

        return save

    from lm.train.trainer import Trainer

    caplog.set_level(logging.INFO)
    original = Trainer.save
    monkeypatch.setattr(Trainer, "save", stop_after(2))
    with pytest.raises(RuntimeError, match="power cut"):
        run(config)
    monkeypatch.undo()
    assert run(config) == ["train", "sample"]
    assert "Training resumes at step 2" in caplog.text


@pytest.mark.slow
def test_a_training_in_processes_is_resumed_without_its_manifest(
    run: Runner, config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, execution=replace(config.execution, processes=2, trackers=["tensorboard"]))
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    assert run(config)[-2:] == ["train", "sample"]
    output = run.output("train")
    boards = [file["path"] for file in output.manifest["records"] if file["path"].startswith("tensorboard/")]
    assert boards and output.is_intact()
    assert run(replace(config, execution=replace(config.execution, processes=1, trackers=[]))) == []
    # A training without Prefect leaves the same files: checkpoints and metrics, but no manifest.
    digest = output.digest
    (Path(output.url).parent / "manifest.json").unlink()
    caplog.set_level(logging.INFO)
    assert run(config) == ["train"]
    assert run.output("train").digest == digest
    assert "Training resumes at step 4" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "at", "saved", "refresh"),
    [("train_step", 1, 2, ()), ("_finish", 4, 4, ()), ("train_step", 1, 2, ("train",))],
)
def test_ctrl_c_in_a_training_saves_a_checkpoint(
    run: Runner,
    config: PipelineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    at: int,
    saved: int,
    refresh: tuple[StageName, ...],
) -> None:
    from lm.train.trainer import Trainer

    if refresh:
        run(config)
    original = getattr(Trainer, method)

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        if self.step == at:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, refresh=refresh)
    monkeypatch.undo()
    caplog.set_level(logging.INFO)
    assert run(config, refresh=refresh) == (["train"] if refresh else ["train", "sample"])
    assert f"Training resumes at step {saved}" in caplog.text, "the training finishes the step before it stops"


@pytest.mark.parametrize(
    ("interrupt", "state"), [(KeyboardInterrupt, "Cancelled"), (Terminated, "Crashed")], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_run_with_a_wrapped_interrupt_is_cancelled_by_ctrl_c_and_else_a_crash(
    config: PipelineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: type[KeyboardInterrupt],
    state: str,
) -> None:
    def call(*_: Any, **__: Any) -> Ref:
        raise ValueError("Task run is not set") from interrupt()

    monkeypatch.setattr(PrefectExecutor, "call", call)
    with pytest.raises(interrupt):
        pipeline(config, str(tmp_path / "root"))
    assert latest_state() == state


def test_a_comparison_of_tokenizers_that_ctrl_c_stops_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.compare_tokenizers.compare", compare)
    with pytest.raises(KeyboardInterrupt):
        tokenizers([], [])
    assert latest_state() == "Cancelled"


def latest_state() -> str | None:
    """Return the state of the last flow run."""
    with get_client(sync_client=True) as client:
        return max(client.read_flow_runs(), key=attrgetter("created")).state_name


def test_invalid_utf8_is_reported_with_file_and_offset(run: Runner, config: PipelineConfig) -> None:
    Path(config.data.valid[0]).write_bytes(b"fine \xff not")
    with pytest.raises(UserError, match=r"valid\.txt is not UTF-8: byte 0xff at offset 5"):
        run(config)
    assert run(replace(config, data=replace(config.data, invalid_utf8="replace")), until="ingest") == ["ingest"]
    assert run.output("ingest").json("text_groups.json")["statistics"]["valid"]["replaced"] == 1


def test_a_context_longer_than_the_text_is_refused(run: Runner, config: PipelineConfig) -> None:
    long = replace(config, model=replace(config.model, context_length=100_000))
    with pytest.raises(UserError, match="too few for a context of 100,000"):
        run(long)


@pytest.mark.slow
def test_shards_of_another_tokenizer_are_refused(run: Runner, config: PipelineConfig) -> None:
    from tasks.train import train

    run(config, until="encode")
    index = run.output("encode").ref
    run(replace(config, tokenizer=TokenizerConfig(vocab_size=280)), until="merge")
    other = run.output("merge").ref
    with pytest.raises(UserError, match="another tokenizer"):
        train.materialize(RunContext(str(run.root), "x"), train.bind(index, [], [], other, config.model, config.train))


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


def test_a_task_on_a_worker_works_on_several_groups_at_a_time(config: PipelineConfig, tmp_path: Path) -> None:
    """As in a worker, which gets a copy of the run."""
    run = RunContext(str(tmp_path), "x", execution=Execution(threads_per_task=3), lease="20260101-000000-full-x")
    calls = [{"text": text, "number": 2} for text in "abcdef"]
    with use_root(run):
        worker = pickle.loads(pickle.dumps(run))
        made = make_outputs(letters, calls, worker, "letters", letters.code_ingredients())
        refs = [Ref(**ref) for ref in made]
        assert [read_output(run.store, ref).path("a.txt").read_text() for ref in refs] == [
            2 * text for text in "abcdef"
        ]
        assert make_outputs(letters, calls, worker, "letters", letters.code_ingredients()).name == "Cached"
        with pytest.raises(UserError, match=r"other code than the driver \(code: .* on the worker, 99 in the driver\)"):
            make_outputs(letters, calls, worker, "letters", letters.code_ingredients() | {"code": 99})
