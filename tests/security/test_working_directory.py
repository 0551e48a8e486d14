"""A run in a directory with Python files of a library's or of the project's names: none of them runs."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.deployed import TEXTMILL, TINY, own_environment

_NAMES = ("tokenize.py", "queue.py", "random.py", "lm/__init__.py", "torch.py")


@pytest.mark.slow
def test_a_run_in_two_processes_runs_no_file_of_the_working_directory(tmp_path: Path) -> None:
    """As console scripts do, the command looks for modules in a directory of its own."""
    foreign, marker, root = tmp_path / "foreign", tmp_path / "marker", tmp_path / "root"
    for name in _NAMES:
        path = foreign / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(marker)!r}, 'a').write(__file__ + chr(10))\nraise SystemExit(99)\n")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({**TINY, "execution": {"processes": 2}}))
    command = [TEXTMILL[0], "-P", *TEXTMILL[1:], "run", "--root", str(root), "--config", str(config)]
    environment = os.environ | own_environment(tmp_path)
    done = subprocess.run(command, cwd=foreign, env=environment, capture_output=True, text=True, check=False)
    assert not marker.exists(), marker.read_text()
    assert done.returncode == 0, done.stderr
    assert list((root / "train").glob("*/manifest.json"))
