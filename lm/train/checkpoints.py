"""The checkpoints of a training: save, delete old ones, adopt the checkpoints of an unfinished training."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch.optim import Optimizer

from lm.checkpoint.training_checkpoint import (
    ROW_FILES,
    newest_checkpoint,
    read_description,
    save_training,
    step_directories,
    step_name,
)
from lm.checkpoint.training_snapshot import TrainingSnapshot
from lm.common.errors import StorageError, UserError
from lm.distributed.plan import Parallel
from lm.files.atomic_dir import hold_shared_lock
from lm.model.transformer import TransformerLM
from lm.train.tracking import iterate_metrics, write_metrics

log = logging.getLogger(__name__)
AVERAGE_NAME = "average"
"""The checkpoint of the weights averaged over the last steps. No training resumes from it."""


def save_checkpoint(
    directory: Path,
    model: TransformerLM,
    optimizers: list[Optimizer],
    step: int,
    description: dict[str, Any],
    parallel: Parallel,
    snapshot: TrainingSnapshot | None = None,
) -> None:
    """Save a checkpoint, see :func:`lm.checkpoint.training_checkpoint.save_training`.

    Raises StorageError if it cannot be written, e.g. on a full disk.
    """
    try:
        save_training(directory, model, optimizers, step, description, parallel, snapshot)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise the latter two
        newest = newest_checkpoint(directory.parent)
        raise StorageError(
            f"The checkpoint of step {step:,} cannot be saved in {directory.parent}: {error}. Free some space there; "
            f"{f'the training resumes from {newest}' if newest else 'no checkpoint was saved'}."
        ) from error


def prune_checkpoints(out: Path, keep: int, best_step: int, off_schedule_checkpoint: Path | None) -> None:
    """Delete all checkpoints in ``out`` except the newest ``keep`` on schedule and the best one."""
    # A resumed run must keep the same checkpoints as an undisturbed one: they are part of the output.
    paths = step_directories(out)
    kept = [path for path in paths if path != off_schedule_checkpoint][-keep:]
    for path in paths:
        if path not in kept and path.name != step_name(best_step):
            shutil.rmtree(path)


class Resumable(NamedTuple):
    """The checkpoints with which an unfinished training can be resumed."""

    step: int = 0
    """Step of the newest one."""
    name: str = ""
    """Name of its directory. Empty if there is none."""
    paths: Sequence[Path] = ()
    """Directories of all."""
    description: dict[str, Any] = {}  # noqa: RUF012
    """Description of the newest one, see :func:`lm.checkpoint.training_checkpoint.read_description`."""


def find_resumable(previous: Path, settings: dict[str, dict[str, Any]]) -> Resumable:
    """Return the checkpoints in the directory of an unfinished training whose checksums match.

    Checkpoints that name a damaged best checkpoint are ignored. Otherwise the run would call a worse one its best.
    ``settings`` are the sections model, train, data and maybe adapter. Raises UserError if one of the newest checkpoint
    differs, except train, whose differences are logged as a warning.
    """
    descriptions = {path: read_description(path) for path in step_directories(previous)}
    intact = {path: description for path, description in descriptions.items() if description is not None}
    damaged_names = {path.name for path in descriptions.keys() - intact.keys()}
    resumable = {
        description["step"]: path
        for path, description in intact.items()
        if step_name(_best_step(path, description)) not in damaged_names
    }
    if not resumable:
        return Resumable()
    step = max(resumable)
    newest = resumable[step]
    _check_settings(newest, intact[newest], settings)
    paths = [path for path, description in intact.items() if description["step"] <= step]
    return Resumable(step, newest.name, paths, intact[newest])


def adopt_checkpoints(previous: Path, out: Path, resumable: Resumable) -> None:
    """Copy the checkpoints of an unfinished training from ``previous`` to ``out``, so that it can be resumed there.

    If ``previous`` is ``out``, all other checkpoints are deleted instead. Rows (``ROW_FILES``) after the newest
    checkpoint are dropped. Raises StorageError if a file cannot be copied.
    """
    try:
        if previous == out:
            for path in set(step_directories(previous)) - set(resumable.paths):
                shutil.rmtree(path)
        if not resumable.paths:
            return
        for name in ROW_FILES:
            rows = (row for row in iterate_metrics(previous / name) if row["step"] <= resumable.step)
            write_metrics(out / name, rows)
            if (out / name).stat().st_size == 0:
                (out / name).unlink()
        if previous != out:
            # Under their names only when all are there: else the next run may resume from an old one.
            copies = {path: out / f".{path.name}.copy" for path in resumable.paths}
            with hold_shared_lock(out):
                try:
                    for path, copy in copies.items():
                        shutil.rmtree(copy, ignore_errors=True)
                        shutil.copytree(path, copy)
                    for path, copy in copies.items():
                        copy.rename(out / path.name)
                finally:
                    for copy in copies.values():
                        shutil.rmtree(copy, ignore_errors=True)
    except (OSError, shutil.Error) as error:
        raise StorageError(
            f"The checkpoints in {previous} cannot be copied: {error}. Free some space, or wait for another run of the "
            "same training, which may be writing there."
        ) from error


def _best_step(path: Path, description: dict[str, Any]) -> int:
    """Return the step of the best checkpoint when this checkpoint was saved."""
    match description:
        case {
            "best": {"step": int(step)},
            "evaluations_without_improvement": int(),
            "skipped_steps": int(),
            "consecutive_skipped_steps": int(),
        }:
            return step
    raise UserError(
        f"{path} was not saved by this version's training loop and cannot be resumed; train into another directory."
    )


def _check_settings(checkpoint: Path, description: dict[str, Any], settings: dict[str, dict[str, Any]]) -> None:
    for section in ("model", "data", "adapter"):
        current, saved = settings.get(section, {}), description.get(section, {})
        for name in sorted(current.keys() | saved.keys()):
            if current.get(name) != saved.get(name):
                raise UserError(
                    f"{checkpoint} was made with {section} {name} {saved.get(name)}, and this run has "
                    f"{current.get(name)}; use the same {section}, or train into another directory."
                )
    current, saved = settings["train"], description.get("train", {})
    if changed := [name for name in current if name != "steps" and current[name] != saved.get(name, current[name])]:
        log.warning("The training resumes with another value of %s than before.", ", ".join(changed))
