"""Measure the steps of a configuration's training, from the token shards of a root."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain import PIPELINE
from flows.config import PipelineConfig
from flows.train_job import FindTraining
from lm.common.errors import UserError, translate_write_errors
from tasks.pages.profile import profile_page
from tasks.profile import profile
from tasks.runs.run_record import make_run
from tasks.runtime.root_lock import use_root
from tasks.runtime.stage import open_input
from tasks.train import train


@dataclass(frozen=True)
class ProfileResult:
    """The measurements of a training's steps, and where their files are."""

    directory: Path
    profile: dict[str, Any]
    """Fields of :class:`lm.train.profile.Profile`."""
    page: str
    """The same in Markdown, with pictures."""


def profile_training(config: PipelineConfig, root: str, name: str, steps: int, out: str = "") -> ProfileResult:
    """Measure ``steps`` training steps. Write the files and the page ``profile.md`` to the directory ``out``.

    ``name`` is that of the run; by default, ``out`` is ``profiles/<name>``. Raises UserError if the directory
    cannot be made, and if the stages before the training are not finished.
    """
    directory = Path(out or Path("profiles", name))
    _make_directory(directory)
    run = make_run(config, root, name)
    with use_root(run):
        executor = FindTraining(run)
        list(PIPELINE.run(config, PIPELINE.find_inputs(config, run.store), executor, "train"))
        if not all(action.startswith("cached") for stage, action in executor.rows if stage != train.name):
            raise UserError(f"The stages before train are not finished under {root}.")
        inputs = {key: open_input(value, run.store) for key, value in train.bind(*executor.arguments).items()}
        content = profile(directory, run, steps, **inputs)
    page = profile_page(content)
    with translate_write_errors(directory):
        (directory / "profile.md").write_text(page, encoding="utf-8")
    return ProfileResult(directory, content, page)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The directory {directory} of the profile cannot be made: {error.strerror}.") from None
