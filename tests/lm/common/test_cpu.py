"""The number of CPU cores that this process may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.common.cpu import available_cpus

VERSION_1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "damaged"}, None),
        (dict(zip(VERSION_1, ("-1\n", "100000\n"), strict=True)), None),
        (dict(zip(VERSION_1, ("50000\n", "100000\n"), strict=True)), 1),
    ],
)
def test_the_quota_of_a_container_limits_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cpus(tmp_path) == (quota or 64)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_limits_the_count() -> None:
    script = "import os, lm.common.cpu; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "print(lm.common.cpu.available_cpus())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "1\n"
