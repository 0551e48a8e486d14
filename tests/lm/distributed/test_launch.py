"""Training in several processes: the losses of one process, and no process outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lm.distributed.launch
from lm.checkpoint.training_checkpoint import newest_checkpoint
from lm.common.errors import DivergedError, MachineError, Stopped, TransientError, UserError
from lm.common.execution import ParallelKind
from lm.distributed.launch import run_processes
from lm.train.pretraining import Job
from lm.train.tracking import step_reporter
from tests.helpers.limits import wait_for
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ROOT, read_rows, small_trainer, train_here, write_job


def run_in_processes(
    job: Path,
    world_size: int,
    progress: Callable[[int], None] = lambda step: None,
    stop_event: threading.Event | None = None,
) -> None:
    poll = step_reporter(job.parent / "metrics.jsonl", progress)
    run_processes("lm.train", job, world_size, poll, stop_event or threading.Event())


@pytest.fixture(scope="module")
def expected_rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of 50 steps in this process."""
    job = write_job(tmp_path_factory.mktemp("expected"), steps=50)
    train_here(Job.read(job))
    return read_rows(job.parent)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def test_processes_run_on_a_system_without_waitid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS before Python 3.13."""
    monkeypatch.delattr(os, "waitid", raising=False)
    job = tmp_path / "job.json"
    job.write_text("{}")
    run_processes("json.tool", job, 1, lambda: None, threading.Event())


@pytest.mark.parametrize("module", ["tokenize", "json.tool"])
def test_processes_run_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    (tmp_path / "tokenize.py").write_text("raise SystemExit(99)")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "tool.py").write_text("raise SystemExit(99)")
    (tmp_path / "json" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.json"
    job.write_text("{}")
    run_processes(module, job, 1, lambda: None, threading.Event())


MANY_BUCKETS = """
import sys
import lm.distributed.sharding
lm.distributed.sharding.MAX_BUCKET_BYTES = 5000
from lm.train.__main__ import main
from lm.train.trainer import Trainer
train_step = Trainer.train_step
def checked_train_step(self, *rest):
    assert len(self.parallel.wrapper._buckets) > 3
    return train_step(self, *rest)
Trainer.train_step = checked_train_step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_torchrun_stopped_by_a_signal_saves_and_resumes(tmp_path: Path, expected_rows: list[dict[str, Any]]) -> None:
    """torchrun exits with 1; its processes finish the step, save and print the message.

    Until then they have the losses of one process, with gradients in many buckets.
    """
    job = write_job(tmp_path, steps=100_000, checkpoint_interval=100_000)
    metrics = job.parent / "metrics.jsonl"
    (tmp_path / "run.py").write_text(MANY_BUCKETS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "run.py"), str(job)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: metrics.exists() and len(read_rows(job.parent)) > 4, 120, "five rows")
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "SignalException" in output
    step = read_rows(job.parent)[-1]["step"]
    assert output.count(f"lm.train: The training was stopped after step {step:,} and saved in ") == 2
    newest = newest_checkpoint(job.parent)
    assert newest is not None and newest.name == f"step-{step:07d}"
    # The warm-up is the same. After it, the learning rate decays over more than 50 steps.
    assert losses(read_rows(job.parent))[:4] == pytest.approx(losses(expected_rows)[:4], rel=5e-6)
    content = json.loads(job.read_text())
    content["config"]["steps"] = step + 2
    job.write_text(json.dumps(content))
    train_here(Job.read(job))
    assert [row["step"] for row in read_rows(job.parent)] == list(range(1, step + 3)), "no step is lost"


def test_processes_meet_through_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through a port, which another program could take first. The file is deleted at the end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(
        lm.distributed.launch,
        "_Worker",
        lambda module, job_path, environment, group: pytest.fail(json.dumps(environment)),
    )
    with pytest.raises(BaseException, match="TEXTMILL_RENDEZVOUS") as caught:
        run_in_processes(tmp_path / "job.json", 2)
    assert "MASTER_PORT" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ([(2, "a mistake"), (2, "a mistake")], UserError, "^a mistake$"),
        ([(None, ""), (2, "no memory")], UserError, "^Training process 1 of 2: no memory$"),
        ([(74, "no space left"), (2, "no memory")], UserError, "^Training process 1 of 2: no memory$"),
        ([(74, "no space left")], MachineError, "^no space left$"),
        ([(65, "diverged"), (65, "diverged")], DivergedError, "^diverged$"),
        ([(75, "saved"), (75, "saved")], Stopped, "^saved$"),
        ([(74, "a broken pipe"), (-9, "")], TransientError, "^Training process 1 of 2 ended with code -9"),
        ([(0, ""), (3, "a bug")], MachineError, r"(?s)^Training process 1 of 2 ended with code 3.*some output.*a bug$"),
    ],
)
def test_the_end_of_a_process_is_the_error(tmp_path: Path, ends: Any, error: type[Exception], message: str) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps(ends))
    with pytest.raises(error, match=message) as caught:
        run_processes("tests.helpers.failing_rank", job, len(ends), lambda: None, threading.Event())
    assert type(caught.value) is error


