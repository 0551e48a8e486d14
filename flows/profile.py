"""The flow ``profile``: where the time and the memory of a training's steps go."""

from typing import Annotated

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from pydantic import BeforeValidator, PositiveInt

from flows.chain import PIPELINE
from flows.config import PipelineConfig, complete_config, load_preset
from flows.prefect_support.liveness import mark_cancelled_after_ctrl_c
from flows.prefect_support.logging import ArtifactPublisher
from flows.profile_training import ProfileResult, profile_training
from flows.run_stages import TASK_RUNNER, check_device, run_stages
from tasks.pages.profile import describe
from tasks.runs.run_record import make_run, run_name

DEFAULTS = load_preset("demo")

_measure = Task(profile_training, name="profile", task_run_name="profile", cache_policy=NO_CACHE, persist_result=False)


def _name_run() -> str:
    return run_name("profile", flow_run.name or "run")


@flow(name="profile", flow_run_name=_name_run, task_runner=TASK_RUNNER, on_crashed=[mark_cancelled_after_ctrl_c])
def profile(
    config: Annotated[PipelineConfig, BeforeValidator(complete_config)] = DEFAULTS,
    root: str = "artifacts",
    steps: PositiveInt = 5,
    out: str = "",
) -> ProfileResult:
    """Measure time, memory and FLOPs of training steps. The stages before the training run unless they are cached.

    Args:
        config: Configuration of all stages.
        root: Directory or fsspec URL of the stages' outputs.
        steps: Training steps to measure.
        out: Directory of the files; default: profiles/ and the name of the run.
    """
    check_device(config.execution.device)
    run_stages(PIPELINE, config, root, "encode", ())
    result = _measure(config, root, flow_run.name, steps, out)
    ArtifactPublisher(make_run(config, root, flow_run.name).label).publish(
        "profile", f"# profile\n\n{result.page}", describe(result.profile)
    )
    return result
