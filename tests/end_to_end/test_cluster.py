"""The pipeline on a Dask cluster of processes that share only an S3 server and Prefect's server with the driver.

The tests of killed workers run ``TEXTMILL_CLUSTER_ROUNDS`` times (default 1).
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import GPT2_PATTERN
from tests.helpers.cluster import DaskCluster, Installation, RayCluster, dask_cluster, kill_group, s3_files, s3_server
from tests.helpers.deployed import TEXTMILL, Server
from tests.helpers.limits import TIMEOUT_SCALE, wait_for
from tests.helpers.processes import PROJECT
from textmill.cli.main import main

pytestmark = pytest.mark.server

ROUNDS = int(os.environ.get("TEXTMILL_CLUSTER_ROUNDS", "1"))
SLOW_PATTERN = f"(?:{GPT2_PATTERN})"  # the kernels do not know it
STOP_SECONDS = 15
PIPELINE = ("run", "--until", "encode", "--tokenizer.vocab_size", "600")
CURATE = {
    "filter.rules": "{gopher_min_alphabetic_words: 0.6}",
    "filter.masks": "[email]",
    "deduplicate.equal": "true",
    "deduplicate.jaccard_threshold": "0.7",
    "deduplicate.repeats": "paragraph",
    "decontaminate.validation": "true",
}


@dataclass
class Site:
    """A Prefect server and an S3 server, a directory for the files of the driver, and the code of the workers."""

    server: Server
    s3: dict[str, str]
    home: Path
    installation: Installation

    def __post_init__(self) -> None:
        self.fs = s3_files(self.s3)
        (self.home / "tmp").mkdir()

    @property
    def worker_environment(self) -> dict[str, str]:
        return {**self.s3, "PREFECT_API_URL": self.server.environment["PREFECT_API_URL"]}

    def cluster(self, workers: int, installation: Installation | None = None) -> Any:
        """Start a cluster whose workers see neither the checkout nor the files of the driver."""
        return dask_cluster(self.worker_environment, [PROJECT, self.home], installation or self.installation, workers)

    def start(self, root: str, *options: str, flow: Sequence[str] = PIPELINE) -> "subprocess.Popen[str]":
        """Start a flow of ``textmill``. Its temporary files are where no worker sees them."""
        environment = {**self.server.environment, **self.s3, "TMPDIR": str(self.home / "tmp")}
        command = [*TEXTMILL, *flow, "--root", root, *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, root: str, *options: str, code: int = 0, flow: Sequence[str] = PIPELINE) -> str:
        """Run a flow to its end, and return its log."""
        return finish(self.start(root, *options, flow=flow), code)

    def outputs(self, root: str) -> dict[str, list[Any]]:
        """Return the files with their digests of all outputs, by stage."""
        if root.startswith("s3://"):
            manifests = [json.loads(self.fs.cat_file(path)) for path in self.fs.glob(f"{root}/*/*/manifest.json")]
        else:
            manifests = [json.loads(path.read_bytes()) for path in Path(root).glob("*/*/manifest.json")]
        outputs: dict[str, list[Any]] = {}
        for manifest in sorted(manifests, key=lambda manifest: manifest["key"]):
            outputs.setdefault(manifest["stage"], []).append((manifest["key"], manifest["files"]))
        return outputs

    def attempts(self, root: str, stage: str) -> dict[str, str]:
        """Return the current attempt of each output of a stage by its key."""
        paths = self.fs.glob(f"{root}/{stage}/*/manifest.json")
        return {path.split("/")[-2]: json.loads(self.fs.cat_file(path))["attempt"] for path in paths}


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    output, errors = process.communicate(timeout=400 * TIMEOUT_SCALE)
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    return errors


def on_dask(address: str) -> list[str]:
    return ["--execution.runner", "dask", "--execution.address", address]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("driver")
    installation = Installation(tmp_path_factory.mktemp("installation"))
    installation.compile_kernels()
    with s3_server(home / "s3.log") as environment:
        server = Server(home)
        try:
            yield Site(server, environment, home, installation)
        finally:
            server.close()


@pytest.fixture(scope="module")
def _cluster(site: Site) -> Iterator[DaskCluster]:
    with site.cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: DaskCluster) -> DaskCluster:
    """A cluster of three workers, which a test may kill."""
    _cluster.start_missing(3)
    return _cluster


@pytest.fixture(scope="module")
def text(site: Site) -> str:
    """A source of 3 MB in the bucket."""
    site.fs.pipe_file("corpus/text.txt", "".join(demo_stories(9000)).encode())
    return "s3://corpus/text.txt"


def options(text: str, target_bytes: int = 200_000, pattern: str = "") -> list[str]:
    """Return the options of a run with about 15 chunks; with ``SLOW_PATTERN`` each takes seconds."""
    chosen = ["--tokenizer.pattern", pattern] if pattern else []
    return ["--data.train", json.dumps([text]), "--chunk.target_bytes", str(target_bytes), *chosen]


def test_workers_without_the_drivers_files_make_the_same_bytes(
    site: Site, cluster: DaskCluster, text: str, tmp_path: Path
) -> None:
    log = site.run("s3://corpus/same", *options(text), *on_dask(cluster.address))
    hosts = {
        json.loads(site.fs.cat_file(path))["made"]["run"]
        for path in site.fs.glob("corpus/same/encode-group/*/manifest.json")
    }
    assert len(hosts) == 1, log
    run = site.server.latest()
    site.run(str(tmp_path / "root"), *options(text))
    assert site.outputs("s3://corpus/same") == site.outputs(str(tmp_path / "root"))

    assert run.state_name == "Completed"
    states = site.server.states(run.id)
    assert {name.partition(" ")[0] for name in states} >= {
        "count",
        "encode-train",
        "encode-valid",
        "merge",
    }
    assert set(states.values()) <= {"Completed", "Cached"}
    messages = [line.message for line in site.server.logs(run.id)]
    assert sum("Running encode-group" in message for message in messages) > 10, "the workers send their log"
    artifacts = {artifact.key or "" for artifact in site.server.client.read_artifacts()}
    assert any(key.endswith("-encode") for key in artifacts)
    # A later run needs no worker.
    log = site.run("s3://corpus/same", *options(text), *on_dask("tcp://x:1"))
    assert "encode: cached" in log


@pytest.mark.slow
def test_curation_keeps_the_same_documents_on_workers(site: Site, cluster: DaskCluster, tmp_path: Path) -> None:
    stories = [*demo_stories(3000)]
    for number in range(3):  # each has copies of documents of the one before
        part = stories[number * 900 : number * 900 + 1200]
        site.fs.pipe_file(f"corpus/curate/{number}.txt", "".join(part).encode())
    mix = {f"part-{number}": {"paths": [f"s3://corpus/curate/{number}.txt"]} for number in range(3)}  # a group each
    command = ["curate", *(word for name, value in CURATE.items() for word in (f"--{name}", value))]
    chosen = ["--data.train", "[]", "--data.mix", json.dumps(mix)]
    site.run("s3://corpus/curated", *chosen, *on_dask(cluster.address), flow=command)
    site.run(str(tmp_path / "root"), *chosen, flow=command)
    outputs = site.outputs(str(tmp_path / "root"))
    assert len(outputs["filter-group"]) == 6 and len(outputs["export-group"]) >= 3
    assert site.outputs("s3://corpus/curated") == outputs


@pytest.mark.slow
def test_ray_makes_the_same_bytes(site: Site, text: str, tmp_path: Path) -> None:
    cluster = RayCluster(site.worker_environment, [PROJECT, site.home], site.installation)
    try:
        site.run("s3://corpus/ray", *options(text), "--execution.runner", "ray", "--execution.address", cluster.address)
    finally:
        cluster.close()
    run = site.server.latest()
    site.run(str(tmp_path / "root"), *options(text))
    assert site.outputs("s3://corpus/ray") == site.outputs(str(tmp_path / "root"))
    assert set(site.server.states(run.id).values()) <= {"Completed", "Cached"}


@pytest.mark.parametrize("stage", [pytest.param("count", marks=pytest.mark.long), "encode"])
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_killed_worker_costs_only_the_part_that_it_worked_on(
    site: Site, cluster: DaskCluster, text: str, stage: str, number: int
) -> None:
    root, group = f"s3://corpus/killed-{stage}-{number}", f"{stage}-group"
    rng = random.Random(number)
    process = site.start(root, *options(text, pattern=SLOW_PATTERN), *on_dask(cluster.address))
    wait_for(lambda: len(site.fs.glob(f"{root}/{group}/*/manifest.json")) > rng.randint(1, 8), 200, "some parts")
    before = site.attempts(root, group)
    kill_group(rng.choice([worker for worker in cluster.workers if worker.poll() is None]))
    finish(process)
    run = site.server.latest()
    after = site.attempts(root, group)
    assert before.items() <= after.items()
    # An attempt of the killed worker may have been uploaded in part.
    assert len(site.fs.glob(f"{root}/{group}/*/2*")) <= len(after) + 1
    assert run.state_name == "Completed"
    assert set(site.server.states(run.id).values()) <= {"Completed", "Cached"}


@pytest.mark.long
def test_a_lost_scheduler_is_named_and_the_same_command_goes_on(site: Site, text: str) -> None:
    root = "s3://corpus/scheduler"
    with site.cluster(2) as cluster:
        process = site.start(root, *options(text, pattern=SLOW_PATTERN), *on_dask(cluster.address))
        wait_for(lambda: len(site.fs.glob(f"{root}/count-group/*/manifest.json")) > 3, 200, "some parts")
        kill_group(cluster.scheduler)
        log = finish(process, 2)
        assert f"The Dask scheduler at {cluster.address} is lost" in log
    assert not site.fs.glob("corpus/scheduler/leases/*")
    run, before = site.server.latest(), site.attempts(root, "count-group")
    wait_for(lambda: "Running" not in site.server.states(run.id).values(), 30, "end of the task runs")
    assert run.state_name == "Failed"
    with site.cluster(2) as cluster:
        log = finish(site.start(root, *options(text, pattern=SLOW_PATTERN), *on_dask(cluster.address)))
    assert before.items() <= site.attempts(root, "count-group").items()


def test_a_cancelled_run_stops_its_workers(site: Site, cluster: DaskCluster, text: str) -> None:
    root = "s3://corpus/cancelled"
    with cluster.client() as client:
        wait_for(lambda: not client.call_stack(), 100, "end of the work of earlier tests")
        process = site.start(root, *options(text, 2_000_000, SLOW_PATTERN), *on_dask(cluster.address))
        wait_for(client.call_stack, 100, "work of a worker")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        process.communicate(timeout=60 * TIMEOUT_SCALE)
        wait_for(lambda: not client.call_stack(), STOP_SECONDS, "end of the work")
        print(f"stopped after {time.monotonic() - stopped:.1f} s")
    assert process.returncode == 130
    run = site.server.latest()
    wait_for(lambda: not {"Running", "Pending"} & set(site.server.states(run.id).values()), 30, "end of the task runs")
    assert not site.fs.glob("corpus/cancelled/leases/*")


def test_a_worker_with_other_code_is_refused(site: Site, text: str, tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    edited = installation.code / "lm" / "tokenizer" / "pretoken_counts.py"
    edited.write_text(edited.read_text() + "\n_EDITED = 1\n")
    with site.cluster(1, installation) as cluster:
        log = site.run("s3://corpus/other-code", *options(text), *on_dask(cluster.address), code=2)
    assert "has other code than the driver (code: " in log
    assert "Install the same version of textmill" in log


def test_a_worker_without_textmill_is_refused(site: Site, text: str, tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    # As if it was missing. Deleting it is not enough: an installation in the virtual environment may be visible.
    (installation.code / "tasks" / "__init__.py").write_text("raise ModuleNotFoundError('No module named tasks')")
    with site.cluster(1, installation) as cluster:
        log = site.run("s3://corpus/no-code", *options(text), *on_dask(cluster.address), code=2)
    assert "The cluster could not load a task" in log
    assert "Install the same version of textmill" in log


def test_what_a_cluster_cannot_do_is_refused(
    site: Site, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dask_config = pytest.importorskip("dask.config", reason="Dask is not installed")
    for name, value in site.s3.items():
        monkeypatch.setenv(name, value)

    def refusal(root: str, source: str, address: str) -> str:
        """Return the message of a run in this process."""
        assert main(["run", "--root", root, "--until", "encode", *options(source), *on_dask(address)]) == 2
        return capsys.readouterr().err

    with (
        temporary_settings({PREFECT_API_URL: site.server.environment["PREFECT_API_URL"]}),
        dask_config.set({"distributed.comm.timeouts.connect": "2s"}),  # 30 s by default
    ):
        assert "Use a root on an object store" in refusal(str(tmp_path), text, "tcp://x:1")
        (tmp_path / "text.txt").write_text("A story.")
        message = refusal("s3://corpus/x", str(tmp_path / "text.txt"), "tcp://x:1")
        assert "Copy it to an object store" in message
        message = refusal("s3://corpus/x", text, "tcp://127.0.0.1:9")
        assert "The cluster at tcp://127.0.0.1:9 does not answer" in message
