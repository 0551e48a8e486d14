"""Directories of checkpoints: an earlier attempt's, which a new one copies, and those that killed processes left."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lm.common.errors import StorageError
from lm.train.trainer import Trainer
from tests.helpers.training import ROOT, small_trainer


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


WRITER = """
import sys, time
from pathlib import Path
from lm.files.atomic_dir import atomic_directory

with atomic_directory(Path(sys.argv[1]) / "step-0000005") as temporary:
    (temporary / "half").write_text("half")
    print(flush=True)
    time.sleep(600)  # killed during this
"""


def test_temporary_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    (tmp_path / ".step-0000003.copy").mkdir()
    (tmp_path / ".step-of-mine").mkdir()
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        temporary = tmp_path / f".step-0000005.{process.pid}.tmp"
        small_trainer(tmp_path)
        assert (temporary / "half").exists() and (tmp_path / ".step-0000003.copy").exists()
        process.kill()
    assert temporary.exists(), "killed before it could clean up"
    small_trainer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".step-of-mine"]
