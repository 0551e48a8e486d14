"""The CPU cores that this process may use, and how its threads wait for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.hardware.cpu import available_cpus, seconds_waiting_for_cores

V2 = "cpu.max"
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


JOB = "/slurm/uid_1000/job_7"


@pytest.mark.parametrize(
    ("membership", "quotas", "expected"),
    [
        (f"0::{JOB}\n", {f"slurm/uid_1000/job_7/{V2}": "300000 100000", f"slurm/{V2}": "max 100000"}, 3),
        (f"0::{JOB}\n", {f"slurm/uid_1000/job_7/{V2}": "max 100000", f"slurm/{V2}": "500000 100000"}, 5),
        (f"0::{JOB}\n", {f"slurm/other/{V2}": "100000 100000", V2: "1200000 100000"}, 12),
        (f"4:memory:/m\n3:cpu,cpuacct:{JOB}\n0::/\n", {f"cpu{JOB}/cpu.cfs_quota_us": "200000"}, 2),
        ("3:cpu,cpuacct:/docker/of-the-host\n", {"cpu/cpu.cfs_quota_us": "400000"}, 4),
        ("0::/a:b\n", {f"a:b/{V2}": "100000 100000"}, 1),
    ],
)
def test_the_quota_of_the_own_group_and_its_parents_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, quotas: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    (tmp_path / "membership").write_text(membership)
    for name, text in quotas.items():
        path = tmp_path / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.with_name("cpu.cfs_period_us").write_text("100000")
    assert available_cpus(tmp_path / "cgroups", tmp_path / "membership") == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_limits_the_count() -> None:
    script = "import os, lm.hardware.cpu; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "print(lm.hardware.cpu.available_cpus())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_waits_of_all_threads_are_added_up(tmp_path: Path) -> None:
    for name, text in {"1": "5000000000 1500000000 7", "2": "0 250000000 1", "3": "damaged", "4": "1 two 3"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "5").mkdir()  # the thread ends
    assert seconds_waiting_for_cores(tmp_path) == 1.75
    assert seconds_waiting_for_cores(tmp_path / "missing") == 0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system has no statistics of waits")
def test_a_thread_waits_while_another_program_holds_its_core() -> None:
    script = """
import os, subprocess, sys, time
from lm.hardware.cpu import seconds_waiting_for_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
    before, end = seconds_waiting_for_cores(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    print(seconds_waiting_for_cores() - before)
    other.kill()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert float(result.stdout) > 0.05


@pytest.mark.parametrize(
    ("set_by_user", "expected"),
    [
        ({}, "10000 None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "active"}, "None active"),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "9"}, "9 passive"),
    ],
)
def test_waiting_threads_of_torch_sleep_after_a_short_spin(set_by_user: dict[str, str], expected: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    others = {name: value for name, value in os.environ.items() if name not in names}
    script = f"import lm, os, sys; assert 'torch' not in sys.modules; print(*map(os.environ.get, {names}))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=others | set_by_user, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == expected
