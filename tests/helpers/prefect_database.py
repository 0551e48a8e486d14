"""The database of a Prefect server that starts for the first time. Its migrations run once for all tests."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import prefect
from filelock import FileLock

from lm.files.cache_dir import cache_directory


def place_database(path: Path) -> None:
    """Copy a database without runs to ``path``, where a server without one would need seconds for all migrations."""
    if path.exists():
        return
    folder = cache_directory() / "prefect"
    template = folder / f"{prefect.__version__}.db"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"), tempfile.TemporaryDirectory(dir=folder) as home:
        if not template.exists():
            environment = {name: value for name, value in os.environ.items() if "DATABASE" not in name}
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env=environment | {"PREFECT_HOME": home}, check=True, capture_output=True)
            Path(home, "prefect.db").replace(template)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(template, path)
