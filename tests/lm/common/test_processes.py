"""What the processes that this one starts import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.common.processes import import_environment, start_child


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
    with start_child(module) as child:
        child.communicate()
    assert child.returncode != 99


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
