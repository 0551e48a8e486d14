"""Several processes that train one model: the same losses as one process, and none of them outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint import newest_checkpoint
from lm.errors import UserError
from lm.processes import run_processes
from lm.train import Job
from lm.trainer import Interrupted
from tests.training import ROOT, rows_of, wait_until, write_job


def run_in_processes(
    job: Path, number: int, progress: Callable[[int], None] = lambda step: None, stopping: threading.Event | None = None
) -> None:
    run_processes(job, number, progress, stopping or threading.Event(), job.parent / "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of 50 steps in this process."""
    job = write_job(tmp_path_factory.mktemp("straight"), steps=50)
    Job.read(job).run()
    return rows_of(job.parent)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def test_two_processes_have_the_losses_of_one(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    job = write_job(tmp_path, steps=50, micro_batches=2)
    steps: list[int] = []
    run_in_processes(job, 2, steps.append)
    rows = rows_of(job.parent)
    assert len(losses(rows)) == 50
    assert losses(rows) == pytest.approx(losses(straight), rel=5e-6)
    assert rows[-1]["valid_loss"] == pytest.approx(straight[-1]["valid_loss"], rel=5e-6)
    result = json.loads((job.parent / "training.json").read_text())
    assert result["steps"] == 50 and result["valid_loss"] == pytest.approx(rows[-1]["valid_loss"], rel=0.05)
    assert steps == sorted(steps)


MANY_BUCKETS = """
import sys
import lm.distributed
lm.distributed._BUCKET = 5000
from lm.train import main
from lm.trainer import Trainer
step = Trainer._train_step
def checked(self, *rest):
    assert len(self.ddp._buckets) > 3
    return step(self, *rest)
Trainer._train_step = checked
sys.exit(main(sys.argv[1:]))
"""


def test_torchrun_does_the_same(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    job = write_job(tmp_path, steps=10)
    (tmp_path / "run.py").write_text(MANY_BUCKETS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, str(tmp_path / "run.py"), str(job)], env=environment, check=True, capture_output=True, timeout=120
    )
    # The learning rate falls over 10 steps here and over 50 there; the warm-up is the same.
    assert losses(rows_of(job.parent))[:4] == pytest.approx(losses(straight)[:4], rel=5e-6)


def test_asked_to_stop_they_save_and_go_on(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    job, stopping = write_job(tmp_path, steps=50), threading.Event()

    def progress(step: int) -> None:
        if step >= 3:
            stopping.set()

    with pytest.raises(Interrupted, match=r"stopped after step \d+ and saved"):
        run_in_processes(job, 2, progress, stopping)
    assert 3 <= len(losses(rows_of(job.parent))) < 50
    run_in_processes(job, 2)
    assert losses(rows_of(job.parent)) == pytest.approx(losses(straight), rel=5e-6)


def test_a_mistake_is_named(tmp_path: Path) -> None:
    job = write_job(tmp_path, batch_size=5)
    with pytest.raises(UserError, match=r"batch_size 5 must be a multiple of .* the 2 processes"):
        run_in_processes(job, 2)


def children_of(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text() if Path("/proc").exists() else True


PARENT = """
import sys, threading
from pathlib import Path
from lm.processes import run_processes
job = Path(sys.argv[1])
run_processes(job, 2, lambda step: print(step, flush=True), threading.Event(), job.parent / "metrics.jsonl")
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", Path, list[int]]]:
    """A process that trains in two others, which have made some steps of many."""
    job = write_job(tmp_path, steps=100_000, checkpoint_interval=5)
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
    for process in (parent.pid, *ranks):
        if is_alive(process):
            os.kill(process, signal.SIGKILL)
    parent.wait(timeout=60)
    for pipe in (parent.stdout, parent.stderr):
        if pipe:
            pipe.close()


Running = tuple["subprocess.Popen[str]", Path, list[int]]


def test_killed_parent_leaves_no_orphan(running: Running) -> None:
    parent, job, ranks = running
    parent.kill()
    parent.wait(timeout=10)
    assert wait_until(lambda: not any(map(is_alive, ranks)), 30)
    done = rows_of(job.parent)[-1]["step"]
    content = json.loads(job.read_text())
    content["config"]["steps"] = done + 5
    job.write_text(json.dumps(content))
    Job.read(job).run()
    rows = rows_of(job.parent)
    assert [row["step"] for row in rows] == list(range(1, done + 6)), "it went on, and lost no step"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_killed_process_ends_the_others(running: Running, hangs: bool) -> None:
    """Also the first, where it hangs until a message comes, as it may on a GPU."""
    parent, job, ranks = running
    if hangs:
        os.kill(ranks[0], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    assert wait_until(lambda: parent.poll() is not None, 30)
    assert not any(map(is_alive, ranks))
    assert newest_checkpoint(job.parent) is not None
    assert "process 1 of 2 ended with code -9" in parent.communicate()[1]
