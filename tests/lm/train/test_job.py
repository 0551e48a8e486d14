"""Trainings from job files: stopped or killed at any time, the same command resumes to the same result."""

import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from lm.distributed.launch import INTERRUPTED_EXIT_CODE
from lm.train.__main__ import main
from lm.train.pretraining import Job
from tasks.runtime.training_process import has_same_inputs
from tests.helpers.limits import wait_for
from tests.helpers.training import MODEL, ROOT, read_rows, start_and_kill, train_here, write_job

KILLS = int(os.environ.get("TEXTMILL_KILLS", "2"))  # each takes some seconds


def weights_of(job: Path, step: int) -> bytes:
    return (job.parent / f"step-{step:07d}" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at random times; metrics and weights equal those of an uninterrupted run."""
    steps = 200 * KILLS
    whole, job = (write_job(tmp_path / name, steps=steps, checkpoint_interval=7) for name in ("whole", "killed"))
    train_here(Job.read(whole))
    start_and_kill("lm.train", job, KILLS)
    assert main([str(job)]) == 0
    assert read_rows(job.parent) == read_rows(whole.parent)
    assert weights_of(job, steps) == weights_of(whole, steps)


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from lm.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_five_thousand_shards_within_256_open_files(tmp_path: Path) -> None:
    """An 80 GB corpus has that many. Metrics and weights equal those of one shard with the same tokens."""
    whole, cut = (write_job(tmp_path / name, sample_prompts=[], checkpoint_interval=20) for name in ("whole", "cut"))
    tokens = np.random.default_rng(1).integers(97, 107, 10_000).astype("<u2")
    tokens.tofile(tmp_path / "whole" / "train.bin")
    shards = tmp_path / "cut" / "shards"
    shards.mkdir()
    for number, piece in enumerate(np.split(tokens, 5_000)):
        piece.tofile(shards / f"{number}.bin")
    job = Job.read(cut)
    job.train = [f"../shards/{number}.bin" for number in range(5_000)]
    job.write(cut)
    subprocess.run([sys.executable, "-c", FEW_FILES, str(cut)], cwd=ROOT, check=True, timeout=300)
    train_here(Job.read(whole))
    assert read_rows(cut.parent) == read_rows(whole.parent)
    assert weights_of(cut, 20) == weights_of(whole, 20)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_alone_in_a_process(tmp_path: Path, number: int) -> None:
    """python -m lm.train: a signal ends it with its own exit code, and the same command resumes. With SIGHUP, the
    terminal is gone: nothing can be printed any more."""
    job = write_job(tmp_path, steps=50)
    command = [sys.executable, "-c", SLOW, str(job)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for((job.parent / "metrics.jsonl").exists, 60, "metrics.jsonl")
    assert process.stderr is not None
    if number == signal.SIGHUP:
        process.stderr.close()
    process.send_signal(number)
    assert process.wait(60) == INTERRUPTED_EXIT_CODE
    if number == signal.SIGTERM:
        output = process.stderr.read()
        assert "was stopped after step" in output.splitlines()[-1] and "Traceback" not in output
    assert main([str(job)]) == 0
    uninterrupted = write_job(tmp_path / "uninterrupted", steps=50)
    train_here(Job.read(uninterrupted))
    assert read_rows(job.parent) == read_rows(uninterrupted.parent)
    assert weights_of(job, 50) == weights_of(uninterrupted, 50)


@pytest.mark.slow
@pytest.mark.parametrize("has_torchrun", [True, False])
def test_a_second_signal_ends_a_process_at_once_except_under_torchrun(tmp_path: Path, has_torchrun: bool) -> None:
    job = write_job(tmp_path, steps=100_000, checkpoint_interval=100_000)
    environment = os.environ | ({"TORCHELASTIC_RUN_ID": "some"} if has_torchrun else {})
    command = [sys.executable, "-c", SLOW_SAVE, str(job)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        wait_for((job.parent / "metrics.jsonl").exists, 60, "metrics.jsonl")
        process.terminate()
        assert process.stdout is not None and process.stdout.readline() == b"saves\n"
        process.terminate()
        assert process.wait(60) == (INTERRUPTED_EXIT_CODE if has_torchrun else -signal.SIGTERM)


SLOW_SAVE = """
import sys, time
import lm.train.trainer
from lm.train.__main__ import main
save = lm.train.trainer.Trainer.save
lm.train.trainer.Trainer.save = lambda self: (print("saves", flush=True), time.sleep(2), save(self))
sys.exit(main(sys.argv[1:]))
"""


SLOW = """
import sys, time
import lm.train.trainer
from lm.train.__main__ import main
step = lm.train.trainer.Trainer.train_step
lm.train.trainer.Trainer.train_step = lambda *rest: (time.sleep(0.1), step(*rest))[1]
code = main(sys.argv[1:])
assert "torch._dynamo" not in sys.modules  # its import takes two seconds
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not the job of a training"),
        ("{}", "is not the job of a training"),
        ('{"config": 1}', "is not the job of a training"),
    ],
)
def test_a_bad_job_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    assert main([str(tmp_path / "job.json")]) == 2
    assert message in capsys.readouterr().err


def test_job_round_trip(tmp_path: Path) -> None:
    job = Job.read(write_job(tmp_path))
    assert asdict(job.model) == asdict(MODEL) and job.config.steps == 20
    assert Path(job.out).resolve() == (tmp_path / "out").resolve()
    assert Path(job.train[0]).resolve() == (tmp_path / "train.bin").resolve()


def test_checkpoints_are_not_resumed_after_the_data_was_rebuilt(tmp_path: Path) -> None:
    """Data is rebuilt because it was damaged, perhaps while the earlier attempt read it."""
    path = write_job(tmp_path)
    job = Job.read(path)
    assert has_same_inputs(path.parent, job)
    assert not has_same_inputs(path.parent, replace(job, train=[str(tmp_path / "other-attempt" / "train.bin")]))
    with path.open() as file:  # as `python -m lm.train` does
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not has_same_inputs(path.parent, job), "a training is running there"
    assert has_same_inputs(path.parent, job)
    path.unlink()
    assert not has_same_inputs(path.parent, job)
