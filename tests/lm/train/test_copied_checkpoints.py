"""The checkpoints of an earlier attempt, which a new one copies."""

import errno
import shutil
from pathlib import Path

import pytest

from lm.common.errors import StorageError
from lm.train.trainer import Trainer
from tests.helpers.training import small_trainer


def test_an_interrupted_copy_leaves_no_old_checkpoint(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next attempt would resume from it, and not from the newest one where the copy came from."""
    copy_tree = shutil.copytree
    copied: list[Path] = []

    def fill_disk(source: Path, target: Path) -> None:
        if copied:
            raise OSError(errno.ENOSPC, "No space left on device")
        copied.append(copy_tree(source, target))

    trainer = small_trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", fill_disk)
        with pytest.raises(StorageError, match=r"cannot be copied.*No space left"):
            trainer.resume(finished.out)
    assert copied and not [path.name for path in tmp_path.iterdir() if "step-" in path.name]
    assert trainer.resume(finished.out) and trainer.step == 20
