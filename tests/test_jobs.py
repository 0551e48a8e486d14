"""A training as a job in a file: stopped or killed at any moment, the same command goes on to the same end."""

import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lm.train import INTERRUPTED, Job, main
from tasks.train import reads_the_same
from tests.training import MODEL, ROOT, rows_of, wait_until, write_job

KILLS = int(os.environ.get("TEXTMILL_KILLS", "2"))  # each costs a start of some seconds


def weights_of(job: Path, step: int) -> bytes:
    return (job.parent / f"step-{step:07d}" / "model.safetensors").read_bytes()


def test_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at random moments; the figures and weights are those of a run that was left alone."""
    steps = 200 * KILLS
    straight, job = (write_job(tmp_path / name, steps=steps, checkpoint_interval=7) for name in ("straight", "killed"))
    Job.read(straight).run()
    draws = random.Random(0)
    metrics = job.parent / "metrics.jsonl"

    def size() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    for _ in range(KILLS):
        before = size()
        process = subprocess.Popen([sys.executable, "-m", "lm.train", str(job)], cwd=ROOT, stderr=subprocess.DEVNULL)
        assert wait_until(lambda before=before: size() != before, 60)  # type: ignore[misc]
        try:
            process.wait(draws.uniform(0, 0.5))
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.wait() < 0, "killed, and not at its end"
    assert main([str(job)]) == 0
    assert rows_of(job.parent) == rows_of(straight.parent)
    assert weights_of(job, steps) == weights_of(straight, steps)


def test_a_job_alone_in_a_process(tmp_path: Path) -> None:
    """python -m lm.train: SIGTERM ends it with a code of its own, and the same command goes on."""
    job = write_job(tmp_path, steps=50)
    command = [sys.executable, "-c", SLOW, str(job)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: (job.parent / "metrics.jsonl").exists(), 60)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == INTERRUPTED
    assert "was stopped after step" in said.splitlines()[-1] and "Traceback" not in said
    assert main([str(job)]) == 0
    straight = write_job(tmp_path / "straight", steps=50)
    Job.read(straight).run()
    assert rows_of(job.parent) == rows_of(straight.parent)
    assert weights_of(job, 50) == weights_of(straight, 50)


SLOW = """
import sys, time
import lm.trainer
from lm.train import main
step = lm.trainer.Trainer._train_step
lm.trainer.Trainer._train_step = lambda *rest: (time.sleep(0.1), step(*rest))[1]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not the job of a training"),
        ("{}", "is not the job of a training"),
        ('{"config": 1}', "is not the job of a training"),
    ],
)
def test_a_bad_job_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, named: str
) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    assert main([str(tmp_path / "job.json")]) == 2
    assert named in capsys.readouterr().err


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job.read(write_job(tmp_path))
    assert asdict(job.model) == asdict(MODEL) and job.config.steps == 20
    assert Path(job.out).resolve() == (tmp_path / "out").resolve()
    assert Path(job.train[0]).resolve() == (tmp_path / "train.bin").resolve()


def test_checkpoints_of_data_that_was_made_anew_are_not_gone_on_from(tmp_path: Path) -> None:
    """What was made anew was damaged, perhaps while the earlier attempt read it."""
    path = write_job(tmp_path)
    job = Job.read(path)
    assert reads_the_same(path.parent, job)
    assert not reads_the_same(path.parent, replace(job, train=[str(tmp_path / "other-attempt" / "train.bin")]))
    path.unlink()
    assert not reads_the_same(path.parent, job)
