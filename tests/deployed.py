"""A Prefect server, the deployments and a worker, started by ``textmill up`` for the tests that need the real thing."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, Log, TaskRun

from flows.pipeline import StageName
from lm.pretokens import GPT2_PATTERN

PROJECT = Path(__file__).parents[1]
STAGES = get_args(StageName)

TINY: dict[str, Any] = {
    "data": {"train": ["demo:400"]},
    "chunk": {"target_bytes": 30_000},
    "tokenizer": {"vocab_size": 300},
    "model": {"context_length": 16, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32},
    "train": {"steps": 20, "batch_size": 2, "eval_interval": 10, "eval_sequences": 2, "sample_tokens": 4},
    "sample": {"prompts": ["Once"], "max_new_tokens": 8},
}


def slow_to_encode(path: Path, chunks: int, chunk_bytes: int, threads: int) -> dict[str, Any]:
    """TINY with a validation text that takes half a second a MB to encode, one thread at a time: the pattern is not one
    that the kernels know, and its words are too long for the reference to remember. Validation text is not counted, so
    that what comes before is quick."""
    rng = random.Random(0)
    syllables = ["".join(rng.choices(["the", "and", "her", "then"], k=100)) for _ in range(1000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < chunks * (chunk_bytes - 5_000):
            file.write("".join(rng.choices(syllables, k=30)) + "<|endoftext|>\n")
    return TINY | {
        "data": {"train": ["demo:400"], "valid": [str(path)]},
        "chunk": {"target_bytes": chunk_bytes},
        "tokenizer": {**TINY["tokenizer"], "pattern": f"(?:{GPT2_PATTERN})"},
        "execution": {"threads": threads},
    }


class Deployed:
    """Talks to a running ``textmill up`` as a user does: by the ``prefect`` command and the API."""

    def __init__(self, home: Path, port: int, environment: dict[str, str]) -> None:
        self.home, self.port = home, port
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {**os.environ, **environment, "PREFECT_API_URL": f"{self.url}/api"}
        self.client = SyncPrefectClient(f"{self.url}/api")

    def prefect(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run the ``prefect`` command."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        return subprocess.run(
            command, cwd=PROJECT, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def run(self, deployment: str, **parameters: Any) -> subprocess.CompletedProcess[str]:
        """``prefect deployment run pipeline/DEPLOYMENT -p … --watch``."""
        return self.prefect("deployment", "run", f"pipeline/{deployment}", *_given(parameters), "--watch")

    def start(self, deployment: str, **parameters: Any) -> UUID:
        """Have the worker start a run, and return its id without waiting."""
        done = self.prefect("deployment", "run", f"pipeline/{deployment}", *_given(parameters))
        assert done.returncode == 0, done.stdout + done.stderr
        return UUID(done.stdout.partition("UUID: ")[2].split()[0])

    def flow_run(self, run_id: UUID) -> FlowRun:
        return self.client.read_flow_run(run_id)

    def latest(self) -> FlowRun:
        """The run that was made last."""
        return max(self.client.read_flow_runs(), key=lambda run: run.created)

    def task_runs(self, run_id: UUID) -> list[TaskRun]:
        return self.client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])), limit=200)

    def logs(self, run_id: UUID) -> list[Log]:
        """The log of a run and of its tasks."""
        return self.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])), limit=200)

    def states(self, run_id: UUID) -> dict[str, str]:
        """Name of each task run, and of its state."""
        return {run.name: run.state_name or "" for run in self.task_runs(run_id)}

    def processes(self, run_id: UUID) -> list[int]:
        """Ids of the processes whose environment names the run, the flow's own and its children's."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"PREFECT__FLOW_RUN_ID={run_id}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


def _given(parameters: dict[str, Any]) -> list[str]:
    return [word for name, value in parameters.items() for word in ("-p", f"{name}={json.dumps(value)}")]


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of ``condition``; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server(Deployed):
    """A server of its own that can be killed and started again."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, free_port(), own_environment(home))
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (home / "services.log").open("w", encoding="utf-8")
        self.start_missing("server")

    def start_missing(self, *names: str) -> None:
        """Start what does not run of ``server`` and ``worker``."""
        for name in names:
            if name not in self.services or self.services[name].poll() is not None:
                port = ["--host", "127.0.0.1", "--port", str(self.port)]
                command = ["server", "start", *port] if name == "server" else ["worker", "start", "--pool", "local"]
                self.services[name] = subprocess.Popen(
                    [sys.executable, "-m", "prefect", "--no-prompt", *command],
                    cwd=PROJECT,
                    env=self.environment,
                    stdout=self._log,
                    stderr=self._log,
                )
                wait_for(lambda: self.client.api_healthcheck() is None, 180, "the server")

    def kill(self, names: Collection[str], run_id: UUID | None = None) -> None:
        """SIGKILL at once any of flow (the processes of the run), worker and server."""
        processes = [self.services[name].pid for name in names if name in self.services]
        for process_id in processes + (self.processes(run_id) if run_id and "flow" in names else []):
            os.kill(process_id, signal.SIGKILL)
        for name in self.services.keys() & set(names):
            self.services[name].wait()

    def close(self) -> None:
        """Stop the worker, then the server."""
        for service in reversed(self.services.values()):
            service.terminate()
            service.wait(60)
        self._log.close()


class Services(Server):
    """A server and a worker of their own that are started and killed one by one."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        for arguments in (["work-pool", "create", "local", "--type", "process"], ["deploy", "--all"]):
            done = self.prefect(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr
        self.start_missing("worker")


def own_environment(home: Path) -> dict[str, str]:
    """Environment that keeps all that Prefect and the project remember below ``home``."""
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # tells of tests nobody asked for, and fails where there is no net
    }


@contextmanager
def deployed(home: Path, **environment: str) -> Iterator[Deployed]:
    """Start ``textmill up`` with a home of its own, and stop it as Ctrl-C does."""
    environment = own_environment(home) | environment
    port = free_port()
    log = (home / "up.log").open("w+", encoding="utf-8")
    command = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main())", "up", f"--port={port}"]
    process = subprocess.Popen(command, cwd=PROJECT, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:

        def is_ready() -> bool:
            said = (home / "up.log").read_text(encoding="utf-8")
            assert process.poll() is None, said
            return "Ctrl-C stops" in said

        wait_for(is_ready, 240, "textmill up")
        yield Deployed(home, port, environment)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        log.close()
