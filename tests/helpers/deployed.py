"""Prefect servers, deployments and workers for tests, started by ``textmill up`` or one by one."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, Log, TaskRun

from flows.config import PipelineConfig
from flows.deploy import Deployment, create_deployments
from lm.text.pretokenize import GPT2_PATTERN
from tests.helpers.kernel_cache import cache_with_kernels
from tests.helpers.limits import TIMEOUT_SCALE, wait_for
from tests.helpers.prefect_database import place_database
from tests.helpers.processes import PROJECT, processes_with_variable

STAGES = tuple(PipelineConfig().stage_names())  # of a run without optional ones
TEXTMILL = [sys.executable, "-c", "import sys; from textmill.cli.main import main; sys.exit(main())"]

TINY: dict[str, Any] = {
    "data": {"train": ["demo:400"]},
    "chunk": {"target_bytes": 30_000},
    "tokenizer": {"vocab_size": 300},
    "model": {"context_length": 16, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32},
    "train": {
        "steps": 20,
        "warmup_steps": 2,
        "batch_size": 2,
        "eval_interval": 10,
        "eval_sequences": 2,
        "sample_tokens": 4,
    },
    "sample": {"prompts": ["Once"], "max_new_tokens": 8},
}


def slow_to_encode(path: Path, chunks: int, chunk_bytes: int, threads: int) -> dict[str, Any]:
    """Return TINY with validation text that takes half a second per MB and thread to encode.

    The kernels do not know its pattern, and its words are too long for the cache of the Python implementation. Only the
    validation text is slow: it is not counted, so the stages before encode stay fast.
    """
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
    """A client of a Prefect server with deployments: it uses the ``prefect`` command and the API, as a user does."""

    def __init__(self, home: Path, port: int, environment: dict[str, str]) -> None:
        self.home, self.port = home, port
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {**os.environ, **environment, "PREFECT_API_URL": f"{self.url}/api"}
        self.client = SyncPrefectClient(f"{self.url}/api")

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the ``prefect`` command."""
        return subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=PROJECT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300 * TIMEOUT_SCALE,
            check=False,
        )

    def textmill(self, *arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
        """Run ``textmill`` in a directory."""
        return subprocess.run(
            [*TEXTMILL, *arguments],
            cwd=directory,
            env={**self.environment, "PYTHONPATH": str(PROJECT)},
            capture_output=True,
            text=True,
            timeout=300 * TIMEOUT_SCALE,
            check=False,
        )

    def run(self, deployment: str, **parameters: Any) -> subprocess.CompletedProcess[str]:
        """Run ``prefect deployment run pipeline/DEPLOYMENT -p … --watch``."""
        return self.prefect("deployment", "run", f"pipeline/{deployment}", *_options(parameters), "--watch")

    def start(self, deployment: str, **parameters: Any) -> UUID:
        """Start a run without waiting for its end, and return its id."""
        found = self.client.read_deployment_by_name(f"pipeline/{deployment}")
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def flow_run(self, run_id: UUID) -> FlowRun:
        return self.client.read_flow_run(run_id)

    def is_final(self, run_id: UUID) -> bool:
        state = self.flow_run(run_id).state
        return state is not None and state.is_final()

    def latest(self) -> FlowRun:
        """Return the run that was created last."""
        return max(self.client.read_flow_runs(), key=attrgetter("created"))

    def task_runs(self, run_id: UUID) -> list[TaskRun]:
        return self.client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])), limit=200)

    def logs(self, run_id: UUID) -> list[Log]:
        """Return the log of a run and of its tasks."""
        return self.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])), limit=200)

    def states(self, run_id: UUID) -> dict[str, str]:
        """Return the name of each task run's state, by the name of the task run."""
        return {run.name: run.state_name or "" for run in self.task_runs(run_id)}

    def processes(self, run_id: UUID) -> list[int]:
        """Return the ids of the processes of a run: the flow's own and its children's."""
        return processes_with_variable("PREFECT__FLOW_RUN_ID", str(run_id))


def _options(parameters: dict[str, Any]) -> list[str]:
    return [word for name, value in parameters.items() for word in ("-p", f"{name}={json.dumps(value)}")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server(Deployed):
    """A Prefect server that a test can kill and start again."""

    def __init__(self, home: Path, **environment: str) -> None:
        super().__init__(home, free_port(), own_environment(home, **environment))
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (home / "services.log").open("w", encoding="utf-8")
        self.start_missing("server")

    def start_missing(self, *names: str) -> None:
        """Start ``server``, ``worker`` and ``gpu worker`` if they are named and do not run."""
        for name in names:
            if name not in self.services or self.services[name].poll() is not None:
                port = ["--host", "127.0.0.1", "--port", str(self.port)]
                pool = "gpu" if name == "gpu worker" else "local"
                command = ["server", "start", *port] if name == "server" else ["worker", "start", "--pool", pool]
                self.services[name] = subprocess.Popen(
                    [sys.executable, "-m", "prefect", "--no-prompt", *command],
                    cwd=PROJECT,
                    env=self.environment,
                    stdout=self._log,
                    stderr=self._log,
                )
                wait_for(lambda: self.client.api_healthcheck() is None, 240, "Prefect server")

    def kill(self, names: Collection[str], run_id: UUID | None = None) -> None:
        """Send SIGKILL to any of ``flow`` (the processes of the run), ``worker`` and ``server``."""
        services = [self.services[name] for name in names if name in self.services]
        for service in services:
            service.kill()
        for process_id in self.processes(run_id) if run_id and "flow" in names else []:
            os.kill(process_id, signal.SIGKILL)
        for service in services:
            service.wait()

    def close(self) -> None:
        """End the worker and the server. A worker does not always stop by itself if its server was killed before."""
        self.kill(list(self.services))
        self._log.close()


class Services(Server):
    """A Prefect server with the deployment ``full`` and a worker that a test can kill and start again, one by one."""

    def __init__(self, home: Path, **environment: str) -> None:
        super().__init__(home, PREFECT_WORKER_QUERY_SECONDS="2", **environment)
        create_deployments(f"{self.url}/api", [Deployment("full", "All stages.", ["textmill", "full"])])
        self.start_missing("worker")


def own_environment(home: Path, **environment: str) -> dict[str, str]:
    """Return ``environment`` and the variables that put all files of Prefect and of the project's cache under ``home``.

    An empty database of Prefect is there already, unless ``environment`` names another one.
    """
    if "PREFECT_API_DATABASE_CONNECTION_URL" not in environment:
        place_database(home / "prefect" / "prefect.db")
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "XDG_CACHE_HOME": cache_with_kernels(home / "cache"),
        "PREFECT_LOGGING_LEVEL": "INFO",  # conftest.py sets CRITICAL
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # telemetry fails without a network
        **environment,
    }


@contextmanager
def deployed(home: Path, **environment: str) -> Iterator[Deployed]:
    """Start ``textmill up`` with its own home directory, and stop it with SIGINT."""
    environment = own_environment(home, **environment)
    port = free_port()
    log_path = home / "up.log"
    with log_path.open("w", encoding="utf-8") as log:
        command = [*TEXTMILL, "up", f"--port={port}"]
        process = subprocess.Popen(command, cwd=PROJECT, env={**os.environ, **environment}, stdout=log, stderr=log)

    def is_ready() -> bool:
        output = log_path.read_text(encoding="utf-8")
        assert process.poll() is None, output
        return "Ctrl-C stops" in output

    try:
        wait_for(is_ready, 300, "textmill up")
        yield Deployed(home, port, environment)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120 * TIMEOUT_SCALE)
