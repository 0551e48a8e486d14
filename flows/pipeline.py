"""The flow ``pipeline``: from raw text to sampled text. :mod:`flows.chain` lists the stages."""

from typing import Annotated, Any

from prefect import flow
from pydantic import BeforeValidator

from flows.chain import PIPELINE
from flows.config import PipelineConfig, StageName, complete_config, load_preset
from flows.forecast import check_training_memory
from flows.prefect_support.deployments import check_deployment
from flows.prefect_support.liveness import mark_cancelled_after_ctrl_c
from flows.prefect_support.logging import name_run
from flows.run_stages import TASK_RUNNER, check_device, run_stages

DEFAULTS = load_preset("demo")


@flow(name="pipeline", flow_run_name=name_run, task_runner=TASK_RUNNER, on_crashed=[mark_cancelled_after_ctrl_c])
def pipeline(
    config: Annotated[PipelineConfig, BeforeValidator(complete_config)] = DEFAULTS,
    root: str = "artifacts",
    until: StageName | None = None,
    refresh: tuple[StageName, ...] = (),
) -> dict[str, Any]:
    """Turn raw text into a tokenizer, a trained model and sampled text. Unchanged stages are taken from the cache.

    Args:
        config: Configuration of all stages.
        root: Directory or fsspec URL for all outputs.
        until: Last stage to run; default: all stages.
        refresh: Stages to run again even if they are cached.
    """
    if until in (None, "train", "sample"):  # before hours of other work
        if config.execution.train_deployment:
            check_deployment(config.execution.train_deployment)
        else:
            check_device(config.execution.device)
            check_training_memory(config, root, refresh)
    return run_stages(PIPELINE, config, root, until, refresh)
