"""A small pipeline, and its runs over one root."""

from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import TaskRun

from flows.config import PipelineConfig
from flows.pipeline import pipeline
from lm.inference.config import SampleConfig
from lm.model.config import ModelConfig
from lm.text.config import ChunkConfig, DataConfig
from lm.text.demo_corpus import demo_stories
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.helpers.limits import wait_for

STAGES = PipelineConfig().stage_names()  # of a run without optional ones


def write_corpus(path: Path, documents: int) -> None:
    path.write_text("".join(demo_stories(documents)), encoding="utf-8")


def make_config(folder: Path) -> PipelineConfig:
    """Return a small configuration of a text that is written to a folder."""
    write_corpus(folder / "train.txt", 200)
    write_corpus(folder / "valid.txt", 30)
    return PipelineConfig(
        data=DataConfig(train=[str(folder / "train.txt")], valid=[str(folder / "valid.txt")]),
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
        made = {name for name, stage in self.record["stages"].items() if stage["state"] == "made"}

        def read_stages() -> tuple[list[TaskRun], dict[UUID, str]] | None:
            task_runs = client.read_task_runs(flow_run_filter=of_run)
            stages = {task_run.id: task_run.name.partition(" ")[0] for task_run in task_runs}
            inputs: list[Any] = [item for task_run in task_runs for item in task_run.task_inputs.get("wait_for", [])]
            is_complete = made <= set(stages.values()) and all(item.id in stages for item in inputs)
            return (task_runs, stages) if is_complete else None

        with get_client(sync_client=True) as client:  # the server writes task runs down after it got their events
            task_runs, stages = wait_for(read_stages, 60, "the record of all task runs")
        parents: dict[str, set[str]] = {stage: set() for stage in stages.values()}
        for task_run in task_runs:
            names = {name for name, found in task_run.task_inputs.items() if found}
            assert names <= {"wait_for", "__parents__"}, "an object with the memory address of an earlier result"
            inputs: list[Any] = task_run.task_inputs.get("wait_for", [])
            parents[stages[task_run.id]] |= {stages[item.id] for item in inputs}
        return parents
