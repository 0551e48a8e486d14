"""Shared setup of the rounds: a Prefect server, an object store, sources, a reference run, and processes of a flow."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import fsspec
import yaml

from tests.faults.flows import PIPELINE, TestedFlow
from tests.faults.object_store import KEYS, ObjectStore
from tests.helpers.cluster import DaskCluster, Installation
from tests.helpers.deployed import Server
from tests.helpers.limits import TIMEOUT_SCALE
from tests.helpers.processes import PROJECT

_POLL_SECONDS = 0.02
_HANG_SECONDS = 60.0 * TIMEOUT_SCALE
_FIRST_RUN_SECONDS = 600.0  # it compiles the kernels
_FEW_RETRIES = {"AWS_MAX_ATTEMPTS": "2", "PREFECT_CLIENT_MAX_RETRIES": "2"}  # the defaults take longer than a round
EXECUTION: dict[str, Any] = {"threads": 1, "compile": False, "device": "cpu", "log_interval": 1000}


def poll(seconds: float) -> Iterator[None]:
    """Yield every few milliseconds for ``seconds``. Time during which the machine is suspended does not count."""
    for _ in range(int(seconds / _POLL_SECONDS)):
        yield
        time.sleep(_POLL_SECONDS)


class Process:
    """A run of ``textmill``, with its output lines and the stages that have finished according to them."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str | None], zygote: subprocess.Popen[str], fifo: Path
    ) -> None:
        self.lines: list[str] = []
        self.finished: list[str] = []
        self.name = ""
        self.code: int | None = None
        """The exit code, or None while the process runs."""
        assert zygote.stdin is not None and zygote.stdout is not None
        os.mkfifo(fifo)
        zygote.stdin.write(json.dumps([arguments, str(fifo), environment]) + "\n")
        zygote.stdin.flush()
        self.id = int(zygote.stdout.readline())
        self._threads = [
            threading.Thread(target=self._read, args=(fifo,), daemon=True),
            threading.Thread(target=self._wait, args=(zygote.stdout,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, fifo: Path) -> None:
        with fifo.open(encoding="utf-8", errors="replace") as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                if match := re.match(r"\S+  (\w+)(?: finished in|: cached\.)", line):
                    self.finished.append(match.group(1))
                elif match := re.search(r"^\S+  Run (\S+):|Beginning flow run '(\S+)'", line):
                    self.name = match.group(1) or match.group(2)  # with a temporary server, only Prefect names the run
        fifo.unlink()

    def _wait(self, codes: IO[str]) -> None:
        self.code = int(codes.readline())

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for ``condition``. Return False if the process ended before it or hangs."""
        for _ in poll(_HANG_SECONDS):
            if condition():
                return True
            if self.code is not None:
                break
        return condition()

    def wait(self, seconds: float = _HANG_SECONDS) -> bool:
        """Wait for the end. Return False if the process hangs; it is then killed.

        It hangs if it prints no line for ``seconds``, or does not end in five times that. A run that waits half a
        minute for the lease of a dead one does not hang.
        """
        last_line, silent = 0, 0.0
        for _ in poll(5 * seconds):
            silent = 0.0 if len(self.lines) > last_line else silent + _POLL_SECONDS
            last_line = len(self.lines)
            if self.code is not None or silent > seconds:
                break
        has_ended = self.code is not None
        if not has_ended:
            os.kill(self.id, signal.SIGABRT)  # prints the stacks
            any(self.code is not None for _ in poll(5))
        self.kill()
        return has_ended

    def kill(self) -> None:
        """Kill the process if it runs, and read the rest of its output."""
        if self.code is None:
            os.killpg(self.id, signal.SIGKILL)
        for thread in self._threads:
            thread.join(10)

    def children(self) -> list[int]:
        """Return the ids of the processes in its session that still run."""
        return [pid for pid, (_, session) in _running_processes().items() if session == self.id]

    def temporary_servers(self) -> list[int]:
        """Return the ids of the temporary servers of Prefect that it has started and that still run."""
        children = [pid for pid, (parent, _) in _running_processes().items() if parent == self.id]
        return [pid for pid in children if b"uvicorn" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


def _running_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of each process of the machine, by its id."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            processes[int(path.parent.name)] = int(parent), int(session)
    return processes


class Bench:
    """The servers, sources and reference outputs that all rounds share."""

    def __init__(
        self, home: Path, flow: TestedFlow = PIPELINE, on_dask: bool = False, has_kernels: bool = False
    ) -> None:
        """With ``on_dask``, the runs of the rounds use a Dask cluster of two workers, and roots on the object store.

        With ``has_kernels``, the compiled kernels are expected in the cache. Without them, the seconds of the stages in
        which the faults are injected are too many.
        """
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.flow = home, flow
        self.server = Server(home)
        self.objects = ObjectStore()
        s3 = KEYS | {"AWS_ENDPOINT_URL": self.objects.url}
        self._environment = patch.dict(os.environ, s3)  # the checks read the store in this process
        self._environment.start()
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            cwd=PROJECT,
            env=self.server.environment | s3 | _FEW_RETRIES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        config = flow.write_inputs(home) | {"execution": EXECUTION}
        (home / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self.source = home / flow.source
        self.cluster: DaskCluster | None = None
        if not has_kernels:
            self._run_reference("first")  # compiles the kernels, so its times are not typical
        self.reference = self._run_reference("reference")
        record = json.loads((self.reference / "runs" / "latest.json").read_text())
        self.seconds = {stage: summary["seconds"] for stage, summary in record["stages"].items()}
        if on_dask:
            installation = Installation(home / "installation")
            installation.compile_kernels()
            api = {"PREFECT_API_URL": self.server.environment["PREFECT_API_URL"]}
            self.cluster = DaskCluster(s3 | api | _FEW_RETRIES, [], installation)
            self.repair_cluster()

    def repair_cluster(self) -> None:
        """Start the scheduler and the workers that do not run."""
        if self.cluster:
            self.cluster.start_missing(workers=2)

    def close(self) -> None:
        self._zygote.communicate()
        if self.cluster:
            self.cluster.close()
        self.objects.close()
        self.server.close()
        self._environment.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()

    def start(self, root: str, environment: dict[str, str | None] | None = None) -> Process:
        """Run the whole flow below ``root``, with changes of the environment (None: without the variable)."""
        arguments = [self.flow.command, "--config", str(self.home / "config.yaml"), "--root", root]
        if self.cluster:
            arguments += ["--execution.runner", "dask", "--execution.address", self.cluster.address]
            arguments += ["--execution.shared_root", "true"]  # the workers see the sources
        return Process(arguments, environment or {}, self._zygote, self.home / f"{time.monotonic_ns()}.fifo")

    def _run_reference(self, name: str) -> Path:
        run = self.start(str(self.home / name))
        run.wait(_FIRST_RUN_SECONDS)
        assert run.code == 0, run.output
        return self.home / name

    def bucket(self, name: str) -> str:
        """Return the URL of a root on the object store. All object stores of a process have the same contents."""
        fs, bucket = fsspec.filesystem("s3"), f"faults-{self.flow.command}"
        if not fs.exists(bucket):
            fs.mkdir(bucket)
        return f"s3://{bucket}/{name}"
