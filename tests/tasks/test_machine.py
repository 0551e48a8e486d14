"""The limit of trainings that run on a machine at the same time."""

import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from lm.common.errors import Stopped
from tasks.runtime.context import RunContext
from tasks.runtime.execution import Execution
from tasks.runtime.machine import training_slot
from tests.helpers.processes import python_process, read_line

TRAINING = """
import logging, sys
from tasks.runtime.execution import Execution
from tasks.runtime.context import RunContext
from tasks.runtime.machine import training_slot
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
with training_slot(RunContext("root", "run", execution=Execution(max_trainings=int(sys.argv[1])))):
    print("started", flush=True)
    sys.stdin.read()
"""


def close_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize("end", [close_input, subprocess.Popen.kill], ids=["ended", "killed"])
@pytest.mark.parametrize("limit", [1, 2])
def test_a_training_waits_while_too_many_run(
    limit: int, end: Callable[[subprocess.Popen[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        first, *others = [stack.enter_context(python_process(TRAINING, limit)) for _ in range(limit)]
        assert [read_line(process) for process in (first, *others)] == ["started"] * limit
        waiting = stack.enter_context(python_process(TRAINING, limit))
        assert read_line(waiting).startswith("Waiting for another training on this machine")
        end(first)
        assert read_line(waiting) == "started"
        assert [process.poll() for process in others] == [None] * (limit - 1)


def test_a_training_that_waits_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = RunContext(str(tmp_path), "run", execution=Execution(max_trainings=1))
    stopping = threading.Timer(0.2, run.stopping.set)
    with training_slot(run):
        stopping.start()
        with pytest.raises(Stopped), training_slot(run):
            raise AssertionError("the slot is taken")


def test_no_training_waits_with_a_limit_of_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:
        processes = [stack.enter_context(python_process(TRAINING, 0)) for _ in range(3)]
        assert [read_line(process) for process in processes] == ["started"] * 3
