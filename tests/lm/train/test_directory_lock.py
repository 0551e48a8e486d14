"""One training at a time writes to a directory."""

import json
from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.train.__main__ import main
from lm.train.pretraining import Job
from lm.train.profile import ProfileJob
from lm.train.training_job import lock_directory
from tests.helpers.ranks import run_ranks
from tests.helpers.training import read_rows, train_here, write_job


def test_a_second_training_of_a_job_is_refused_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, steps=4)
    train_here(Job.read(job))
    before = {path: path.read_bytes() for path in job.parent.rglob("*") if path.is_file()}
    with lock_directory(job.parent):
        assert main([str(job)]) == 2
    assert f"Another program is training in {job.parent}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in job.parent.rglob("*") if path.is_file()} == before
    assert main([str(job)]) == 0


def test_another_job_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    """A training by hand, and a profile."""
    path = write_job(tmp_path / "first", steps=4)
    job = Job.read(write_job(tmp_path / "second", steps=4))
    job.out = str(path.parent)
    with lock_directory(path.parent):
        for other in (job, ProfileJob.of(job, 1)):
            with pytest.raises(UserError, match="Another program is training in"):
                train_here(other)
    assert not (path.parent / "metrics.jsonl").exists()


def test_the_lock_of_a_killed_training_is_free(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=4)
    (job.parent / "training.lock").touch()
    train_here(Job.read(job))
    assert len(read_rows(job.parent)) == 4 and json.loads((job.parent / "training.json").read_text())
    assert not (job.parent / "training.lock").exists(), "it would be a file of the output"


@pytest.mark.slow
def test_all_ranks_refuse_a_locked_directory(tmp_path: Path) -> None:
    run_ranks("tests.helpers.rank_trainings", tmp_path, "refuse_a_locked_directory", world_size=2)
    assert len([*tmp_path.glob("*.done")]) == 2
