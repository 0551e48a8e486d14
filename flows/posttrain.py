"""The flow ``posttrain``: from a model that continues text to one that does what it is asked.

:mod:`flows.posttrain_chain` lists the stages.
"""

from typing import Annotated, Any

from prefect import flow
from pydantic import BeforeValidator

from flows.posttrain_chain import POSTTRAIN
from flows.posttrain_config import PosttrainConfig, PosttrainStage, complete_posttrain_config, load_posttrain_preset
from flows.prefect_support.liveness import mark_cancelled_after_ctrl_c
from flows.prefect_support.logging import name_run
from flows.run_stages import TASK_RUNNER, check_device, run_stages

DEFAULTS = load_posttrain_preset("demo")


@flow(name="posttrain", flow_run_name=name_run, task_runner=TASK_RUNNER, on_crashed=[mark_cancelled_after_ctrl_c])
def posttrain(
    config: Annotated[PosttrainConfig, BeforeValidator(complete_posttrain_config)] = DEFAULTS,
    root: str = "artifacts",
    until: PosttrainStage | None = None,
    refresh: tuple[PosttrainStage, ...] = (),
) -> dict[str, Any]:
    """Fine-tune a trained model on dialogs, preferences or rewards. Unchanged stages are taken from the cache.

    Args:
        config: Configuration of all stages.
        root: Directory or fsspec URL of the base model's run and of all outputs.
        until: Last stage to run; default: all stages.
        refresh: Stages to run again even if they are cached.
    """
    if until not in ("base", "dialogs"):
        check_device(config.execution.device)
    return run_stages(POSTTRAIN, config, root, until, refresh)
