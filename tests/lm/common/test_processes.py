"""Child processes, what they import, and actions that run every few seconds in a background thread."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lm.common.processes import ChildProcess, import_environment, run_periodically
from tests.helpers.limits import TIMEOUT_SCALE


@pytest.fixture
def foreign_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules that end the process that imports them."""
    for name in ("tokenize.py", "queue.py", "random.py", "lm/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("module", ["tokenize", "queue", "random", "lm.common.errors"])
@pytest.mark.usefixtures("foreign_directory")
def test_a_child_imports_no_module_of_the_working_directory(module: str) -> None:
    environment = {**os.environ, **import_environment()}
    command = [sys.executable, "-c", f"import {module}"]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    child = ChildProcess(module)
    child.connection.close()
    assert child.process.wait() != 99


def test_a_child_imports_what_this_process_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a change of the directory, and if only an import hook finds the project, as after pip install -e."""
    project = str(Path(__file__).parents[3])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_module.py").touch()
    monkeypatch.chdir(tmp_path)
    others = [path for path in sys.path if path and Path(path).resolve() != Path(project)]
    monkeypatch.setattr(sys, "path", ["", "own", *others])
    environment = {**os.environ, **import_environment()}
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-c", "import lm, own_module; print(lm.__file__, own_module.__file__)"]
    output = subprocess.run(
        command, env=environment, cwd=tmp_path / "other", capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [f"{project}/lm/__init__.py", f"{tmp_path}/own/own_module.py"]


def test_the_action_runs_until_the_block_ends() -> None:
    calls = threading.Semaphore(0)

    def act() -> bool:
        calls.release()
        return False

    with pytest.raises(KeyError), run_periodically(act, 0.01):
        for _ in range(3):
            assert calls.acquire(timeout=10 * TIMEOUT_SCALE)
        raise KeyError
    while calls.acquire(blocking=False):
        pass
    assert not calls.acquire(timeout=0.1)


def test_the_action_is_not_called_again_after_it_returned_true() -> None:
    calls = threading.Semaphore(0)

    def act() -> bool:
        calls.release()
        return True

    with run_periodically(act, 0.01):
        assert calls.acquire(timeout=10 * TIMEOUT_SCALE)
        assert not calls.acquire(timeout=0.1)


def test_a_short_block_makes_no_call_and_does_not_wait() -> None:
    started = time.monotonic()
    with run_periodically(lambda: bool(pytest.fail("called")), 1000):
        pass
    assert time.monotonic() - started < 10 * TIMEOUT_SCALE


def test_a_call_in_progress_finishes_before_the_block_is_left() -> None:
    is_called, results = threading.Event(), []

    def act() -> bool:
        is_called.set()
        time.sleep(0.2)
        results.append("finished")
        return True

    with run_periodically(act, 0.01):
        assert is_called.wait(10 * TIMEOUT_SCALE)
    assert results == ["finished"]
