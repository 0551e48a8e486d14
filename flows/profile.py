"""The flow ``profile``: where the time and the memory of a training's steps go, measured on the shards of a root."""

import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flows.config import PipelineConfig, complete
from flows.pipeline import find_cached_training, pipeline_stages
from lm.common.errors import UserError, translate_write_errors
from tasks.pages.profile import describe, profile_page
from tasks.runs.run_record import make_run, run_name
from tasks.runtime.locks import training_slot, use_root
from tasks.runtime.stage import open_input
from tasks.train import local_path, make_job, train

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileResult:
    """The measurements of a training's steps, and where their files are."""

    directory: Path
    profile: dict[str, Any]
    """Fields of :class:`lm.train.profile.Profile`."""
    page: str
    """The same in Markdown, with pictures."""


def profile_training(config: PipelineConfig, root: str, name: str, steps: int, out: str = "") -> ProfileResult:
    """Measure ``steps`` training steps in the processes of ``config.execution``. Write the files of
    :func:`lm.train.profile.profile_training` and the page ``profile.md`` to the directory ``out``.

    ``name`` is that of the run; by default, ``out`` is ``profiles/<name>``. Raises UserError if the directory
    cannot be made, and if the stages before the training are not finished.
    """
    from lm.distributed.launch import run_processes
    from lm.train.profile import PROFILE_FILE, ProfileJob

    directory = Path(out or Path("profiles", name))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The directory {directory} of the profile cannot be made: {error.strerror}.") from None
    run = make_run(config, root, name)
    with use_root(run):
        training = find_cached_training(config, run)
        if training is None:
            raise UserError(f"The stages before train are not finished under {root}.")
        inputs = {key: open_input(value, run.store) for key, value in train.bind(*training.arguments).items()}
        job = make_job(lambda output, name: str(local_path(output, name).resolve()), run.execution, **inputs)
        job, path = ProfileJob.of(job, steps), directory / "job.json"
        job.write(path)
        with training_slot(run):
            log.info("Measuring %d steps.", steps)
            if job.execution.processes > 1:
                run_processes("lm.train", path, job.execution.processes, lambda: None, run.stopping)
            else:
                with job.read(path).prepare() as measure:
                    measure(stop_event=run.stopping)
    content = json.loads((directory / PROFILE_FILE).read_text(encoding="utf-8"))
    page = "\n\n".join(profile_page(content))
    with translate_write_errors(directory):
        (directory / "profile.md").write_text(page, encoding="utf-8")
    return ProfileResult(directory, content, page)


profile: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "profile":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow
    from prefect.runtime import flow_run
    from pydantic import BeforeValidator, PositiveInt

    from flows.executor import FLOW_OPTIONS, check_device, make_task, run_stages
    from flows.prefect_support.logging import ArtifactPublisher

    demo = PipelineConfig.load_preset("demo")
    validator = BeforeValidator(functools.partial(complete, default=demo))
    options = FLOW_OPTIONS | {"flow_run_name": lambda: run_name("profile", flow_run.name or "run")}

    @flow(name="profile", **options)
    def profile(
        config: Annotated[PipelineConfig, validator] = demo,
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
        run_stages(pipeline_stages, config, root, "encode", ())
        result: ProfileResult = make_task(profile_training, "profile")(config, root, flow_run.name, steps, out)
        ArtifactPublisher(make_run(config, root, flow_run.name).label).publish(
            "profile", f"# profile\n\n{result.page}", describe(result.profile)
        )
        return result

    return profile
