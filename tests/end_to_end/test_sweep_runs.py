"""A sweep of twenty points that is killed, or runs on a Dask cluster, has the table of one that is left alone."""

import csv
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from lm.hardware.cpu import available_cpus
from tests.helpers.deployed import TEXTMILL, TINY, Server
from tests.helpers.kernel_cache import cache_with_kernels
from tests.helpers.limits import TIMEOUT_SCALE, wait_for
from tests.helpers.processes import PROJECT

pytestmark = [pytest.mark.server, pytest.mark.long]

POINTS = 20
ONE_THREAD = ["--execution.threads", "1"]  # the number of threads decides the last digits


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sections = {name: value for name, value in TINY.items() if name != "sample"}
    options = {f"{section}.{name}": value for section, part in sections.items() for name, value in part.items()}
    axes = [
        {"option": "train.max_lr", "values": [0.001, 0.003, 0.01, 1e12]},  # the last one diverges
        {"option": "train.seed", "values": [0, 1, 2, 3, 4]},
    ]
    path = tmp_path_factory.mktemp("sweep") / "twenty.yaml"
    path.write_text(yaml.safe_dump({"set": options | {"train.sample_tokens": 0}, "axes": axes}))
    return path


def start(server: Server, file: Path, root: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [*TEXTMILL, "sweep", str(file), "--root", str(root), *(options or ONE_THREAD)]
    log = (root.parent / f"{root.name}.log").open("ab")
    environment = server.environment | {"XDG_CACHE_HOME": cache_with_kernels(root.parent / "cache")}  # slots of its own
    return subprocess.Popen(command, cwd=PROJECT, env=environment, stderr=log, stdout=log, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", root: Path) -> list[dict[str, str]]:
    """Wait for the end, and return the table."""
    code = process.wait(600 * TIMEOUT_SCALE)
    log = (root.parent / f"{root.name}.log").read_text()
    assert code == 0, log
    assert "Traceback" not in log
    (path,) = root.glob("sweep/*/*/table.csv")
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def table(server: Server, file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The table of a sweep that trains one point after the other."""
    root = tmp_path_factory.mktemp("alone") / "root"
    rows = finish(start(server, file, root), root)
    assert [row["state"] for row in rows] == ["finished"] * 15 + ["diverged"] * 5
    return rows


def test_dask(server: Server, file: Path, table: list[dict[str, str]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    options = ["--execution.runner", "dask", "--execution.max_trainings", str(available_cpus())]  # a thread each
    assert finish(start(server, file, root, *options), root) == table
    states = server.states(server.latest().id)
    assert sum(name.startswith("trial ") for name in states) > 5
    assert set(states.values()) <= {"Completed", "Cached"}


def test_kills_at_three_moments(server: Server, file: Path, table: list[dict[str, str]], tmp_path: Path) -> None:
    root = tmp_path / "root"

    def count(pattern: str) -> Callable[[], int]:
        return lambda: len(list(root.glob(pattern)))

    shards, trainings = count("encode/*/manifest.json"), count("train/*/*/metrics.jsonl")
    moments = (shards, lambda: trainings() >= 4, lambda: trainings() >= 12)
    finished: set[Path] = set()
    for moment in moments:
        process = start(server, file, root)
        wait_for(moment, 300, "the moment of the kill")
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = set(root.glob("trial/*/manifest.json"))
        assert finished <= now and len(now) < POINTS
        finished = now
    times = {path: path.stat().st_mtime_ns for path in finished}
    assert finish(start(server, file, root), root) == table
    assert times == {path: path.stat().st_mtime_ns for path in finished}, "a finished point was trained again"