def test_a_batch_that_the_processes_cannot_divide_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.train.trainer.get_data_world_size", lambda: 2)
    with pytest.raises(UserError, match=r"batch_size 5 must be a multiple of .* the 2 processes"):
        small_trainer(tmp_path, batch_size=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [*(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "zero1", "zero2")), "fsdp"]
)
def test_a_training_goes_on_after_a_lack_of_memory_and_after_a_stop(
    tmp_path: Path, expected_rows: list[dict[str, Any]], parallel: ParallelKind
) -> None:
    """The process without memory is named. At the end, two processes have the losses of one."""
    job = write_job(tmp_path, parallel=parallel, steps=50)
    with pytest.raises(UserError, match=r"process 1 of 2: cpu is out of memory with micro-batches of 2 sequences"):
        run_processes("tests.helpers.out_of_memory", job, 2, lambda: None, threading.Event())
    newest = newest_checkpoint(job.parent)
    assert newest is not None and newest.name == "step-0000005"
    stop_event, steps = threading.Event(), list[int]()

    def progress(step: int) -> None:
        if step >= 8:
            stop_event.set()

    with pytest.raises(Stopped, match=r"stopped after step \d+ and saved"):
        run_in_processes(job, 2, progress, stop_event)
    assert 8 <= len(losses(read_rows(job.parent))) < 50
    run_in_processes(job, 2, steps.append)
    assert steps == sorted(steps)
    rows = read_rows(job.parent)
    assert losses(rows) == pytest.approx(losses(expected_rows), rel=1e-4)
    assert rows[-1]["valid_loss"] == pytest.approx(expected_rows[-1]["valid_loss"], rel=1e-4)
    result = json.loads((job.parent / "training.json").read_text())
    assert result["steps"] == 50 and result["valid_loss"] == pytest.approx(rows[-1]["valid_loss"], rel=0.05)


def children_of(pid: int) -> list[int]:
    result = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in result.stdout.split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").exists() else True


PARENT = """
import logging, sys, threading
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
from lm.distributed.launch import run_processes
from lm.train.tracking import step_reporter
job = Path(sys.argv[1])
poll = step_reporter(job.parent / "metrics.jsonl", lambda step: print(step, flush=True))
run_processes("lm.train", job, 2, poll, threading.Event())
"""


@pytest.fixture
def running(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple["subprocess.Popen[str]", Path, list[int]]]:
    """A parent, its job and its two training processes, after a few of many steps. A parameter is the division."""
    job = write_job(
        tmp_path, parallel=getattr(request, "param", "auto"), steps=100_000, checkpoint_interval=5, keep_checkpoints=99
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(job)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stdout is not None
    for line in parent.stdout:
        if int(line) >= 7:
            break
    ranks = children_of(parent.pid)
    assert len(ranks) == 2
    yield parent, job, ranks
    for pid in (parent.pid, *ranks):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    parent.wait(timeout=60)
    for pipe in (parent.stdout, parent.stderr):
        if pipe:
            pipe.close()


Running = tuple["subprocess.Popen[str]", Path, list[int]]


@pytest.mark.slow
def test_killed_parent_leaves_no_orphan(running: Running) -> None:
    parent, job, ranks = running
    parent.kill()
    parent.wait(timeout=10)
    wait_for(lambda: not any(map(is_alive, ranks)), 30, "end of the processes")
    done = read_rows(job.parent)[-1]["step"]
    content = json.loads(job.read_text())
    content["config"]["steps"] = done + 5
    job.write_text(json.dumps(content))
    train_here(Job.read(job))
    rows = read_rows(job.parent)
    assert [row["step"] for row in rows] == list(range(1, done + 6)), "no step is lost"


@pytest.mark.long
def test_a_killed_process_ends_the_others(running: Running) -> None:
    parent, job, ranks = running
    os.kill(ranks[1], signal.SIGKILL)
    wait_for(lambda: parent.poll() is not None, 30, "end of the parent")
    assert not any(map(is_alive, ranks))
    assert newest_checkpoint(job.parent) is not None
    assert "process 1 of 2 ended with code -9" in parent.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "running", [*(pytest.param(name, marks=pytest.mark.long) for name in ("zero1", "zero2")), "fsdp"], indirect=True
)
def test_a_divided_training_goes_on_after_a_stop_and_a_kill(running: Running) -> None:
    """The stopped process is named, the killed one too, and a resumed training has the losses of one process.

    The kill ends rank 0 even if it hangs in a collective operation, as on a GPU.
    """
    parent, job, ranks = running
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(3)
    steps = len(read_rows(job.parent))
    os.kill(ranks[1], signal.SIGCONT)
    wait_for(lambda: len(read_rows(job.parent)) > steps, 30, "a step after the stop")
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    wait_for(lambda: parent.poll() is not None, 30, "end of the parent")
    output = parent.communicate()[1]
    assert f"process 1 is stopped by a signal, and the others wait for it. kill -CONT {ranks[1]} continues" in output
    assert "process 1 of 2 ended with code -9" in output
    assert not any(map(is_alive, ranks))
    newest = newest_checkpoint(job.parent)
    assert newest is not None
    content = json.loads(job.read_text())
    content["config"]["steps"] = int(newest.name.removeprefix("step-")) + 3
    job.write_text(json.dumps(content))
    run_ranks("tests.helpers.rank_jobs", job.parent.parent, str(job), world_size=2)
    rows = read_rows(job.parent)
    whole = write_job(job.parent.parent / "whole", steps=100_000, checkpoint_interval=100_000)
    stopping, reached = threading.Event(), len(rows)
    with pytest.raises(Stopped):
        train_here(Job.read(whole), lambda step: stopping.set() if step >= reached else None, stopping)
    assert losses(rows)[:-3] == pytest.approx(losses(read_rows(whole.parent))[: len(rows) - 3], rel=1e-4)
