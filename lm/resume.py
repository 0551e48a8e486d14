"""Going on with a training from the checkpoints that an unfinished run of it left."""

import logging
import shutil
from pathlib import Path
from typing import Any

from lm.checkpoint import read_description, step_name
from lm.errors import UserError
from lm.metrics import read_metrics, write_metrics

log = logging.getLogger(__name__)


def take_over(previous: Path, out: Path, ours: dict[str, dict[str, Any]]) -> str | None:
    """Copy the intact checkpoints of ``previous``, and the rows of its metrics and samples up to the newest, to
    ``out``, which may be the same; returns the newest's name, None where there is none.

    Where the best checkpoint is damaged, only those before it are taken, as another would be the best in the end.
    ``ours``: this run's ``model``, ``data`` and ``train``. Raises UserError where the checkpoint is of another model or
    other data, or cannot be copied; warns of another recipe.
    """
    found = {path: read_description(path) for path in sorted(previous.glob("step-*"))}
    damaged = {path.name for path, about in found.items() if about is None}
    intact = {path: about for path, about in found.items() if about}
    whole = {about["step"]: path for path, about in intact.items() if step_name(_best(path, about)) not in damaged}
    step = max(whole, default=-1)
    taken = [path for path, about in intact.items() if about["step"] <= step]
    if taken:
        _check_same(whole[step], intact[whole[step]], ours)
    try:
        if previous == out:
            for directory in found.keys() - taken:
                shutil.rmtree(directory)
        if not taken:
            return None
        for file in ("metrics.jsonl", "samples.jsonl"):
            rows = [row for row in read_metrics(previous / file) if row["step"] <= step]
            write_metrics(out / file, rows)
        if previous != out:
            for directory in taken:
                copy = out / f".{directory.name}.copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(directory, copy)
                copy.rename(out / directory.name)
    except (OSError, shutil.Error) as error:
        raise UserError(
            f"The checkpoints in {previous} cannot be taken over: {error}. Free some space, or wait for another "
            "run of the same training, which may be writing there."
        ) from error
    return whole[step].name


def _best(path: Path, about: dict[str, Any]) -> int:
    """The step of the best checkpoint when this one was saved."""
    match about:
        case {"best": {"step": int(step)}, "stale": int(), "skipped": int(), "skipped_in_a_row": int()}:
            return step
    raise UserError(
        f"{path} is no checkpoint of a training that this version can go on with; train into another place."
    )


def _check_same(newest: Path, description: dict[str, Any], ours: dict[str, dict[str, Any]]) -> None:
    for section in ("model", "data"):
        wanted, found = ours[section], description.get(section, {})
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise UserError(
                    f"{newest} was made with {section} {name} {found.get(name)}, and this run has "
                    f"{wanted.get(name)}; go on with the same, or train into another directory."
                )
    wanted, found = ours["train"], description.get("train", {})
    if changed := [name for name in wanted if name != "steps" and wanted[name] != found.get(name, wanted[name])]:
        log.warning("Training goes on with another %s than before.", ", ".join(changed))
