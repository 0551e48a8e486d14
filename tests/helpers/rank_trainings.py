"""Small data-parallel trainings of two ranks. ``main``, which ``run_ranks`` calls, is one rank of a case."""

import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lm.checkpoint.training_state import ROW_FILES
from lm.common.errors import UserError
from lm.train.directory_lock import lock_directory
from lm.train.trainer import Trainer
from tests.helpers.ranks import rank_of_test
from tests.helpers.training import small_trainer

_SETTINGS: dict[str, Any] = {"steps": 8, "checkpoint_interval": 3, "eval_interval": 4, "optimizer": "muon"}
_SHORT_TIMEOUT_SECONDS = 5.0


class _Killed(Exception):
    pass


def _train_interrupted(out: Path) -> Trainer:
    def end(step: int) -> None:
        if step == 7:
            raise _Killed

    try:
        small_trainer(out, **_SETTINGS).run(end)
    except _Killed:
        trainer = small_trainer(out, **_SETTINGS)
    assert trainer.resume(out) and trainer.step == 6
    trainer.run()
    return trainer


def resume_without_a_shared_directory(directory: Path, rank: int) -> None:
    """Save the weights of an interrupted and of an uninterrupted training whose ranks have directories of their own."""
    interrupted = _train_interrupted(directory / f"interrupted-{rank}")
    whole = small_trainer(directory / f"whole-{rank}", **_SETTINGS)
    whole.run()
    for name, trainer in (("interrupted", interrupted), ("whole", whole)):
        torch.save(trainer.model.state_dict(), directory / f"{name}-{rank}.pt")
    assert not rank or not {path.name for path in interrupted.out.iterdir()} & {"step-0000006", *ROW_FILES}


def refuse_a_locked_directory(directory: Path, rank: int) -> None:
    """All ranks raise, and the first training keeps its lock."""
    with lock_directory(directory / "out"):
        for _ in range(2):
            try:
                with lock_directory(directory / "out"):
                    raise AssertionError("two trainings in one directory")
            except UserError as error:
                assert "Another program is training in" in str(error)
    with lock_directory(directory / "out"):
        (directory / f"{rank}.done").touch()


def let_rank0_work_alone(directory: Path, rank: int) -> None:
    """Rank 0 saves and samples for longer than the timeout of collectives."""
    trainer = small_trainer(directory / "out", **_SETTINGS)
    save, sample = trainer.save, trainer.objective.sample

    def wait_and_save() -> None:
        time.sleep(0 if rank else _SHORT_TIMEOUT_SECONDS + 3)
        save()

    def wait_and_sample(model: Any) -> Any:
        time.sleep(_SHORT_TIMEOUT_SECONDS + 3)
        return sample(model)

    with patch.multiple(trainer, save=wait_and_save), patch.multiple(trainer.objective, sample=wait_and_sample):
        trainer.run()
    (directory / f"{rank}.done").touch()


def main() -> None:
    directory, case = Path(sys.argv[1]), globals()[sys.argv[2]]
    if case is let_rank0_work_alone:
        timeout = timedelta(seconds=_SHORT_TIMEOUT_SECONDS)
        dist.init_process_group = partial(dist.init_process_group, timeout=timeout)
    with rank_of_test() as rank:
        case(directory, rank)
