"""The flow ``sweep``: trainings that differ in some options, compared. :mod:`flows.sweep_chain` lists the stages."""

from typing import Annotated, Any

from prefect import flow
from pydantic import BeforeValidator

from flows.prefect_support.liveness import mark_cancelled_after_ctrl_c
from flows.prefect_support.logging import name_run
from flows.run_stages import TASK_RUNNER, check_device, run_stages
from flows.sweep_chain import SWEEP
from flows.sweep_config import SweepConfig, SweepStage, complete_sweep_config, load_sweep, with_trials

DEFAULTS = load_sweep("learning-rate", "demo")


@flow(name="sweep", flow_run_name=name_run, task_runner=TASK_RUNNER, on_crashed=[mark_cancelled_after_ctrl_c])
def sweep(
    config: Annotated[SweepConfig, BeforeValidator(complete_sweep_config)] = DEFAULTS,
    root: str = "artifacts",
    refresh: tuple[SweepStage, ...] = (),
) -> dict[str, Any]:
    """Train a model at each point of a sweep, and compare them. Finished points are taken from the cache.

    Args:
        config: The sweep: the base configuration, and what varies.
        root: Directory or fsspec URL of all outputs.
        refresh: Stages to run again even if they are cached. A refresh of train includes the trials.
    """
    check_device(config.execution.device)
    return run_stages(SWEEP, config, root, None, with_trials(refresh))
