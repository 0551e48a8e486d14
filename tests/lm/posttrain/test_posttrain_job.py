"""Post-trainings from job files: killed at any time, the same command resumes to the same result."""

import os
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.posttrain.job import PosttrainJob
from lm.train.__main__ import main
from lm.train.metrics_file import read_metrics
from tests.helpers.posttraining import write_posttrain_job
from tests.helpers.training import start_and_kill

KILLS = int(os.environ.get("TEXTMILL_KILLS", "2"))
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "preference": {},
    "reinforce": {"group_size": 2, "updates_per_epoch": 2, "max_new_tokens": 8, "importance_reweighting": "grpo"},
}


def results(job: Path) -> dict[str, bytes]:
    """Return the files that a resumed training must have like a whole one: weights, optimizer, samples, responses."""
    names = [*job.parent.glob("step-*/*.*"), job.parent / "samples.jsonl", *job.parent.glob("r*.jsonl")]
    return {str(path.relative_to(job.parent)): path.read_bytes() for path in names}


@pytest.mark.parametrize("method", SETTINGS)
def test_a_method_trains_and_records_its_metrics(tmp_path: Path, method: str) -> None:
    job = write_posttrain_job(tmp_path, method, SETTINGS[method])
    result = PosttrainJob.read(job).run()
    assert result["steps"] == 6 and (job.parent / result["best"]).is_dir()
    rows = read_metrics(job.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows if any(name.startswith("valid_") for name in row)} == {3, 6}
    own = {"sft": set(), "preference": {"margin"}, "reinforce": {"reward", "entropy", "response_tokens"}}[method]
    assert all(own <= row.keys() for row in rows)
    samples = read_metrics(job.parent / "samples.jsonl")
    assert [sample["prompt"] for sample in samples] == ["say a"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("method", SETTINGS)
def test_killed_again_and_again(tmp_path: Path, method: str) -> None:
    config = {"steps": 30 * KILLS, "checkpoint_interval": 3}
    whole, job = (write_posttrain_job(tmp_path / name, method, SETTINGS[method], **config) for name in ("a", "b"))
    PosttrainJob.read(whole).run()
    start_and_kill("lm.posttrain", job, KILLS)
    assert main([str(job)], PosttrainJob) == 0
    assert results(job) == results(whole)


def test_a_damaged_job_is_named(tmp_path: Path) -> None:
    job = write_posttrain_job(tmp_path, "sft")
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"train.jsonl is not a file of the stage dialogs"):
        PosttrainJob.read(job).run()
    job.write_text('{"method": "sft"}')
    with pytest.raises(UserError, match="is not the job of a training"):
        PosttrainJob.read(job)
