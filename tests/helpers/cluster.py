"""A Dask cluster for tests, and a local S3 server. Each worker sees neither the checkout nor the driver's files."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lm.kernels.disk_cache import CACHE_DIR
from tests.helpers.deployed import free_port
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT

_S3_KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
_HIDE_AND_RUN = (
    'mount --make-rprivate / && for place in $HIDDEN; do mount -t tmpfs none "$place" || exit 1; done; exec "$@"'
)


@contextmanager
def s3_server(log: Path, host: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """Start a local S3 server with a bucket ``corpus``. Yields the environment in which s3fs uses it."""
    pytest.importorskip("moto.server", reason="moto, which plays S3, is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    port = free_port()
    environment = {**_S3_KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    with log.open("wb") as file:
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    try:
        bucket = urllib.request.Request(f"{environment['AWS_ENDPOINT_URL']}/corpus", method="PUT")

        def has_bucket() -> bool:
            try:
                return bool(urllib.request.urlopen(bucket).status == 200)
            except OSError:
                return False

        wait_for(has_bucket, 60, "S3 server")
        yield environment
    finally:
        process.kill()
        process.wait()


def s3_files(environment: dict[str, str]) -> Any:
    """Return the file system of :func:`s3_server`."""
    import s3fs

    return s3fs.S3FileSystem(
        key="testing",
        secret="testing",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
        use_listings_cache=False,
    )


class Installation:
    """A copy of the project for workers, and a cache with its compiled kernels."""

    def __init__(self, home: Path) -> None:
        self.code, self.cache = home / "code", home / "cache"
        for package in ("lm", "tasks", "flows", "textmill"):
            shutil.copytree(PROJECT / package, self.code / package, ignore=shutil.ignore_patterns("__pycache__"))

    def compile_kernels(self) -> None:
        """Compile the kernels of a pipeline run once for all workers. Those of this process are taken over."""
        environment = {**os.environ, "PYTHONPATH": str(self.code), "XDG_CACHE_HOME": str(self.cache)}
        run = partial(subprocess.run, cwd=self.code, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        folder = run([sys.executable, "-c", "from lm.kernels.disk_cache import CACHE_DIR; print(CACHE_DIR)"])
        shutil.copytree(CACHE_DIR, folder.stdout.strip(), ignore=shutil.ignore_patterns("*.lock"), dirs_exist_ok=True)
        run([sys.executable, "-m", "lm.compile_kernels", "--id-bits", "16"])


class Workers:
    """Processes of a cluster, each with its own home, and its own mount namespace that hides some directories."""

    def __init__(self, environment: dict[str, str], hidden: list[Path], installation: Installation) -> None:
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
            pytest.skip("mount namespaces are not allowed here")
        if any(Path(sys.executable).is_relative_to(place) for place in hidden):
            pytest.skip("the virtual environment lies in a directory that the workers must not see")
        self.home = Path(tempfile.mkdtemp(prefix="textmill-workers-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log = self.home / "log.txt"
        self._environment, self._hidden, self._installation = environment, hidden, installation

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a process that imports a copy of the project."""
        place = self.home / f"home-{len(self.processes)}"
        (place / "tmp").mkdir(parents=True)
        if self._installation.cache.exists():
            shutil.copytree(self._installation.cache, place / "cache")
        variables = {
            **os.environ,
            **self._environment,
            "HOME": str(place),
            "TMPDIR": str(place / "tmp"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "PREFECT_HOME": str(place / "prefect"),
            "PYTHONPATH": str(self._installation.code),
            "HIDDEN": " ".join(map(str, self._hidden)),
            **environment,
        }
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", _HIDE_AND_RUN, "sh", *command],
                cwd=place,
                env=variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            kill_group(process)
        shutil.rmtree(self.home, ignore_errors=True)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class DaskCluster(Workers):
    """A Dask scheduler, and workers of one thread each."""

    def __init__(self, environment: dict[str, str], hidden: list[Path], installation: Installation) -> None:
        pytest.importorskip("prefect_dask", reason="Dask is not installed")
        super().__init__(environment, hidden, installation)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._schedulers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        command = ["scheduler", "--host", "127.0.0.1", "--port", self.address.rpartition(":")[2], "--no-dashboard"]
        self.scheduler = self.start([sys.executable, "-m", "distributed.cli.dask_" + command[0], *command[1:]])
        self._schedulers.append(self.scheduler)

    def start_worker(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", self.address, "--nthreads", "1", "--no-nanny"]
        return self.start([*command, "--no-dashboard", "--death-timeout", "60", *options], **environment)

    def start_missing(self, workers: int) -> None:
        """Start the scheduler if it does not run, and workers until ``workers`` run."""
        if self.scheduler.poll() is not None:
            for process in self.processes:
                kill_group(process)
            self.start_scheduler()
        running = [process for process in self.workers if process.poll() is None]
        for _ in range(workers - len(running)):
            self.start_worker()
        self.wait_for_workers(workers)

    @property
    def workers(self) -> list[subprocess.Popen[bytes]]:
        """The worker processes, also those that have ended."""
        return [process for process in self.processes if process not in self._schedulers]

    def client(self) -> Any:
        from distributed import Client

        with suppress(OSError):  # on a busy machine the connection may be closed while it is opened
            return Client(self.address, timeout=60, set_as_default=False)
        return Client(self.address, timeout=60, set_as_default=False)

    def wait_for_workers(self, count: int) -> None:
        with self.client() as client:
            client.wait_for_workers(count, timeout=120)


class RayCluster(Workers):
    """A Ray node with four worker processes."""

    def __init__(self, environment: dict[str, str], hidden: list[Path], installation: Installation) -> None:
        pytest.importorskip("ray", reason="Ray is not installed")
        super().__init__(environment, hidden, installation)
        self.address = f"127.0.0.1:{free_port()}"
        ray = str(Path(sys.executable).parent / "ray")
        command = [ray, "start", "--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=4", "--block"]
        self.start([*command, "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"])
        wait_for(lambda: "Ray runtime started" in self.log.read_text(), 120, "Ray")


@contextmanager
def dask_cluster(
    environment: dict[str, str], hidden: list[Path], installation: Installation, workers: int
) -> Iterator[DaskCluster]:
    """Start a Dask cluster and wait until its workers are there."""
    with ExitStack() as stack:
        cluster = DaskCluster(environment, hidden, installation)
        stack.callback(cluster.close)
        for _ in range(workers):
            cluster.start_worker()
        cluster.wait_for_workers(workers)
        yield cluster
