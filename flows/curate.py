"""The flow ``curate``: read text, filter it, remove copies, and write it for other tools."""

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from flows.config import FlowConfig, PipelineConfig, complete, why_not_curated
from flows.plan import Executor
from flows.text import find_text, read_text
from lm.curate.config import DecontaminateConfig, DeduplicateConfig, FilterConfig, TextFormat
from lm.text.config import DataConfig
from tasks.export_text import export, export_group
from tasks.runtime.execution import Execution

CurateStage = Literal["ingest", "classifier", "filter", "deduplicate", "repeats", "decontaminate", "export"]


@dataclass(frozen=True)
class CurateConfig(FlowConfig):
    """Configuration of the flow ``curate``."""

    STAGES = get_args(CurateStage)
    PRESETS = PipelineConfig.PRESETS / "curate"

    name: str = "curate-demo"
    """Name of the run, for textmill runs. It has no effect on results. Default: two words at random."""
    data: DataConfig = field(default_factory=DataConfig)
    """Sources of the text."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Rules that remove documents. Off by default."""
    deduplicate: DeduplicateConfig = field(default_factory=DeduplicateConfig)
    """Removal of copies of documents. Off by default."""
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    """Removal of training text that a model is tested on. Off by default."""
    format: TextFormat = "jsonl.zst"
    """Format of the files: jsonl.zst or parquet. Each row has a document in the field text."""
    execution: Execution = field(default_factory=Execution)
    """How the work runs on this machine. It never causes a stage to run again."""

    def why_missing(self, stage: str) -> str:
        """Return why a run with this configuration has no such stage; empty if it has one."""
        return why_not_curated(self, stage)


def curate_stages(config: CurateConfig, executor: Executor) -> None:
    """Run all stages. The text is the same as that of the pipeline with the same options, and shares its cache."""
    inputs = executor.find_inputs(find_text)
    _, train, valid = read_text(config, inputs, [], executor)
    write_as = config.data.separator, config.format
    train_files = executor.map(export_group, "export-train", train, *write_as)
    valid_files = executor.map(export_group, "export-valid", valid, *write_as)
    executor.finish(executor.call(export, train_files, valid_files, config.format))


curate: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "curate":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow
    from pydantic import BeforeValidator

    from flows.executor import FLOW_OPTIONS, run_stages

    demo = CurateConfig.load_preset("demo")
    validator = BeforeValidator(functools.partial(complete, default=demo))

    @flow(name="curate", **FLOW_OPTIONS)
    def curate(
        config: Annotated[CurateConfig, validator] = demo,
        root: str = "artifacts",
        until: CurateStage | None = None,
        refresh: tuple[CurateStage, ...] = (),
    ) -> dict[str, Any]:
        """Filter text, remove copies, and write it as JSON Lines or Parquet. Unchanged stages are cached.

        Args:
            config: Configuration of all stages.
            root: Directory or fsspec URL for all outputs.
            until: Last stage to run; default: all stages.
            refresh: Stages to run again even if they are cached.
        """
        return run_stages(curate_stages, config, root, until, refresh)

    return curate
