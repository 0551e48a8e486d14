"""Going on with a training from the checkpoints that an unfinished run of it left."""

import logging
import shutil
from pathlib import Path
from typing import Any

from lm.checkpoint import newest_checkpoint, read_description
from lm.errors import UserError
from lm.metrics import read_metrics, write_metrics

log = logging.getLogger(__name__)


def take_over(previous: Path, out: Path, ours: dict[str, dict[str, Any]]) -> str | None:
    """Copy the checkpoints of ``previous``, and the rows of its metrics and samples up to the newest, to ``out``, which
    may be the same; returns the newest's name, None where there is none.

    ``ours``: this run's ``model``, ``data`` and ``train``. Raises UserError where the checkpoint is of another model or
    other data, or cannot be copied; warns of another recipe.
    """
    newest = newest_checkpoint(previous)
    if newest is None:
        return None
    description = read_description(newest) or {}
    _check_same(newest, description, ours)
    try:
        for file in ("metrics.jsonl", "samples.jsonl"):
            rows = [row for row in read_metrics(previous / file) if row["step"] <= description["step"]]
            write_metrics(out / file, rows)
        for directory in sorted(previous.glob("step-*")):
            if not read_description(directory):
                if previous == out:
                    shutil.rmtree(directory)
            elif previous != out:
                copy = out / f".{directory.name}.copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(directory, copy)
                copy.rename(out / directory.name)
    except (OSError, shutil.Error) as error:
        raise UserError(
            f"The checkpoints in {previous} cannot be taken over: {error}. Free some space, or wait for another "
            "run of the same training, which may be writing there."
        ) from error
    return newest.name


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
